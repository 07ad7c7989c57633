"""Collectives on TensorFlow tensors: eager, in tf.function, and differentiable. Signatures and semantics are Horovod's.

The calls of different ranks are matched by name. An unnamed eager call gets the name of its operation. An unnamed call
in a graph gets the name of its function and the number of the call in that function, see names.py.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from ..api import array_ops, runtime
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import InvalidRequestError, MpistratError
from ..core.request import (
    Adasum,
    Average,
    ReduceOp,
    ScaledOp,
    Sum,
    alltoall_request,
    broadcast_request,
    join_request,
    reducescatter_request,
    scaled_op,
    specs_of,
)
from ..core.rows import even_splits, no_int32_splits, rows_of_ranks
from ..core.tuning import JOINED_TENSOR_BYTES
from .bridge.arguments import checked
from .bridge.names import given, made, of_gradient
from .bridge.program_order import enclosing_function, session_graph
from .bridge.tf_errors import as_tf_error
from .bridge.types import OptionalGradient, Reducible, Tensor, Variable
from .compression import Compressed, Compression, Compressor
from .graph import cpu
from .graph.buckets import ReduceSpec
from .kerases import label_of
from .list_ops import (
    Gradient,
    as_tensor,
    broadcast_list,
    gather,
    number_of,
    place_in,
    reduce_dense,
    reduce_tensors,
    topology_of,
    with_gradient,
)
from .xla import context as xla

__all__ = [
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op",
    "reducescatter", "size_op",
]

logger = logging.getLogger(__name__)

MANY = 32  # 400 calls take 25 ms, so fewer than 32 should take less than 2 ms.
_counts: "weakref.WeakKeyDictionary[tf.Graph, Counter[int]]" = weakref.WeakKeyDictionary()
_hints: list[str] = []  # The functions with a hint; one is enough.
T = TypeVar("T")


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
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.
        name: Identifies the collective on all ranks.
        process_set: The ranks that take part. An average divides by their number.
        ignore_name_scope: Leave name scopes out of the name.

    Raises:
        MismatchError: On all ranks if their calls differ. In eager code it is also a tf.errors.FailedPreconditionError.
        InvalidRequestError: On this rank, for a dtype that `op` does not support, or a name that is already in flight.
            In eager code it is also a tf.errors.InvalidArgumentError.
        NotImplementedError: On this rank, for tf.IndexedSlices with an `op` other than Average and Sum.
        EngineError: The engine has ended. In eager code it is also a tf.errors.UnknownError.
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
    N ranks (a contrastive loss) and an optimizer averages the gradients again, the result is 1/N of the exact gradient.
    Then write `allgather(size() * z - tf.stop_gradient((size() - 1) * z))`, whose value equals that of `allgather(z)`.

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
    """The gradient of a broadcast: the average of the ranks' gradients on the root, and zero on other ranks."""

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
    """Wait until every rank of the set has called join(). Until then other ranks' collectives run without this rank.

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


@checked
def broadcast_variables(variables: Sequence[Variable], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> tf.Operation | None:
    """Assign root_rank's values to the variables of all ranks, in eager code or a tf.function. Collective.

    One collective sends all variables. Returns None; in a tf.compat.v1 graph, the operation that assigns the values.

    Args:
        variables: tf.Variables or Keras variables; the same number, shapes and dtypes on all ranks.
        root_rank: The rank whose values all ranks get.
        process_set: The ranks that take part; `root_rank` is one of them.
        inplace: Accepted for compatibility with Horovod, ignored. Assignment is always in place.
    """
    if hasattr(variables, "assign") or not isinstance(variables, Iterable):
        raise InvalidRequestError(f"broadcast_variables takes a list, as model.weights is. Received: {variables!r}")
    assigned = _assign_from(root_rank, list(variables), None, process_set)
    return None if session_graph() is None else tf.group(*assigned, name="broadcast_variables")


def broadcast_(variables: Sequence[Variable], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[tf.Tensor]:
    """As broadcast_variables, but returns the new values of the variables."""
    variables = list(variables)
    assigned = _assign_from(root_rank, variables, name, process_set)
    with nullcontext() if session_graph() is None else tf.control_dependencies(assigned):
        return [tf.identity(variable) for variable in variables]


_broadcast: "weakref.WeakValueDictionary[int, Variable]" = weakref.WeakValueDictionary()  # By id()


def was_broadcast(variable: Variable) -> bool:
    """Return whether this rank has taken part in a broadcast of a variable, or of the tf.Variable in it. Local."""
    return id(variable) in _broadcast or id(getattr(variable, "value", None)) in _broadcast


def _assign_from(root_rank: int, variables: Sequence[Variable], name: str | None,
                 process_set: ProcessSet) -> list[object]:
    number = number_of(process_set, "Broadcast")
    if not variables:
        broadcast_request("broadcast_variables", (), root_rank, topology_of(number).job_ranks)  # It checks the root.
        return []
    if others := [each for each in variables if not hasattr(each, "assign")]:
        raise InvalidRequestError("broadcast_variables takes variables, and hvd.broadcast takes a tensor. "
                                  f"Received: {others[0]!r}")
    _broadcast.update((id(variable), variable) for variable in variables)
    name = name_of("broadcast_variables", name, number)
    values = broadcast_list([tf.convert_to_tensor(v) for v in variables], root_rank, name,
                            tuple(map(label_of, variables)), number)
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def _count_call(tensor: object, process_set: int) -> None:
    """Count a call of allreduce with a small dense tensor. At the MANY-th call in one function, rank 0 logs a hint.

    One call of grouped_allreduce for all tensors is much faster. mpistrat cannot merge the calls by itself, because the
    first tensor would then have to wait for the last call. A program that needs the first result before the last call,
    in a way that the graph does not show, would hang. With a list of tensors there is only one call.
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
    """Return the operation and its factors. Raises as resolve_op; NotImplementedError: Adasum of tf.IndexedSlices."""
    if average is None and op == Adasum and any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("The Adasum reduction does not currently support sparse tensors. As a workaround "
                                  "please pass sparse_as_dense=True to DistributedOptimizer")  # Horovod's words
    return scaled_op(op, prescale, postscale, average)


