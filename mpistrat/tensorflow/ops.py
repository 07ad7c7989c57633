"""Collectives on TensorFlow tensors: eager, in tf.function, and differentiable. Signatures and semantics are Horovod's.

Calls of different ranks meet by name. An unnamed eager call has the name of its operation; in a graph the name is made
of the tensor's, as in Horovod.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..api import ops as array_ops
from ..api import runtime
from ..api.process_sets import ProcessSet, global_process_set, require_global
from ..core.request import Adasum, Average, ReduceOp, Sum, allgather_request, broadcast_request, resolve_op, specs_of
from .bridge import cpu, gpu_graph
from .bridge.buckets import reduce_list
from .bridge.differentiable import Gradient, name_of_gradient, with_gradient
from .compression import Compressed, Compression

try:
    from tensorflow.python.eager.record import could_possibly_record
except ImportError:  # It is not public. Without it an eager call takes longer.
    def could_possibly_record() -> bool:
        """Whether a tape may be watching."""
        return True

Tensor = Any  # tf.Tensor or tf.IndexedSlices; TensorFlow has no type information


# There is nothing to convert here, and to find that out takes AutoGraph four seconds at the first trace.
without_autograph = tf.autograph.experimental.do_not_convert


@without_autograph
def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: Any = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Tensor:
    """Return the reduction of `tensor` over all ranks. Collective, differentiable.

    Args:
        tensor: A tensor or variable, the same shape and dtype on all ranks; or tf.IndexedSlices, which are gathered
            (Average and Sum only; duplicate indices are not merged, compression does not apply).
        average: Deprecated form of `op`: True is Average, False is Sum.
        device_dense: Accepted for Horovod's sake; the result is where `tensor` is.
        device_sparse: Likewise.
        compression: One of Compression, or any class with its two methods.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        name: By which the ranks meet.
        process_set: The global one.
        ignore_name_scope: Leave name scopes out of the name.

    Raises:
        MismatchError: On every rank, when the ranks disagree; eagerly it is a tf.errors.FailedPreconditionError too.
        InvalidRequestError: On this rank, for a dtype that `op` has no meaning for, or a name in flight; eagerly it is
            a tf.errors.InvalidArgumentError too.
        NotImplementedError: On this rank, for tf.IndexedSlices and another `op` than Average and Sum.
        EngineError: The engine has ended; eagerly it is a tf.errors.UnknownError too.
    """
    require_global(process_set)
    op = _op_for([tensor], op, average)
    tensor = _as_tensor(tensor)
    name = _wire_name("allreduce", tensor, name, ignore_name_scope)
    return _reduce([tensor], op, compression, prescale_factor, postscale_factor, name, patient=False)[0]


@without_autograph
def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: Any = Compression.none, op: ReduceOp | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[Tensor]:
    """As allreduce, for a list of tensors that are reduced together. Dtypes may differ; `[]` gives `[]`."""
    require_global(process_set)
    tensors = list(tensors)
    op = _op_for(tensors, op, average)
    if not tensors:
        return []
    converted = [_as_tensor(tensor) for tensor in tensors]
    name = _wire_name("grouped_allreduce", converted[0], name, ignore_name_scope)
    return _reduce(converted, op, compression, prescale_factor, postscale_factor, name)


@without_autograph
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return the ranks' tensors joined along the first dimension, which may differ among them. Collective.

    Its gradient is, as in Horovod, this rank's part of the *average* of the ranks' gradients.

    Raises:
        As allreduce.
    """
    require_global(process_set)
    tensor = _as_tensor(tensor)
    return _gather(_wire_name("allgather", tensor, name, ignore_name_scope), tensor)


