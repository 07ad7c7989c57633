"""Collectives on TensorFlow tensors: eager, in tf.function, and differentiable. Signatures and semantics are Horovod's.

The calls of different ranks are matched by name. An unnamed eager call gets the name of its operation. An unnamed call
in a graph gets the name of its function and the number of the call in that function, see names.py.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from ..api import array_ops, runtime
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import MpistratError
from ..core.request import Adasum, Average, ReduceOp, ScaledOp, join_request, scaled_op
from ..core.tuning import JOINED_TENSOR_BYTES
from .bridge.names import given, made, of_gradient
from .bridge.program_order import enclosing_function, session_graph
from .bridge.tf_errors import as_tf_error
from .bridge.types import Reducible, Tensor, Variable
from .compression import Compression, Compressor
from .graph import cpu
from .graph.differentiable import Gradient, with_gradient
from .graph.reduce_spec import ReduceSpec
from .list_ops import as_tensor, broadcast_list, gather, number_of, reduce_dense, reduce_tensors, topology_of

logger = logging.getLogger(__name__)

MANY = 32  # 400 calls take 25 ms, so fewer than 32 should take less than 2 ms.
_counts: "weakref.WeakKeyDictionary[tf.Graph, Counter[int]]" = weakref.WeakKeyDictionary()
_hints: list[str] = []  # The functions with a hint; one is enough.


def allreduce(tensor: Reducible, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
              compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0, name: str | None = None,
              process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False) -> Tensor:
    """Return the reduction of `tensor` over all ranks. Collective, differentiable.

    Args:
        tensor: A tensor or variable, the same shape and dtype on all ranks; or tf.IndexedSlices, which are gathered
            (Average and Sum only; duplicate indices are not merged, compression does not apply).
        average: Deprecated form of `op`: True means Average, False means Sum.
        device_dense: Accepted for compatibility with Horovod, ignored. The result is on the device of `tensor`.
        device_sparse: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression, or any class with two static methods: `compress(tensor)` returns the tensor to
            reduce and a context, and `decompress(tensor, context)` converts the result back.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        name: Identifies the collective on all ranks.
        process_set: The ranks that take part. An average divides by their number.
        ignore_name_scope: Leave name scopes out of the name.

    Raises:
        MismatchError: On every rank, if the ranks' calls differ. Eagerly also a tf.errors.FailedPreconditionError.
        InvalidRequestError: On this rank, for a dtype that `op` does not support, or a name that is already in flight.
            Eagerly also a tf.errors.InvalidArgumentError.
        NotImplementedError: On this rank, for tf.IndexedSlices with an `op` other than Average and Sum.
        EngineError: The engine has ended. Eagerly also a tf.errors.UnknownError.
    """
    number = number_of(process_set, "Allreduce")
    scaled = _op_for([tensor], op, average, prescale_factor, postscale_factor)
    tensor = as_tensor(tensor)
    _count_call(tensor, number)
    name = name_of("allreduce", name, number, ignore_name_scope)
    spec = ReduceSpec(name, scaled, process_set=number, may_wait=False, has_gradient=True)
    return reduce_tensors([tensor], spec, compression)[0]


def grouped_allreduce(tensors: Sequence[Reducible], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: type[Compressor] = Compression.none,
                      op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: str | None = None) -> list[Tensor]:
    """As allreduce, for a list of tensors that are reduced together. Dtypes may differ. An empty list returns []."""
    number = number_of(process_set, "Allreduce")
    tensors = list(tensors)
    scaled = _op_for(tensors, op, average, prescale_factor, postscale_factor)
    if not tensors:
        return []
    converted = [as_tensor(tensor) for tensor in tensors]
    name = name_of("grouped_allreduce", name, number, ignore_name_scope)
    return reduce_tensors(converted, ReduceSpec(name, scaled, process_set=number, has_gradient=True), compression)


def allgather(tensor: Reducible, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension, which may differ in size. Collective.

    As in Horovod, the gradient is this rank's part of the *average* of the ranks' gradients. If a loss uses rows of all
    ranks (a contrastive loss) and its gradients are averaged again, they are 1/N of those of a single process. For the
    exact gradient use `allgather(size() * z - tf.stop_gradient((size() - 1) * z))`, which equals `allgather(z)`.

    Raises:
        As allreduce.
    """
    number = number_of(process_set, "Allgather")
    tensor = as_tensor(tensor)
    return gather([tensor], name_of("allgather", name, number, ignore_name_scope), number)[0]


