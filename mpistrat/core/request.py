"""Request, the description of a collective that a rank submits, and the functions that validate and make requests.

The functions check only what a rank can check without the others. Pure; any thread may call them.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import cache, cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

from .errors import InvalidRequestError
from .topology import rank_list
from .tuning import KEPT_REQUESTS

DEVICE_CPU, DEVICE_GPU = "cpu", "gpu"
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_HALVES = ("float16", "bfloat16")


class Array(Protocol):
    """What numpy arrays and GPU arrays have in common: C-contiguous elements of one dtype. For type annotations."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@cache  # Without the cache, numpy's `dtype.name` takes as long as a small reduction.
def name_of(dtype: np.dtype) -> str:
    """Return the name of a dtype, which is the same on all ranks."""
    return dtype.name


@cache
def is_half(dtype: np.dtype) -> bool:
    """Return whether a dtype is float16 or bfloat16. Such values are combined and scaled in float32."""
    return name_of(dtype) in _HALVES


class ReduceOp(IntEnum):
    """How a reduction combines values. The integer values are those of the same operations in Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class CollectiveType(str, Enum):
    """The kind of collective that a request asks for."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    JOIN = "join"


class TensorSpec(NamedTuple):
    """The dtype (numpy's name) and the shape of a tensor. All ranks must have equal specs.

    For an allgather and an all-to-all the first dimension is -1, since it may differ among ranks.
    """

    dtype: str
    shape: tuple[int, ...]


class ScaledOp(NamedTuple):
    """The operation of an all-reduce or a reduce-scatter, with its factors."""

    op: ReduceOp
    prescale: float = 1.0  # Multiplies every value before the reduction
    postscale: float = 1.0  # Multiplies the result


_SUM = ScaledOp(ReduceOp.SUM)


@dataclass(frozen=True)
class Request:
    """One rank's announcement that tensors are ready to be reduced, gathered or broadcast together.

    The ranks match requests by `name`. Only the fields `labels`, `in_graph` and `process_set` may differ by rank.
    """

    kind: CollectiveType
    name: str
    # Dtype and shape of each of the caller's tensors, in the order of the submitted arrays.
    tensors: tuple[TensorSpec, ...] = ()
    scaled: ScaledOp = _SUM  # How to reduce them
    root_rank: int = 0
    device: str = DEVICE_CPU  # Where the tensors are: DEVICE_CPU or DEVICE_GPU
    # The indices of the caller's tensors that each submitted array is made of, if small tensors were concatenated or
    # reordered; () for one array per tensor, in order.
    layout: tuple[tuple[int, ...], ...] = ()
    # The dtype in which wider floats on a GPU are sent and reduced, or INT8 for data between hosts; "" for their own.
    wire_dtype: str = ""
    # How many executions of graphs that submit this name have ended in an error on this rank since the ranks last
    # executed it. TensorQueue sets it.
    failures: int = 0
    # The user's names of the tensors (for example paths of variables), for error messages; may be empty.
    labels: tuple[str, ...] = field(default=(), compare=False)
    # Whether the collective is in a graph, where an error ends the execution of the whole graph.
    in_graph: bool = field(default=False, compare=False)
    # The id of the process set of the collective. Each set has its own engine, so the id is not sent.
    process_set: int = field(default=0, compare=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.name, self.tensors, self.scaled, self.root_rank, self.device,
                      self.layout, self.wire_dtype, self.failures))

    def __hash__(self) -> int:
        # A request of hundreds of tensors is looked up in tables several times per step.
        return self._hash

    @cached_property
    def fingerprint(self) -> int:
        """A hash of 61 bits, never 0. Requests that are equal have the same fingerprint on all ranks."""
        compared = repr(self.to_tuple()[:-2])  # without labels and in_graph
        return int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=8).digest(), "little") >> 3 or 1

    def to_tuple(self) -> tuple:
        """Return the fields as plain values, without the process set."""
        op, *factors = self.scaled
        return (self.kind.value, self.name, tuple((t.dtype, t.shape) for t in self.tensors), (int(op), *factors),
                self.root_rank, self.device, self.layout, self.wire_dtype, self.failures, self.labels, self.in_graph)

    @classmethod
    def from_tuple(cls, values: tuple) -> "Request":
        """Make a request from a result of to_tuple. Raises TypeError or ValueError for anything else."""
        kind, name, tensors, (op, prescale, postscale), *others = values
        return cls(CollectiveType(kind), name, tuple(TensorSpec(*tensor) for tensor in tensors),
                   ScaledOp(ReduceOp(op), prescale, postscale), *others)


