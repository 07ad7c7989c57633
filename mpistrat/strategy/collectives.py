"""The collectives of strategies. The tensors of one call are reduced together.

Like all collectives they are submitted in program order (see bridge.program_order). In a graph, all later collectives
also wait until a collective of a strategy is complete.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from ..api import runtime
from ..core.errors import InvalidRequestError, MismatchError
from ..core.request import Average, ReduceOp, ScaledOp, Sum
from ..tensorflow import files
from ..tensorflow.bridge.names import made
from ..tensorflow.bridge.program_order import complete_in_order
from ..tensorflow.bridge.types import Reducible, Tensor, TensorLike
from ..tensorflow.graph.buckets import ReduceSpec
from ..tensorflow.list_ops import as_tensor, broadcast_list, gather_list, reduce_tensors
from ..tensorflow.xla.context import device_here

T = TypeVar("T")
_OPS = {tf.distribute.ReduceOp.SUM: Sum, tf.distribute.ReduceOp.MEAN: Average}


def all_reduce(values: Sequence[Reducible], op: tf.distribute.ReduceOp | ReduceOp,
               operation: str = "all_reduce", bucket_bytes: int = 0) -> list[Tensor]:
    """Reduce tensors and tf.IndexedSlices over the ranks, in one call. Collective, differentiable.

    `values`: Equal number, dtypes and shapes on all ranks; slices may differ in the number of rows. `operation`: A word
    for the purpose, which is a part of the collective's name.
    """
    tensors = list(map(as_tensor, values))
    if runtime.current().topology.size == 1 or not tensors:
        return tensors
    scaled = ScaledOp(_OPS.get(op, op))
    return in_program_order(operation, lambda name: reduce_tensors(tensors, ReduceSpec(
        name, scaled, bucket_bytes=bucket_bytes, has_gradient=True)))


def all_gather(values: Sequence[TensorLike], axis: int) -> list[tf.Tensor]:
    """Concatenate the values of all ranks along `axis`, in rank order. The sizes of `axis` may differ. Collective.

    Raises ValueError: A value has no such axis. GatherError, or in a graph
    InvalidArgumentError: On every rank, if the values differ in dtype, number of axes or the size of another axis.
    """
    tensors = [tf.convert_to_tensor(v) for v in values]
    if (known := tf.get_static_value(axis)) is None:
        raise ValueError(f"axis must be a number that is known when a tf.function is traced. Received: {axis}")
    axis = int(known)
    for tensor in tensors:
        rank = tensor.shape.rank
        if rank is not None and axis not in range(-rank, rank):
            raise ValueError(f"a tensor of shape {tensor.shape} has no axis {axis} to gather along. Reshape a scalar "
                             "to (1,).")
    if runtime.current().topology.size == 1 or not tensors:
        return tensors
    fronts = [_swapped(tensor, axis) for tensor in tensors]
    try:
        joined = in_program_order("all_gather", lambda name: gather_list(fronts, name))
    except MismatchError as error:
        raise GatherError(str(error)) from error
    return [_swapped(tensor, axis) for tensor in joined]


class GatherError(MismatchError, tf.errors.InvalidArgumentError):
    """The values of the ranks cannot be concatenated. (TensorFlow's own strategies raise InvalidArgumentError.)"""

    def __init__(self, text: str):
        tf.errors.InvalidArgumentError.__init__(self, None, None, text)


def _swapped(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Return the tensor with its axes 0 and `axis` exchanged."""
    return tensor if axis == 0 else tf.experimental.numpy.swapaxes(tensor, 0, axis)


def broadcast_from_first(tensor: tf.Tensor, operation: str = "broadcast", label: str = "") -> tf.Tensor:
    """Return rank 0's `tensor` on every rank. Collective."""
    if runtime.current().topology.size == 1:
        return tensor
    return in_program_order(operation, lambda name: broadcast_list([tensor], 0, name, (label,) if label else ()))[0]


def in_program_order(operation: str, collective: Callable[[str], list[T]]) -> list[T]:
    """Run `collective(name)` after all earlier collectives of the program. Return its results. `name` is made here."""
    if tf.executing_eagerly() and files.in_alone():
        raise InvalidRequestError(
            f"{operation} is a collective, but this rank writes a file without the other ranks. Compute the value on "
            "all ranks before the model is saved.")
    results = collective(made(f"strategy/{operation}"))
    if not tf.executing_eagerly():
        complete_in_order(tf.nest.flatten(results, expand_composites=True), device_here())
    return results