def grouped_allgather(tensors: Sequence[Reducible], name: str | None = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    """As allgather, for a list of tensors in one collective. Dtypes may differ. An empty list returns []."""
    number = number_of(process_set, "Allgather")
    converted = [as_tensor(tensor) for tensor in tensors]
    if not converted:
        return []
    return gather(converted, name_of("grouped_allgather", name, number, ignore_name_scope), number)


def broadcast(tensor: Reducible, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Return root_rank's `tensor` on every rank. Collective; shape and dtype are the same on all ranks.

    `root_rank` is a rank of the job, not an index in the process set. As in Horovod, the gradient on the root is the
    average of the ranks' gradients; on other ranks it is zero.

    Raises:
        As allreduce.
    """
    number = number_of(process_set, "Broadcast")
    tensor = as_tensor(tensor)
    name = name_of("broadcast", name, number, ignore_name_scope)

    return with_gradient(partial(broadcast_list, root_rank=root_rank, name=name, process_set=number),
                         BroadcastGradient(name, root_rank, number), [tensor])[0]


@dataclass(frozen=True)
class BroadcastGradient(Gradient):
    """The average of the ranks' gradients on the root, and zero on other ranks."""

    name: str
    root_rank: int
    process_set: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mean, = reduce_dense(upstream, ReduceSpec(of_gradient(self.name, self.process_set), ScaledOp(Average),
                                                  process_set=self.process_set, has_gradient=True))
        return [mean if runtime.current().topology.rank == self.root_rank else mean * 0]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called barrier(). Collective; eager only."""
    array_ops.barrier(process_set=process_set)


def join(process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Wait until every rank of the set has called join(). Until then other ranks' collectives go on without this rank.

    See mpistrat.join. Collective. In a tf.function, join runs after all earlier collectives have been submitted.

    Returns:
        The rank that was the last to join, an int32 scalar, the same on all ranks.

    Raises:
        DuplicateNameError, EngineError: As mpistrat.join. In a tf.function, exceptions of tf.errors instead.
    """
    number = number_of(process_set, "Join")
    if tf.executing_eagerly():
        try:
            return tf.constant(array_ops.join(process_set), tf.int32)
        except MpistratError as error:
            raise as_tf_error(error) from error
    request = join_request(number)
    last, = cpu.run(request.name, lambda _: request, [tf.constant(0)], [tf.TensorShape([])], number)
    return tf.gather(tf.constant(topology_of(number).job_ranks, tf.int32), last)


def broadcast_variables(variables: Sequence[Variable], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> tf.Operation | None:
    """Assign root_rank's values to the variables of all ranks, in one collective, eager or in tf.function. Collective.

    Returns None; in the graph of a tf.compat.v1 session, the operation that assigns the values.

    Args:
        variables: tf.Variables or Keras variables; the same number, shapes and dtypes on all ranks.
        root_rank: The rank whose values all ranks get.
        process_set: The ranks that take part; `root_rank` is one of them.
        inplace: Accepted for compatibility with Horovod, ignored. Assignment is always in place.
    """
    assigned = _assign_from(root_rank, list(variables), None, process_set)
    return None if session_graph() is None else tf.group(*assigned, name="broadcast_variables")


def broadcast_(variables: Sequence[Variable], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    """As broadcast_variables, but returns the new values of the variables."""
    variables = list(variables)
    assigned = _assign_from(root_rank, variables, name, process_set)
    with nullcontext() if session_graph() is None else tf.control_dependencies(assigned):
        return [tf.identity(variable) for variable in variables]


def _assign_from(root_rank: int, variables: Sequence[Variable], name: str | None,
                 process_set: ProcessSet) -> list[object]:
    number = number_of(process_set, "Broadcast")
    if not variables:
        return []
    name = name_of("broadcast_variables", name, number)
    labels = tuple(getattr(v, "path", v.name) for v in variables)
    values = broadcast_list([tf.convert_to_tensor(v) for v in variables], root_rank, name, labels, number)
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def _count_call(tensor: object, process_set: int) -> None:
    """Count a call of allreduce with a small dense tensor. At the MANY-th call in one function, rank 0 logs a hint.

    One call for all tensors is much faster. mpistrat cannot merge the calls by itself: the first call returns before
    the second is traced, so the first tensor would have to wait for the last one. A program that waits for the first
    result between the calls, in a way that the graph does not show, would hang. A list of tensors from the user rules
    such a program out.
    """
    if tf.executing_eagerly() or not isinstance(tensor, tf.Tensor) or session_graph() is not None:
        return
    elements = tensor.shape.num_elements()
    if elements is None or elements * tensor.dtype.size >= JOINED_TENSOR_BYTES:
        return  # grouped_allreduce would not pack it together with others.
    function, topology = enclosing_function(), topology_of(process_set)
    counts = _counts.setdefault(function, Counter())
    counts[process_set] += 1
    if counts[process_set] == MANY and topology.rank == 0 and topology.size > 1 and not _hints:
        _hints.append(function.name)
        logger.warning("mpistrat: %s() calls allreduce separately for %d or more small tensors, which is slow. Reduce "
                       "them in one call: results = hvd.grouped_allreduce([...]).", function.name, MANY)


def _op_for(tensors: Sequence[Reducible], op: ReduceOp | None, average: bool | None, prescale: float,
            postscale: float) -> ScaledOp:
    """The requested reduction. Raises NotImplementedError for Adasum of tf.IndexedSlices; else as resolve_op."""
    if average is None and op == Adasum and any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("The Adasum reduction does not currently support sparse tensors. As a workaround "
                                  "please pass sparse_as_dense=True to DistributedOptimizer")  # Horovod's words
    return scaled_op(op, prescale, postscale, average)


def name_of(operation: str, name: str | None, process_set: int, ignore_name_scope: bool = False) -> str:
    """The name by which the ranks match a collective: `name`, or if it is None a new name for each call in a graph.

    Raises InvalidRequestError: As names.made.
    """
    return given(name, ignore_name_scope) if name else made(operation, process_set)
