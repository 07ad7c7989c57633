"""From a caller's arguments to a Request: validation of what one rank can see alone."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from .dtypes import HALVES, name_of
from .errors import InvalidRequestError
from .plain_values import COUNTS, EXTENTS, RANKS, are_in, is_tuple_of

DEVICE_CPU, DEVICE_GPU = "cpu", "gpu"


class ReduceOp(IntEnum):
    """How an all-reduce combines values. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class CollectiveType(str, Enum):
    """Which collective a request asks for."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


class TensorSpec(NamedTuple):
    """What ranks must agree on about one tensor: the dtype's numpy name and the shape.

    For an allgather the first dimension, which may differ among ranks, is -1.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A rank says: these tensors are ready to be reduced, gathered or broadcast, together.

    Ranks match requests by `name`; everything else must be equal on all of them, but for `labels` and `in_graph`.

    Attributes:
        tensors: What the ranks agree on.
        device: Where the tensors are: DEVICE_CPU or DEVICE_GPU.
        layout: Which of the caller's tensors each array that travels is made of, when small ones are joined or the
            order is another; () for one array per tensor, in order.
        wire: The dtype that wider floating-point tensors on a GPU may travel in; "" for their own.
        labels: What users call the tensors (a variable's path), for error messages; may be empty.
        in_graph: The collective stands in a graph: an error ends the execution of the whole graph.
    """

    kind: CollectiveType
    name: str
    tensors: tuple[TensorSpec, ...] = ()
    reduce_op: ReduceOp = ReduceOp.SUM
    root_rank: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = DEVICE_CPU
    layout: tuple[tuple[int, ...], ...] = ()
    wire: str = ""
    labels: tuple[str, ...] = field(default=(), compare=False)
    in_graph: bool = field(default=False, compare=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.name, self.tensors, self.reduce_op, self.root_rank, self.prescale, self.postscale,
                     self.device, self.layout, self.wire))

    def __hash__(self) -> int:
        # A request of hundreds of tensors is looked up in tables several times per step.
        return self._hash

    @cached_property
    def fingerprint(self) -> int:
        """61 bits, never 0, that are the same for equal requests on all ranks, and for no others."""
        compared = repr(self.to_tuple()[:-2])  # without labels and in_graph
        return int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=8).digest(), "little") >> 3 or 1

    def to_tuple(self) -> tuple:
        """The fields as plain values."""
        return (self.kind.value, self.name, tuple((t.dtype, t.shape) for t in self.tensors), int(self.reduce_op),
                self.root_rank, self.prescale, self.postscale, self.device, self.layout, self.wire, self.labels,
                self.in_graph)

    @classmethod
    def from_tuple(cls, values: Any) -> "Request":
        """The inverse of to_tuple, for values that may be anything.

        Raises:
            ValueError: They are no request.
        """
        if type(values) is not tuple or tuple(map(type, values)) != _REQUEST_TYPES:
            raise ValueError("a request with other fields")
        kind, name, tensors, reduce_op, root_rank, prescale, postscale, device, layout, wire, labels, in_graph = values
        if root_rank not in RANKS:
            raise ValueError("a root that is no rank")
        if device not in (DEVICE_CPU, DEVICE_GPU):
            raise ValueError("an unknown device")
        if layout and not (is_tuple_of(tuple, layout) and all(are_in(COUNTS, places) for places in layout)):
            raise ValueError("a wrong layout")
        if labels and not is_tuple_of(str, labels):
            raise ValueError("labels that are no texts")
        return cls(CollectiveType(kind), name, tuple(map(_spec_from, tensors)), ReduceOp(reduce_op), root_rank,
                   prescale,
                   postscale, device, layout, wire, labels, in_graph)


def _spec_from(values: Any) -> TensorSpec:
    if type(values) is not tuple or tuple(map(type, values)) != (str, tuple):
        raise ValueError("a tensor that is no pair of dtype and shape")
    for extent in values[1]:
        if type(extent) is not int or extent not in EXTENTS:
            raise ValueError("a shape that is none")
    return TensorSpec(*values)


# Of Request.to_tuple.
_REQUEST_TYPES = (str, str, tuple, int, int, float, float, str, tuple, str, tuple, bool)


Average, Sum, Adasum, Min, Max, Product = (
    ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

_KEPT = 4096  # requests made lately; the same ones are made at every step, and are found in tables by identity


def resolve_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """The operation that `op` and Horovod's deprecated `average` ask for; Average when neither is given."""
    if average is not None:
        if op is not None:
            raise InvalidRequestError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    try:
        op = Average if op is None else ReduceOp(op)
    except ValueError:
        raise InvalidRequestError(
            f"op must be one of Average, Sum, Min, Max, Product. Received: {op!r}") from None
    if op is Adasum:
        raise InvalidRequestError("op=Adasum is not available. Use Average or Sum.")
    return op


@lru_cache(_KEPT)
def allreduce_request(name: str, tensors: tuple[TensorSpec, ...], op: ReduceOp, prescale: float = 1.0,
                      postscale: float = 1.0, labels: tuple[str, ...] = (),
                      layout: tuple[tuple[int, ...], ...] = (), device: str = DEVICE_CPU, wire: str = "") -> Request:
    """A request to reduce `tensors` together. For the arguments see Request.

    Raises:
        InvalidRequestError: A dtype that cannot be reduced with `op`, or a factor that is not finite.
    """
    for tensor in tensors:
        _check_reducible(name, tensor.dtype, op)
    if not (math.isfinite(prescale) and math.isfinite(postscale)):
        raise InvalidRequestError(f"{name}: prescale and postscale factors must be finite. Received: {prescale}, "
                                  f"{postscale}")
    return Request(CollectiveType.ALLREDUCE, name, tensors, op, prescale=float(prescale), postscale=float(postscale),
                   device=device, layout=layout, wire=wire, labels=labels)


@lru_cache(_KEPT)
def allgather_request(name: str, tensors: tuple[TensorSpec, ...], device: str = DEVICE_CPU) -> Request:
    """A request to gather each of `tensors` along its first dimension, which may differ among ranks."""
    for tensor in tensors:
        _check_bytes(name, tensor.dtype)
        if not tensor.shape:
            raise InvalidRequestError(f"{name}: allgather needs at least one dimension, but a rank-zero tensor was "
                                      "given. Reshape it to (1,).")
    return Request(CollectiveType.ALLGATHER, name, tuple(TensorSpec(t.dtype, (-1, *t.shape[1:])) for t in tensors),
                   device=device)


@lru_cache(_KEPT)
def broadcast_request(name: str, tensors: tuple[TensorSpec, ...], root_rank: int, size: int,
                      labels: tuple[str, ...] = (), device: str = DEVICE_CPU) -> Request:
    """A request to overwrite `tensors` with those of `root_rank`."""
    for tensor in tensors:
        _check_bytes(name, tensor.dtype)
    if not 0 <= root_rank < size:
        raise InvalidRequestError(f"{name}: broadcast received invalid root rank {root_rank}; ranks are 0 to "
                                  f"{size - 1}.")
    return Request(CollectiveType.BROADCAST, name, tensors, root_rank=int(root_rank), device=device, labels=labels)


@lru_cache(_KEPT)
def barrier_request(name: str) -> Request:
    """A request without tensors: it is complete when all ranks have made it."""
    return Request(CollectiveType.BARRIER, name)


def specs_of(arrays: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """The dtype and shape of each array."""
    return tuple(TensorSpec(name_of(array.dtype), array.shape) for array in arrays)


def _check_bytes(name: str, dtype: str) -> None:
    # A float8 or bfloat16 name is not known to numpy itself, but neither holds Python objects.
    if dtype == "object" or dtype.lower().startswith(("str", "bytes", "void")):
        raise InvalidRequestError(f"{name}: dtype {dtype} cannot be sent. Use broadcast_object or allgather_object.")


def _check_reducible(name: str, dtype: str, op: ReduceOp) -> None:
    if dtype in HALVES:
        return
    try:
        kind: str = np.dtype(dtype).kind
    except TypeError:
        kind = "unknown to numpy"
    if kind == "b" and op in (Sum, Average):
        raise InvalidRequestError(f"{name}: {op.name.capitalize()} of bool has no meaning. Cast to int32 to count, or "
                                  "use Min (all), Max (any) or Product (all).")
    if kind == "c" and op in (Min, Max):
        raise InvalidRequestError(f"{name}: {op.name.capitalize()} of {dtype} has no meaning, for complex numbers have "
                                  "no order.")
    if kind not in ("b", "i", "u", "f", "c"):
        raise InvalidRequestError(f"{name}: dtype {dtype} cannot be reduced.")
