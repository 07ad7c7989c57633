"""From a caller's arguments to a Request: validation of what one rank can see alone."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .dtypes import HALVES, name_of
from .errors import InvalidRequestError
from .messages import DEVICE_CPU, Kind, ReduceOp, Request, TensorSpec

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
    return Request(Kind.ALLREDUCE, name, tensors, op, prescale=float(prescale), postscale=float(postscale),
                   device=device, layout=layout, wire=wire, labels=labels)


@lru_cache(_KEPT)
def allgather_request(name: str, tensors: tuple[TensorSpec, ...], device: str = DEVICE_CPU) -> Request:
    """A request to gather each of `tensors` along its first dimension, which may differ among ranks."""
    for tensor in tensors:
        _check_bytes(name, tensor.dtype)
        if not tensor.shape:
            raise InvalidRequestError(f"{name}: allgather needs at least one dimension, but a rank-zero tensor was "
                                      "given. Reshape it to (1,).")
    return Request(Kind.ALLGATHER, name, tuple(TensorSpec(t.dtype, (-1, *t.shape[1:])) for t in tensors),
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
    return Request(Kind.BROADCAST, name, tensors, root_rank=int(root_rank), device=device, labels=labels)


@lru_cache(_KEPT)
def barrier_request(name: str) -> Request:
    """A request without tensors: it is complete when all ranks have made it."""
    return Request(Kind.BARRIER, name)


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
