"""Collectives on TensorFlow tensors: eager, in tf.function, and differentiable. Signatures and semantics are Horovod's.

The calls of different ranks are matched by name. An unnamed eager call has the name of its operation. In a graph the
default name is made from the tensor's name, as in Horovod.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from ..api import ops as array_ops
from ..api import runtime
from ..api.process_sets import ProcessSet, global_process_set, require_global
from ..core.request import Adasum, Average, ReduceOp, Sum, allgather_request, broadcast_request, resolve_op, specs_of
from .bridge import cpu, gpu_graph
from .bridge.buckets import reduce_list
from .bridge.differentiable import Gradient, name_of_gradient, with_gradient
from .compression import Compressed, Compression, Compressor
from .types import Tensor, TensorLike, Variable

Reducible: TypeAlias = TensorLike | tf.IndexedSlices

# There is nothing to convert here, and AutoGraph needs four seconds at the first trace to find that out.
without_autograph = tf.autograph.experimental.do_not_convert


@without_autograph
def allreduce(tensor: Reducible, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0, name: str | None = None,
              process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False) -> Tensor:
    """Return the reduction of `tensor` over all ranks. Collective, differentiable.

    Args:
        tensor: A tensor or variable, the same shape and dtype on all ranks; or tf.IndexedSlices, which are gathered
            (Average and Sum only; duplicate indices are not merged, compression does not apply).
        average: Deprecated form of `op`: True is Average, False is Sum.
        device_dense: Accepted for compatibility with Horovod, ignored. The result is on the device of `tensor`.
        device_sparse: Likewise.
        compression: One of Compression, or any class with two static methods: `compress(tensor)` returns the tensor to
            reduce and a context, and `decompress(tensor, context)` converts the result back.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        name: Identifies the collective on all ranks.
        process_set: The global one.
        ignore_name_scope: Leave name scopes out of the name.

    Raises:
        MismatchError: On every rank, when the ranks disagree. Eagerly it is a tf.errors.FailedPreconditionError too.
        InvalidRequestError: On this rank, for a dtype that `op` does not support, or a name in flight. Eagerly it is
            a tf.errors.InvalidArgumentError too.
        NotImplementedError: On this rank, for tf.IndexedSlices with an `op` other than Average and Sum.
        EngineError: The engine has ended. Eagerly it is a tf.errors.UnknownError too.
    """
    require_global(process_set)
    op = _op_for([tensor], op, average)
    tensor = _as_tensor(tensor)
    name = _wire_name("allreduce", tensor, name, ignore_name_scope)
    return _reduce([tensor], op, compression, prescale_factor, postscale_factor, name, may_wait=False)[0]


@without_autograph
def grouped_allreduce(tensors: Sequence[Reducible], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: type[Compressor] = Compression.none,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
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
def allgather(tensor: Reducible, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return the ranks' tensors, concatenated along the first dimension, whose extents may differ. Collective.

    As in Horovod, the gradient is this rank's part of the *average* of the ranks' gradients.

    Raises:
        As allreduce.
    """
    require_global(process_set)
    tensor = _as_tensor(tensor)
    return _gather(_wire_name("allgather", tensor, name, ignore_name_scope), tensor)