@without_autograph
def broadcast(tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return root_rank's `tensor` on every rank. Collective; shape and dtype are the same on all ranks.

    Its gradient is, as in Horovod, the average of the ranks' gradients on the root, and zero elsewhere.

    Raises:
        As allreduce.
    """
    require_global(process_set)
    tensor = _as_tensor(tensor)
    name = _wire_name("broadcast", tensor, name, ignore_name_scope)

    return with_gradient(lambda value: broadcast_list([value], root_rank, name), BroadcastGradient(name, root_rank),
                         [tensor])[0]


@dataclass(frozen=True)
class BroadcastGradient(Gradient):
    """The average of the ranks' gradients on the root, and zero elsewhere."""

    name: str
    root_rank: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mean, = reduce_list(upstream, name_of_gradient(self.name), Average)
        return [mean if runtime.current().topology.rank == self.root_rank else mean * 0]


def barrier() -> None:
    """Return when every rank has called it. Collective; eager only."""
    array_ops.barrier()


@without_autograph
def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:
    """Assign root_rank's values to the variables of all ranks, in one exchange. Collective, eager or in tf.function.

    Args:
        variables: tf.Variables or Keras variables, as many and of the same shapes and dtypes on all ranks.
        root_rank: Whose values all ranks get.
        process_set: The global one.
        inplace: Accepted for Horovod's sake; assignment is in place in any case.
    """
    require_global(process_set)
    variables = list(variables)
    if not variables:
        return
    name = _wire_name("broadcast_variables", None, None, False)
    labels = tuple(getattr(v, "path", v.name) for v in variables)
    values = broadcast_list([tf.convert_to_tensor(v) for v in variables], root_rank, name, labels)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast_list(tensors: Sequence[tf.Tensor], root_rank: int, name: str,
                   labels: tuple[str, ...] = ()) -> list[tf.Tensor]:
    """Root_rank's values of dense tensors, in one exchange. Collective."""
    size, device = runtime.current().topology.size, gpu_graph.device_of(tensors)
    wait = cpu.Wait.ALWAYS if len(tensors) > 1 else cpu.Wait.IF_LAST
    run = partial(cpu.run, wait=wait) if device is None else partial(gpu_graph.run, device, name)
    return run(lambda arrays: broadcast_request(name, specs_of(arrays), root_rank, size, labels), tensors,
               [t.shape for t in tensors])


def _reduce(tensors: Sequence[Tensor], op: ReduceOp, compression: Any, prescale: float, postscale: float,
            name: str, patient: bool = True) -> list[Tensor]:
    """Reduce dense tensors in one go, and each tf.IndexedSlices by gathering."""
    results: list[Any] = [
        reduce_slices(tensor, op, prescale, postscale, f"{name}/{i}") if isinstance(tensor, tf.IndexedSlices) else None
        for i, tensor in enumerate(tensors)]
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    compressed = Compressed([tensors[i] for i in dense], compression)
    reduced = reduce_dense(compressed.tensors, op, prescale, postscale, name, patient=patient, wire=compressed.wire)
    for i, tensor in zip(dense, compressed.restored(reduced), strict=True):
        results[i] = tensor
    return results


def reduce_dense(tensors: Sequence[tf.Tensor], op: ReduceOp, prescale: float, postscale: float, name: str,
                 labels: Sequence[str] = (), patient: bool = True, wire: str = "") -> list[tf.Tensor]:
    """As buckets.reduce_list, and differentiable: the gradient is reduced as the value was."""
    if not tensors:
        return []

    def reduced(*values: tf.Tensor) -> list[tf.Tensor]:
        return reduce_list(values, name, op, prescale, postscale, labels, patient, wire=wire)

    return with_gradient(reduced, ReduceGradient(name, int(op), float(prescale), float(postscale), tuple(labels),
                                                 patient, wire), tensors)


@dataclass(frozen=True)
class ReduceGradient(Gradient):
    """Reduced as the value was. The fields are arguments of reduce_dense."""

    name: str
    op: int
    prescale: float
    postscale: float
    labels: Sequence[str]
    patient: bool
    wire: str

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return reduce_dense(upstream, ReduceOp(self.op), self.prescale, self.postscale, name_of_gradient(self.name),
                            self.labels, self.patient, self.wire)


def reduce_slices(slices: tf.IndexedSlices, op: ReduceOp, prescale: float, postscale: float,
                  name: str) -> tf.IndexedSlices:
    """All ranks' slices, one after the other; the values divided by the number of ranks for Average. Collective."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"tf.IndexedSlices can be reduced with Average or Sum. Received: {op.name}")
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError("prescale_factor and postscale_factor do not apply to tf.IndexedSlices; use "
                                  "sparse_as_dense=True, or tf.convert_to_tensor.")
    values = _gather(f"{name}/values", slices.values)
    indices = _gather(f"{name}/indices", slices.indices)
    if op is Average:
        values = values / tf.cast(runtime.current().topology.size, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _gather(name: str, tensor: tf.Tensor) -> tf.Tensor:
    return with_gradient(lambda value: gather_list([value], name), GatherGradient(name), [tensor])[0]


@dataclass(frozen=True)
class GatherGradient(Gradient):
    """This rank's part of the average of the ranks' gradients."""

    name: str

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        name, own = name_of_gradient(self.name), tf.shape(values[0], tf.int64)[:1]
        mean, = reduce_list(upstream, name, Average)
        rows, = gather_list([own], f"{name}/rows")
        before = tf.reduce_sum(rows[:runtime.current().topology.rank])
        return [mean[before:before + own[0]]]


def gather_list(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """The ranks' tensors, each joined along the first dimension, in one exchange. Collective; not differentiable."""
    device = gpu_graph.device_of(tensors)
    has_rows = all(t.shape.rank for t in tensors)
    run = cpu.run if device is None or not has_rows else partial(gpu_graph.gather, device, name)
    return run(lambda arrays: allgather_request(name, specs_of(arrays)), tensors,
               [tf.TensorShape([None]).concatenate(t.shape[1:]) if t.shape.rank else t.shape for t in tensors])


def _op_for(tensors: Sequence[Any], op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operation asked for, if tensors of these kinds can be reduced with it; raises as allreduce."""
    if average is None and op == Adasum and any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("The Adasum reduction does not currently support sparse tensors. As a workaround "
                                  "please pass sparse_as_dense=True to DistributedOptimizer")  # Horovod's words
    return resolve_op(op, average)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, tf.IndexedSlices):
        # In a graph, what was made outside of it becomes a tensor of the graph, which has a name.
        return tf.IndexedSlices(tf.convert_to_tensor(value.values), tf.convert_to_tensor(value.indices),
                                value.dense_shape)
    if isinstance(value, np.ndarray) and value.dtype == object:
        raise ValueError("an array of Python objects is no tensor; use broadcast_object or allgather_object.")
    return tf.convert_to_tensor(value)


def _wire_name(operation: str, tensor: Tensor | None, name: str | None, ignore_name_scope: bool) -> str:
    if tf.executing_eagerly():
        return name or operation
    if name is None:
        if isinstance(tensor, tf.IndexedSlices):
            tensor = tensor.values
        name = operation if tensor is None or _is_numbered(tensor) else f"{operation}_{tensor.name}"
    name = re.sub("[^a-zA-Z0-9_]", "_", name)
    unique = tf.compat.v1.get_default_graph().unique_name(name)
    return unique.rsplit("/", 1)[-1] if ignore_name_scope else unique


def _is_numbered(tensor: tf.Tensor) -> bool:
    """Whether this is an eager tensor that the graph captures. Its name is a number that each process counts alone."""
    return tensor.op.name.rsplit("/", 1)[-1].isdigit()