def name_of(operation: str, name: str | None, process_set: int, ignore_name_scope: bool = False) -> str:
    """Return the name by which the ranks match a collective: from the user's `name`, or else from `operation`.

    Raises InvalidRequestError: As names.made, if `name` is None.
    """
    return given(name, ignore_name_scope) if name else made(operation, process_set)


# -- reducescatter and alltoall: tensors on a GPU are copied to the host, and the results back ------------------------


def reducescatter(tensor: Reducible, device_dense: str = "", compression: type[Compressor] = Compression.none,
                  op: ReduceOp | None = Average, name: str | None = None,
                  process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                  prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> tf.Tensor:
    """Return this rank's rows of the reduction of `tensor` over all ranks. Collective, differentiable.

    The rows are distributed in rank order. If they do not divide evenly, the first ranks get one row more each. As in
    Horovod, the gradient is allgather(gradients) for Average, and size() * allgather(gradients) for Sum.

    Args:
        tensor: A tensor of at least one dimension, the same shape and dtype on all ranks.
        device_dense: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression.
        op: Average (the default) or Sum.
        name: Identifies the collective on all ranks.
        process_set: The ranks that take part. An average divides by their number.
        ignore_name_scope: Leave name scopes out of the name.
        prescale_factor: Multiplies every value before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        As allreduce. Also InvalidRequestError for a scalar, and for an `op` other than Average and Sum.
    """
    return _reducescatter("reducescatter", [tensor], compression, op, process_set, prescale_factor, postscale_factor,
                          name, ignore_name_scope)[0]


def grouped_reducescatter(tensors: Sequence[Reducible], device_dense: str = "",
                          compression: type[Compressor] = Compression.none, op: ReduceOp | None = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, name: str | None = None,
                          ignore_name_scope: bool = False) -> list[tf.Tensor]:
    """As reducescatter, for a list of tensors in one collective. Dtypes may differ. An empty list returns []."""
    return _reducescatter("grouped_reducescatter", tensors, compression, op, process_set, prescale_factor,
                          postscale_factor, name, ignore_name_scope)


def _reducescatter(operation: str, tensors: Sequence[Reducible], compression: type[Compressor], op: ReduceOp | None,
                   process_set: ProcessSet, prescale: float, postscale: float, name: str | None,
                   ignore_name_scope: bool) -> list[tf.Tensor]:
    number = number_of(process_set, "Reducescatter")
    dense = [_dense(tensor, "reducescatter") for tensor in tensors]
    if not dense:
        return []
    name = name_of(operation, name, number, ignore_name_scope)
    scaled = scaled_op(op, prescale, postscale)
    compressed = Compressed(dense, compression, is_scattered=True, process_set=number)
    scattered = with_gradient(lambda values: _scatter_list(values, scaled, name, number),
                              ReduceScatterGradient(name, scaled, number), compressed.tensors)
    return compressed.restored(scattered)


def _scatter_list(tensors: Sequence[tf.Tensor], scaled: ScaledOp, name: str, process_set: int) -> list[tf.Tensor]:
    topology, shapes = topology_of(process_set), []
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape.rank and xla.is_compiled() else None  # XLA must know the shapes.
        own = None if rows is None else rows_of_ranks(rows, topology.size)[topology.rank]
        shapes.append(tf.TensorShape([own, *tensor.shape[1:]]) if tensor.shape.rank else tensor.shape)
    return cpu.run(name, lambda arrays: reducescatter_request(name, specs_of(arrays), scaled, process_set=process_set),
                   _on_host(tensors), shapes, process_set, times_rows=0)


@dataclass(frozen=True)
class ReduceScatterGradient(Gradient):
    """The gradient of a reduce-scatter: the gathered gradients, times the factors and, for Sum, the number of ranks."""

    name: str
    scaled: ScaledOp  # a list after JSON
    process_set: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        op, prescale, postscale = scaled_op(*self.scaled)
        factor = prescale * postscale
        if op is Sum:
            factor *= tf.cast(place_in(self.process_set)[1], tf.float64)
        gathered = gather(upstream, of_gradient(self.name, self.process_set), self.process_set,
                          shapes=[value.shape for value in values])
        return [each * tf.cast(factor, each.dtype) for each in gathered]


def alltoall(tensor: Reducible, splits: Reducible | Sequence[int] | None = None, name: str | None = None,
             ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send rows of `tensor` to each rank, and return the rows sent to this rank. Collective, differentiable.

    Args:
        tensor: A tensor of at least one dimension. The first dimension may differ among ranks.
        splits: The number of rows for each rank, in rank order: 1-D integers. Their sum may be less than the number of
            rows. Default: the same number for each rank. The rows must then divide evenly among the ranks.
        name: Identifies the collective on all ranks.
        ignore_name_scope: Leave name scopes out of the name.
        process_set: The ranks that take part.

    Returns:
        The rows in the order of the ranks that have sent them. With `splits`, a pair: the rows, and the number of rows
        from each rank (1-D int32).

    Raises:
        As allreduce. Also InvalidRequestError on all ranks, if splits are negative or their sum exceeds the row count.
    """
    number = number_of(process_set, "Alltoall")
    tensor = _dense(tensor, "alltoall")
    name = name_of("alltoall", name, number, ignore_name_scope)
    size = place_in(number)[1]
    counts = _even(name, tensor, size) if splits is None else _splits(name, splits)
    result, received = _exchange_rows(tensor, counts, name, number)
    return result if splits is None else (result, received)


def _splits(name: str, splits: Reducible | Sequence[int]) -> tf.Tensor:
    """Return the caller's splits as int32, the dtype in which the ranks exchange them."""
    given = tf.convert_to_tensor(splits)
    if not given.dtype.is_integer:
        raise as_tf_error(no_int32_splits(name, splits))
    # A split beyond 32 bits becomes the largest int32, which is more than all rows: an error on all ranks.
    return tf.saturate_cast(given, tf.int32)


def _even(name: str, tensor: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    """Return splits with the same number of rows for each rank. A graph may detect uneven rows only when it runs."""
    if isinstance(size, int) and tensor.shape.rank and tensor.shape[0] is not None:
        try:
            return tf.constant(even_splits(name, int(tensor.shape[0]), size), tf.int32)
        except MpistratError as error:
            raise as_tf_error(error) from error
    rows = tf.shape(tensor)[0] if tensor.shape.rank != 0 else 0
    # The splits of an uneven number add up to more than the rows, which is an error on all ranks.
    return tf.fill([size], -(-rows // size))


def _exchange_rows(tensor: tf.Tensor, splits: tf.Tensor, name: str, process_set: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows that the ranks sent to this rank, and how many each rank sent. The rows are differentiable."""
    received: list[tf.Tensor] = []

    def exchange(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        rows, counts = values
        data, of_ranks = _exchange(rows, counts, name, process_set)
        received.append(of_ranks)
        return [data]

    result, = with_gradient(exchange, AllToAllGradient(name, process_set), [tensor, splits])
    return result, received[0]


def _exchange(tensor: tf.Tensor, splits: tf.Tensor, name: str, process_set: int) -> tuple[tf.Tensor, tf.Tensor]:
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else tensor.shape
    rows, received = cpu.run(
        name, lambda arrays: alltoall_request(name, specs_of(arrays), topology_of(process_set).size,
                                              process_set=process_set),
        _on_host([tensor, splits]), [shape, splits.shape], process_set, times_rows=0)
    return rows, received


@dataclass(frozen=True)
class AllToAllGradient(Gradient):
    """The gradient of an all-to-all: the ranks that received this rank's rows send the gradients of the rows back."""

    name: str
    process_set: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[OptionalGradient]:
        name, (tensor, splits) = of_gradient(self.name, self.process_set), values
        received, _ = _exchange(splits, tf.ones_like(splits), f"{name}/splits", self.process_set)
        returned, _ = _exchange_rows(upstream[0], received, name, self.process_set)
        unsent = tf.shape(tensor)[0] - tf.shape(returned)[0]  # Rows that no rank has received.
        padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(tensor) - 1, 2], tf.int32)], 0)
        return [tf.ensure_shape(tf.pad(returned, padding), tensor.shape), None]


def _dense(tensor: Reducible, operation: str) -> tf.Tensor:
    if isinstance(tensor, tf.IndexedSlices):
        raise as_tf_error(InvalidRequestError(f"{operation} does not take tf.IndexedSlices. Convert them to a tensor "
                                              "first: tf.convert_to_tensor(slices)."))
    return as_tensor(tensor)


def _on_host(tensors: Sequence[Tensor]) -> list[tf.Tensor]:
    with tf.device("CPU:0"):
        return [tf.identity(tensor) if "GPU" in tensor.device else tensor for tensor in tensors]


# -- ranks and sizes as tensors ---------------------------------------------------------------------------------------

# The Python numbers of rank() and size() become constants of a graph. The tensors of these functions do not: a graph
# that was traced before init(), or before another init(), reads the values when it runs.

# Results of process_set_included_op other than 0 and 1; Horovod's numbers.
_NOT_INITIALIZED = -1
_UNKNOWN_SET = -3


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, an int32 scalar. Local.

    Args:
        process_set_id: The id of a registered process set, which need not contain this rank; 0 is the set of all ranks.
        name: A name for the result in a graph.

    Raises:
        NotInitializedError: Before init(). In a graph, a tf.errors.InvalidArgumentError when the graph runs.
        InvalidRequestError: No process set has this id. In a graph, a tf.errors.InvalidArgumentError when it runs.
    """
    def read() -> int:
        found = runtime.current().registry.sets.get(process_set_id)
        size = None if found is None else found.size()
        if size is None:
            raise InvalidRequestError(f"size_op: no process set with the id {process_set_id} is registered. "
                                      "Pass the process_set_id of a registered ProcessSet.")
        return size

    return _scalar(read, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is in a process set and 0 if not, an int32 scalar. Local.

    The result is -1 before init(), and -3 if no process set has this id.
    """
    def read() -> int:
        if not runtime.is_initialized():
            return _NOT_INITIALIZED
        found = runtime.current().registry.sets.get(process_set_id)
        return _UNKNOWN_SET if found is None else int(bool(found.included()))

    return _scalar(read, name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return rank() as an int32 scalar. Local; for errors see size_op."""
    return _scalar(lambda: runtime.current().topology.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return local_rank() as an int32 scalar. Local; for errors see size_op."""
    return _scalar(lambda: runtime.current().topology.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return local_size() as an int32 scalar. Local; for errors see size_op."""
    return _scalar(lambda: runtime.current().topology.local_size, name)


def _scalar(read: Callable[[], int], name: str | None) -> tf.Tensor:
    """Call `read` now, or in a graph when the graph runs. Return the result as an int32 scalar."""
    if tf.executing_eagerly():
        try:
            return tf.constant(read(), tf.int32, name=name)
        except MpistratError as error:
            raise as_tf_error(error) from error

    result, = cpu.read_in_graph(lambda: [read()], 1)
    with tf.device("CPU:0"):
        return tf.identity(result, name=name)


# -- Python objects ---------------------------------------------------------------------------------------------------


def broadcast_object(obj: object = None, root_rank: int = 0, session: object = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """As mpistrat.broadcast_object. Collective. `session` is accepted for compatibility with Horovod, and ignored."""
    return array_ops.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank: int = 0, session: object = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[object], Any]:
    """Return a function f(obj) that calls broadcast_object with `obj` and these arguments. Local."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj: T, session: object = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[T]:
    """As mpistrat.allgather_object. Collective. `session` is accepted for compatibility with Horovod, and ignored."""
    return array_ops.allgather_object(obj, name, process_set)