Average, Sum, Adasum, Min, Max, Product = (
    ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def resolve_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Return the operation for the arguments `op` and `average` (deprecated). Average if neither is given."""
    if average is not None:
        if op is not None:
            raise InvalidRequestError("The op parameter supersedes average. Please provide only one of them.")
        if not isinstance(average, bool | np.bool_):  # Sum is 1, and Average is 0.
            raise InvalidRequestError("average must be True, False or None; an operation is given as op=hvd.Sum. "
                                      f"Received: {average!r}")
        return Average if average else Sum
    try:
        return Average if op is None else ReduceOp(op)
    except ValueError:
        advice = ". Write op=hvd.Sum, without quotes" if isinstance(op, str) else ""
        raise InvalidRequestError(
            f"op must be one of Average, Sum, Min, Max, Product, Adasum. Received: {op!r}{advice}") from None


def scaled_op(op: ReduceOp | int | None, prescale: float = 1.0, postscale: float = 1.0,
              average: bool | None = None) -> ScaledOp:
    """Return the operation and factors for a user's arguments. `op` and `average` are those of resolve_op."""
    known = Average if op is average is None else resolve_op(op, average)
    return ScaledOp(known, float(prescale), float(postscale))


@lru_cache(KEPT_REQUESTS)
def allreduce_request(name: str, tensors: tuple[TensorSpec, ...], scaled: ScaledOp, labels: tuple[str, ...] = (),
                      layout: tuple[tuple[int, ...], ...] = (), device: str = DEVICE_CPU, wire_dtype: str = "",
                      process_set: int = 0) -> Request:
    """Return a request to reduce `tensors` together. For the arguments see Request.

    Raises InvalidRequestError: The dtype cannot be reduced with the operation, or a factor is not finite.
    """
    for tensor in tensors:
        _check_reducible(name, tensor.dtype, scaled.op)
    request = Request(CollectiveType.ALLREDUCE, name, tensors, _checked(name, scaled), layout=layout,
                      wire_dtype=wire_dtype, labels=labels, process_set=process_set)
    return on_gpu(request) if device == DEVICE_GPU else request


def on_gpu(request: Request) -> Request:
    """Return a copy of `request` for GPU tensors. Raises InvalidRequestError: The operation is Adasum (CPU only)."""
    if request.scaled.op is Adasum:
        raise InvalidRequestError(f"{request.name}: Adasum is computed on the CPU. Set MPISTRAT_GPU_OPERATIONS=host, "
                                  "or pass CPU tensors.")
    return replace(request, device=DEVICE_GPU)


@lru_cache(KEPT_REQUESTS)
def allgather_request(name: str, tensors: tuple[TensorSpec, ...], device: str = DEVICE_CPU,
                      process_set: int = 0) -> Request:
    """Return a request to gather each of `tensors` along its first dimension, whose size may differ among ranks."""
    specs = tuple(_with_any_rows(name, CollectiveType.ALLGATHER, tensor) for tensor in tensors)
    return Request(CollectiveType.ALLGATHER, name, specs, device=device, process_set=process_set)


@lru_cache(KEPT_REQUESTS)
def reducescatter_request(name: str, tensors: tuple[TensorSpec, ...], scaled: ScaledOp, device: str = DEVICE_CPU,
                          process_set: int = 0) -> Request:
    """Return a request to reduce each of `tensors`. Each rank gets a part of the rows of each result.

    Raises InvalidRequestError: The dtype cannot be reduced, a tensor is a scalar, a factor is not finite, or the
    operation is neither Average nor Sum.
    """
    op = scaled.op
    if op not in (Average, Sum):
        raise InvalidRequestError(f"{name}: reducescatter supports Average and Sum. Received: {op.name.capitalize()}")
    for tensor in tensors:
        _check_reducible(name, tensor.dtype, op)
        if not tensor.shape:
            raise InvalidRequestError(f"{name}: reducescatter does not support scalar inputs. Reshape it to (1,).")
    return Request(CollectiveType.REDUCESCATTER, name, tensors, _checked(name, scaled), device=device,
                   process_set=process_set)


@lru_cache(KEPT_REQUESTS)
def alltoall_request(name: str, tensors: tuple[TensorSpec, ...], size: int, device: str = DEVICE_CPU,
                     process_set: int = 0) -> Request:
    """Return a request to send rows of a tensor to each rank.

    `tensors` describes two tensors: the tensor to send, on `device`, and its splits, on the CPU. The splits are the
    number of rows for each of `size` ranks.

    Raises InvalidRequestError: The tensor cannot be sent, or is a scalar; or the splits are not `size` integers.
    """
    tensor, splits = tensors
    spec = _with_any_rows(name, CollectiveType.ALLTOALL, tensor)
    if splits.shape != (size,) or splits.dtype not in ("int32", "int64"):
        raise InvalidRequestError(f"{name}: alltoall expects splits with one integer for each of the {size} ranks. "
                                  f"Received: {splits.dtype} of shape {splits.shape}")
    return Request(CollectiveType.ALLTOALL, name, (spec, splits), device=device, process_set=process_set)


@lru_cache(KEPT_REQUESTS)
def broadcast_request(name: str, tensors: tuple[TensorSpec, ...], root_rank: int, ranks: Sequence[int],
                      labels: tuple[str, ...] = (), device: str = DEVICE_CPU, process_set: int = 0) -> Request:
    """Return a request to overwrite `tensors` with the tensors of `root_rank`.

    `ranks`: The numbers in the job of the ranks that take part. The request has the index of `root_rank` in `ranks`.
    """
    for tensor in tensors:
        _check_bytes(name, tensor.dtype)
    if root_rank not in ranks:
        raise InvalidRequestError(f"{name}: broadcast received invalid root rank {root_rank}; ranks are "
                                  f"{rank_list(ranks)}. Pass one of them, as root_rank={ranks[0]}.")
    return Request(CollectiveType.BROADCAST, name, tensors, root_rank=ranks.index(root_rank), device=device,
                   labels=labels, process_set=process_set)


@lru_cache(KEPT_REQUESTS)
def barrier_request(name: str) -> Request:
    """Return a request without tensors. It is complete when all ranks have submitted it."""
    return Request(CollectiveType.BARRIER, name)


@lru_cache(KEPT_REQUESTS)
def join_request(process_set: int = 0) -> Request:
    """Return the request of join(). It has no tensors, and is complete when all ranks have joined."""
    return Request(CollectiveType.JOIN, "join()", process_set=process_set)


def specs_of(arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    return tuple(map(TensorSpec, map(name_of, map(_DTYPE, arrays)), map(_SHAPE, arrays)))


def _with_any_rows(name: str, kind: CollectiveType, tensor: TensorSpec) -> TensorSpec:
    """Check a tensor whose number of rows may differ among ranks. Return its spec, with -1 in place of that number."""
    _check_bytes(name, tensor.dtype)
    if not tensor.shape:
        raise InvalidRequestError(f"{name}: {kind.value} needs at least one dimension, but a rank-zero tensor was "
                                  "given. Reshape it to (1,).")
    return TensorSpec(tensor.dtype, (-1, *tensor.shape[1:]))


def _check_bytes(name: str, dtype: str) -> None:
    # Not np.dtype(dtype): numpy alone does not know the names of float8 and bfloat16.
    if dtype == "object" or dtype.lower().startswith(("str", "bytes", "void")):
        raise InvalidRequestError(f"{name}: dtype {dtype} cannot be sent. Use broadcast_object or allgather_object.")


def _checked(name: str, scaled: ScaledOp) -> ScaledOp:
    """Check that the factors are finite. Return them as floats, because 1 and 1.0 would give different fingerprints."""
    op, prescale, postscale = scaled
    if not (math.isfinite(prescale) and math.isfinite(postscale)):
        raise InvalidRequestError(f"{name}: prescale and postscale factors must be finite. Received: {prescale}, "
                                  f"{postscale}")
    return ScaledOp(op, float(prescale), float(postscale))


def _check_reducible(name: str, dtype: str, op: ReduceOp) -> None:
    if dtype in _HALVES:
        return
    try:
        kind: str = np.dtype(dtype).kind
    except TypeError:
        kind = "unknown to numpy"
    if op is Adasum and kind != "f":
        raise InvalidRequestError(f"{name}: Adasum is for floating-point tensors. Received: {dtype}")
    if kind == "b" and op in (Sum, Average):
        raise InvalidRequestError(f"{name}: {op.name.capitalize()} of bool has no meaning. Cast to int32 to count, or "
                                  "use Min (all), Max (any) or Product (all).")
    if kind == "c" and op in (Min, Max):
        raise InvalidRequestError(f"{name}: {op.name.capitalize()} of {dtype} has no meaning, because complex numbers "
                                  "have no order.")
    if kind not in ("b", "i", "u", "f", "c"):
        raise InvalidRequestError(f"{name}: dtype {dtype} cannot be reduced.")