@without_autograph
def broadcast(tensor: Reducible, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return root_rank's `tensor` on every rank. Collective; shape and dtype are the same on all ranks.

    As in Horovod, the gradient is the average of the ranks' gradients on the root, and zero on other ranks.

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
    """The average of the ranks' gradients on the root, and zero on other ranks."""

    name: str
    root_rank: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mean, = reduce_list(upstream, name_of_gradient(self.name), Average)
        return [mean if runtime.current().topology.rank == self.root_rank else mean * 0]


def barrier() -> None:
    """Return when every rank has called it. Collective; eager only."""
    array_ops.barrier()


@without_autograph
def broadcast_variables(variables: Sequence[Variable], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:
    """Assign root_rank's values to the variables of all ranks, in one collective, eager or in tf.function. Collective.

    Args:
        variables: tf.Variables or Keras variables; the same number, shapes and dtypes on all ranks.
        root_rank: The rank whose values all ranks get.
        process_set: The global one.
        inplace: Accepted for compatibility with Horovod, ignored. Assignment is always in place.
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
    """Root_rank's values of dense tensors, in one collective. Collective."""
    size, device = runtime.current().topology.size, gpu_graph.device_of(tensors)
    wait = cpu.Wait.ALWAYS if len(tensors) > 1 else cpu.Wait.IF_LAST
    run = partial(cpu.run, wait=wait) if device is None else partial(gpu_graph.run, device, name)
    return run(lambda arrays: broadcast_request(name, specs_of(arrays), root_rank, size, labels), tensors,
               [t.shape for t in tensors])


def _reduce(tensors: Sequence[Tensor], op: ReduceOp, compression: type[Compressor], prescale: float, postscale: float,
            name: str, may_wait: bool = True) -> list[Tensor]:
    """Reduce dense tensors in one collective, and each tf.IndexedSlices by gathering."""
    def dense(values: list[tf.Tensor], _: list[str]) -> list[tf.Tensor]:
        compressed = Compressed(values, compression)
        return compressed.restored(reduce_dense(compressed.tensors, op, prescale, postscale, name, may_wait=may_wait,
                                                wire_dtype=compressed.wire_dtype))

    return reduce_mixed(tensors, op, name, dense, prescale, postscale)


def reduce_mixed(tensors: Sequence[Tensor], op: ReduceOp, name: str,
                 reduce: Callable[[list[tf.Tensor], list[str]], list[tf.Tensor]], prescale: float = 1.0,
                 postscale: float = 1.0, labels: Sequence[str] = (), numbers: Sequence[int] = ()) -> list[Tensor]:
    """Reduce dense tensors by one call of `reduce`, and each tf.IndexedSlices by gathering. Collective.

    Args:
        tensors: Dense tensors and tf.IndexedSlices.
        op: How to reduce.
        name: The name by which the ranks match the operation.
        reduce: Called with the dense tensors and their labels.
        prescale, postscale: For the slices, which refuse other factors than 1.
        labels: What users call the tensors, for error messages.
        numbers: The number of each tensor in the names of sparse ones, if that is not its place.
    """
    results = list(tensors)
    dense = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = reduce_slices(tensor, op, prescale, postscale, f"{name}/{numbers[i] if numbers else i}")
        else:
            dense.append(i)
    reduced = reduce([tensors[i] for i in dense], [labels[i] for i in dense] if labels else [])
    for i, tensor in zip(dense, reduced, strict=True):
        results[i] = tensor
    return results


def reduce_dense(tensors: Sequence[tf.Tensor], op: ReduceOp, prescale: float, postscale: float, name: str,
                 labels: Sequence[str] = (), may_wait: bool = True, wire_dtype: str = "") -> list[tf.Tensor]:
    """As buckets.reduce_list, but differentiable: the gradient is reduced in the same way as the value."""
    if not tensors:
        return []

    def reduced(*values: tf.Tensor) -> list[tf.Tensor]:
        return reduce_list(values, name, op, prescale, postscale, labels, may_wait, wire_dtype=wire_dtype)

    return with_gradient(reduced, ReduceGradient(name, int(op), float(prescale), float(postscale), tuple(labels),
                                                 may_wait, wire_dtype), tensors)


@dataclass(frozen=True)
class ReduceGradient(Gradient):
    """The gradient of reduce_dense: the same reduction. The fields are its arguments."""

    name: str
    op: int
    prescale: float
    postscale: float
    labels: Sequence[str]
    may_wait: bool
    wire_dtype: str

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return reduce_dense(upstream, ReduceOp(self.op), self.prescale, self.postscale, name_of_gradient(self.name),
                            self.labels, self.may_wait, self.wire_dtype)


def reduce_slices(slices: tf.IndexedSlices, op: ReduceOp, prescale: float, postscale: float,
                  name: str) -> tf.IndexedSlices:
    """All ranks' slices, concatenated. For Average the values are divided by the number of ranks. Collective."""
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
    """The ranks' tensors, each concatenated along the first dimension. One collective, not differentiable."""
    device = gpu_graph.device_of(tensors)
    has_rows = all(t.shape.rank for t in tensors)
    run = cpu.run if device is None or not has_rows else partial(gpu_graph.gather, device, name)
    return run(lambda arrays: allgather_request(name, specs_of(arrays)), tensors,
               [tf.TensorShape([None]).concatenate(t.shape[1:]) if t.shape.rank else t.shape for t in tensors])


def _op_for(tensors: Sequence[Reducible], op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The requested operation. Raises as allreduce if it does not support tensors of these kinds."""
    if average is None and op == Adasum and any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("The Adasum reduction does not currently support sparse tensors. As a workaround "
                                  "please pass sparse_as_dense=True to DistributedOptimizer")  # Horovod's words
    return resolve_op(op, average)


def _as_tensor(value: Reducible) -> Tensor:
    if isinstance(value, tf.IndexedSlices):
        # In a graph this turns tensors from outside into tensors of the graph, which have names.
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
    """Whether this is a captured eager tensor. Its name is a number, which may differ between processes."""
    return tensor.op.name.rsplit("/", 1)[-1].isdigit()
