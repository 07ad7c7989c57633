"""reducescatter and alltoall on TensorFlow tensors: eager, in tf.function, and differentiable.

As in ops.py, calls of different ranks are matched by name, and signatures and semantics are Horovod's. Tensors on a GPU
are copied to the host, and the results back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import InvalidRequestError, MpistratError
from ..core.request import (
    Average,
    ReduceOp,
    ScaledOp,
    Sum,
    alltoall_request,
    reducescatter_request,
    scaled_op,
    specs_of,
)
from ..core.rows import even_splits, no_int32_splits, rows_of_ranks
from .bridge.names import of_gradient
from .bridge.tf_errors import as_tf_error
from .bridge.types import OptionalGradient, Reducible, Tensor
from .compression import Compressed, Compression, Compressor
from .graph import cpu
from .graph.differentiable import Gradient, with_gradient
from .list_ops import as_tensor, gather, number_of, place_in, topology_of
from .ops import name_of
from .xla import context as xla


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
    number = number_of(process_set, "Reducescatter")
    tensor = _dense(tensor, "reducescatter")
    name = name_of("reducescatter", name, number, ignore_name_scope)
    return _reducescatter([tensor], compression, scaled_op(op, prescale_factor, postscale_factor), name, number)[0]


def grouped_reducescatter(tensors: Sequence[Reducible], device_dense: str = "",
                          compression: type[Compressor] = Compression.none, op: ReduceOp | None = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, name: str | None = None,
                          ignore_name_scope: bool = False) -> list[tf.Tensor]:
    """As reducescatter, for a list of tensors in one collective. Dtypes may differ. An empty list returns []."""
    number = number_of(process_set, "Reducescatter")
    dense = [_dense(tensor, "reducescatter") for tensor in tensors]
    if not dense:
        return []
    name = name_of("grouped_reducescatter", name, number, ignore_name_scope)
    return _reducescatter(dense, compression, scaled_op(op, prescale_factor, postscale_factor), name, number)


def _reducescatter(tensors: Sequence[tf.Tensor], compression: type[Compressor], scaled: ScaledOp, name: str,
                   process_set: int) -> list[tf.Tensor]:
    compressed = Compressed(tensors, compression, by_host=True)
    scattered = with_gradient(lambda values: _scatter_list(values, scaled, name, process_set),
                              ReduceScatterGradient(name, scaled, process_set), compressed.tensors)
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
    """The gathered gradients, multiplied by the scale factors and, for Sum, by the number of ranks, as in Horovod."""

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
        splits: The number of rows for each rank, in rank order: 1-D integers. Their sum may be less than all rows.
            Default: the same number for each rank; all rows must divide evenly among the ranks.
        name: Identifies the collective on all ranks.
        ignore_name_scope: Leave name scopes out of the name.
        process_set: The ranks that take part.

    Returns:
        The rows in the order of the ranks that have sent them. With `splits`, a pair: the rows, and the number of rows
        from each rank (1-D int32).

    Raises:
        As allreduce. Also InvalidRequestError on all ranks, if splits are negative or their sum exceeds the rows.
    """
    number = number_of(process_set, "Alltoall")
    tensor = _dense(tensor, "alltoall")
    name = name_of("alltoall", name, number, ignore_name_scope)
    size = place_in(number)[1]
    counts = _even(name, tensor, size) if splits is None else _splits(name, splits)
    result, received = _exchange_rows(tensor, counts, name, number)
    return result if splits is None else (result, received)


def _splits(name: str, splits: Reducible | Sequence[int]) -> tf.Tensor:
    """The splits of the caller in the dtype in which the ranks exchange them."""
    given = tf.convert_to_tensor(splits)
    if not given.dtype.is_integer:
        raise as_tf_error(no_int32_splits(name, splits))
    # A split beyond 32 bits becomes the largest int32, which is more than all rows: an error on all ranks.
    return tf.saturate_cast(given, tf.int32)


def _even(name: str, tensor: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    """Splits that give all ranks the same number of rows. A graph detects an uneven number of rows when it runs."""
    if isinstance(size, int) and tensor.shape.rank and tensor.shape[0] is not None:
        try:
            return tf.constant(even_splits(name, int(tensor.shape[0]), size), tf.int32)
        except MpistratError as error:
            raise as_tf_error(error) from error
    rows = tf.shape(tensor)[0] if tensor.shape.rank != 0 else 0
    # The splits of an uneven number add up to more than the rows, which is an error on all ranks.
    return tf.fill([size], -(-rows // size))


def _exchange_rows(tensor: tf.Tensor, splits: tf.Tensor, name: str,
                   process_set: int) -> tuple[tf.Tensor, tf.Tensor]:
    """As _exchange, but differentiable with respect to the rows."""
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
    """The gradients of the rows that this rank has sent, sent back by the ranks that have received them."""

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

