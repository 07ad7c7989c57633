"""Elementwise arithmetic of reductions (prescale, combine, scale), and flat buffers that hold several arrays.

The functions work on numpy arrays and keep no state. Any thread may call them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from .quantised import Quantised
from .request import ReduceOp, is_half


class Scale:
    """The last step of a reduction: multiplies by `factor`, divides by `divisor` (a number of ranks), and rounds.

    Integer results are truncated toward zero. If `factor` is 1, they are computed in integers, else in float64.
    """

    def __init__(self, factor: float = 1.0, divisor: int = 1):
        self.factor, self.divisor = factor, divisor
        self.is_identity = factor == 1.0 and divisor == 1  # Whether `apply` leaves values unchanged.

    def apply(self, source: np.ndarray, target: np.ndarray) -> None:
        """Write `source`, scaled, to `target`, which has the same shape and may be the same memory.

        If `target` is half precision, `source` may be float32. The result is then rounded only once.
        """
        if source.dtype.kind in "iu" and self.factor == 1.0 and self.divisor > 1:
            wide = source if source.dtype == np.uint64 else source.astype(np.int64, copy=False)
            divisor = wide.dtype.type(self.divisor)
            np.copyto(target, (wide - np.fmod(wide, divisor)) // divisor, casting="unsafe")
        else:
            scaled_copy(source, self.factor / self.divisor, target)


IDENTITY = Scale()


@dataclass(frozen=True, eq=False, slots=True)
class Reduction:
    """The arithmetic of an all-reduce: multiply by `prescale`, combine over the ranks with `op`, apply `scale`."""

    op: ReduceOp  # SUM, MIN, MAX or PRODUCT. An average is a sum whose scale divides.
    prescale: float = 1.0
    scale: Scale = IDENTITY
    quantised: Quantised | None = None  # How the sums are quantised between hosts; None: not at all.


@lru_cache
def divided_before(reduction: Reduction, dtype: np.dtype) -> Reduction:
    """Return `reduction` with its division moved into the prescale, or unchanged if the move could alter results.

    The prescale costs nothing, because values are multiplied while they are copied in any case. Floats may be divided
    before the sum if the divisor is a power of two, because that division is exact (except for sums below 1e-37 or too
    large for the dtype). Half precision has a smaller range, so it is divided after the sum, in float32.
    """
    scale, divisor = reduction.scale, reduction.scale.divisor
    if divisor != 1 and divisor & (divisor - 1) == 0 and dtype.kind in "fc" and not is_half(dtype):
        return Reduction(reduction.op, reduction.prescale / divisor, Scale(scale.factor))
    return reduction


def scaled_copy(source: np.ndarray, scale: float, target: np.ndarray) -> None:
    """Set `target = source * scale`. Half precision is computed in float32, integers in float64 and then truncated."""
    if scale == 1.0:
        if target is not source:
            np.copyto(target, source, casting="unsafe" if is_half(target.dtype) else "same_kind")
    elif is_half(target.dtype):
        np.copyto(target, source.astype(np.float32, copy=False) * np.float32(scale), casting="unsafe")
    elif source.dtype.kind in "iu":
        np.copyto(target, source * np.float64(scale), casting="unsafe")
    else:
        np.multiply(source, source.dtype.type(scale), out=target)


_UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}


def combine(parts: Sequence[np.ndarray] | np.ndarray, op: ReduceOp, target: np.ndarray, scale: Scale) -> None:
    """Write `parts[0] op parts[1] op ...`, scaled, to `target`: elementwise, from left to right.

    float16 and bfloat16 are combined and scaled in float32 and rounded once. Integers wrap around. NaN and infinities
    propagate as in IEEE 754; MIN and MAX propagate NaN too. `target` may be one of `parts`.
    """
    ufunc = _UFUNCS[op]
    if is_half(target.dtype):
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            ufunc(total, part.astype(np.float32), out=total)
        scale.apply(total, target)
        return
    if len(parts) == 1:
        scale.apply(parts[0], target)
        return
    if len(parts) > 2 and any(np.may_share_memory(target, part) for part in parts[2:]):
        parts = np.stack(list(parts))
    ufunc(parts[0], parts[1], out=target)
    for part in parts[2:]:
        ufunc(target, part, out=target)
    if not scale.is_identity:
        scale.apply(target, target)


# -- flat buffers ------------------------------------------------------------------------------------------------------
# They hold C-contiguous arrays of one dtype, one after the other.


class FlatLayout:
    """The positions of arrays in a flat buffer that holds one array after the other. `sizes` are in elements."""

    def __init__(self, sizes: Sequence[int]):
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]  # The number of elements of all arrays.

    def segments(self, start: int, count: int) -> list[tuple[int, slice, slice]]:
        """Return which parts of the arrays are in elements `start` to `start + count - 1` of the flat buffer.

        Each part is (index of the array, slice of the array, slice of the `count` elements).
        """
        index, segments, done = bisect_right(self._starts, start) - 1, [], 0
        while done < count:
            first = start + done - self._starts[index]
            size = min(self._starts[index + 1] - self._starts[index] - first, count - done)
            if size:
                segments.append((index, slice(first, first + size), slice(done, done + size)))
            done += size
            index += 1
        return segments


def segments(arrays: Sequence[np.ndarray]) -> list[tuple[slice, np.ndarray]]:
    """Return (slice of a flat buffer of `arrays`, 1-D view of the array) for each array that is not empty."""
    ends = accumulate([array.size for array in arrays])
    return [(slice(end - array.size, end), array.reshape(-1)) for array, end in zip(arrays, ends) if array.size]


def pack(arrays: Sequence[np.ndarray], target: np.ndarray, scale: float = 1.0) -> None:
    """Copy `arrays` times `scale`, one after the other, to 1-D `target`, which has as many elements as all of them."""
    if len(arrays) == 1:
        scaled_copy(arrays[0].reshape(-1), scale, target)
        return
    for elements, view in segments(arrays):
        scaled_copy(view, scale, target[elements])


def unpack(source: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy 1-D `source` to `arrays`, one after the other. All arrays together have as many elements as `source`."""
    if len(arrays) == 1:
        np.copyto(arrays[0].reshape(-1), source)
        return
    for elements, view in segments(arrays):
        view[...] = source[elements]
