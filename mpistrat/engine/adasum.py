"""Adasum: combines gradients so that their common parts count only once (Maleki et al., MLSys 2021).

Two gradients a and b become `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`: their mean if they are equal, their sum if
they are orthogonal. More ranks are combined in pairs, and the results in pairs again; a rank without a partner waits
for the next level. Neighbours come first, so the ranks of a host are combined with each other before other hosts.

Each rank works on one slice of each tensor, as in an all-reduce: it receives the slices of all ranks, and the ranks sum
the dot products of their slices at each level. So any number of ranks is possible, and each byte is sent as often as in
an all-reduce. Dot products are in float64. All ranks get the same bits, because each slice has one owner.

The executor calls it in the thread that drives.
"""

from collections.abc import Sequence

import numpy as np

from ..core.arithmetic import IDENTITY, Reduction, scaled_copy
from ..core.dtypes import is_half
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp, Request


def adasum(data: DataPlane, rank: int, size: int, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
           request: Request) -> None:
    """Write the Adasum of all ranks' `sources` to `targets`, separately for each tensor. Collective.

    The sources are floating-point arrays, of the same shapes and dtypes on all ranks. There is a target of the same
    shape and dtype for each source. `request.scaled` has the factors.
    """
    slices = [_slice_of_each_rank(data, rank, size, source, request.scaled.prescale) for source in sources]
    while len(slices[0]) > 1:
        slices = _combined(data, slices)
    for source, target, (own,) in zip(sources, targets, slices, strict=True):
        scaled_copy(own, request.scaled.postscale, own)
        counts = _counts(source.size, size)
        flat = target.reshape(-1)
        data.allgather(own.astype(flat.dtype, copy=False), flat, counts)


def _slice_of_each_rank(data: DataPlane, rank: int, size: int, source: np.ndarray,
                        prescale: float) -> list[np.ndarray]:
    """Return this rank's slice of the tensor of each rank, in rank order; half precision as float32."""
    counts = _counts(source.size, size)
    parts = np.empty((size, counts[rank]), source.dtype)
    data.alltoall(source.reshape(-1), parts.reshape(-1), counts, [counts[rank]] * size, max(counts))
    wide = parts.astype(np.float32) if is_half(parts.dtype) else parts
    scaled_copy(wide, prescale, wide)
    return list(wide)


def _combined(data: DataPlane, slices: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Combine the slices of each tensor in pairs, for one level. Collective."""
    pairs = len(slices[0]) // 2
    dots = np.array([[_dots(parts[2 * i], parts[2 * i + 1]) for i in range(pairs)] for parts in slices])
    flat = dots.reshape(-1)
    data.allreduce([flat], [flat], Reduction(ReduceOp.SUM, 1.0, IDENTITY))
    results = []
    for parts, dots_of_tensor in zip(slices, dots, strict=True):
        pairwise = [_pair(parts[2 * i], parts[2 * i + 1], *dots_of_tensor[i]) for i in range(pairs)]
        results.append(pairwise + parts[2 * pairs:])
    return results


def _dots(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Return a.b, |a|^2 and |b|^2 in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b), float(a @ a), float(b @ b)


def _pair(a: np.ndarray, b: np.ndarray, dot: float, norm_a: float, norm_b: float) -> np.ndarray:
    """Return the Adasum of two tensors, from their dot products. If one tensor is zero, it is the other tensor."""
    of_a = 1.0 - dot / (2 * norm_a) if norm_a else 1.0
    of_b = 1.0 - dot / (2 * norm_b) if norm_b else 1.0
    return a * a.dtype.type(of_a) + b * b.dtype.type(of_b)


def _counts(elements: int, size: int) -> list[int]:
    """Return the number of elements of a tensor that each rank owns."""
    return [elements * (rank + 1) // size - elements * rank // size for rank in range(size)]
