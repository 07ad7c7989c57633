"""Neutral tensors: a rank in join() takes part in the collectives of the others with them. Pure.

They do not change the result. negotiation/joined.py describes join().
"""

import math
from collections.abc import Callable
from itertools import islice

import numpy as np

from ..core.errors import EngineError
from ..core.request import CollectiveType, ReduceOp, Request


def neutral_arrays(request: Request) -> list[np.ndarray]:
    """New arrays of the sizes and dtypes that a rank submits with `request`.

    They are zeros for a sum and for Adasum, the largest value for Min, the smallest for Max, ones for a product, no
    rows for an allgather, and anything for a broadcast.

    Raises:
        EngineError: numpy does not know a dtype.
    """
    value = _neutral_value(request)
    dtypes = [_dtype(request.name, tensor.dtype) for tensor in request.tensors]
    if request.kind is CollectiveType.ALLGATHER:
        return [np.empty((0, *tensor.shape[1:]), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    sizes = [(math.prod(tensor.shape), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    if request.layout:
        # `tensors` has those of the first array, then those of the next one. Concatenated tensors have one dtype.
        remaining = iter(sizes)
        arrays = [list(islice(remaining, len(places))) for places in request.layout]
        sizes = [(sum(size for size, _ in parts), parts[0][1]) for parts in arrays]
    return [np.full(size, value(dtype), dtype) for size, dtype in sizes]


def _dtype(name: str, dtype: str) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise EngineError(f"{name}: other ranks use dtype {dtype}, which numpy does not know on this rank, while it "
                          "waits in join(). Import ml_dtypes on all ranks.") from None


def _neutral_value(request: Request) -> Callable[[np.dtype], object]:
    if request.kind is not CollectiveType.ALLREDUCE:
        return lambda dtype: 0
    return {ReduceOp.MIN: _largest, ReduceOp.MAX: _smallest, ReduceOp.PRODUCT: lambda dtype: 1}.get(
        request.scaled.op, lambda dtype: 0)


def _largest(dtype: np.dtype) -> object:
    return True if dtype.kind == "b" else np.iinfo(dtype).max if dtype.kind in "iu" else math.inf


def _smallest(dtype: np.dtype) -> object:
    return False if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind in "iu" else -math.inf
