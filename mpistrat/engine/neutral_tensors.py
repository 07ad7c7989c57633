"""Neutral tensors: a rank in join() takes part in the collectives of the others with them. Pure.

They do not change the result. negotiation/joined.py describes join().
"""

import math
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
    dtypes = [_dtype(request.name, tensor.dtype) for tensor in request.tensors]
    if request.kind is CollectiveType.ALLGATHER:
        return [np.empty((0, *tensor.shape[1:]), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    sizes = [(math.prod(tensor.shape), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    if request.layout:
        # `tensors` has those of the first array, then those of the next one. Concatenated tensors have one dtype.
        remaining = iter(sizes)
        arrays = [list(islice(remaining, len(places))) for places in request.layout]
        sizes = [(sum(size for size, _ in parts), parts[0][1]) for parts in arrays]
    return [np.full(size, _neutral_value(request, dtype), dtype) for size, dtype in sizes]


def _dtype(name: str, dtype: str) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise EngineError(f"{name}: other ranks use dtype {dtype}, which numpy does not know on this rank, while it "
                          "waits in join(). Import ml_dtypes on all ranks.") from None


def _neutral_value(request: Request, dtype: np.dtype) -> object:
    op = request.scaled.op if request.kind is CollectiveType.ALLREDUCE else ReduceOp.SUM
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 1 if op is ReduceOp.PRODUCT else 0
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if op is ReduceOp.MIN else np.iinfo(dtype).min
    return math.inf if op is ReduceOp.MIN else -math.inf
