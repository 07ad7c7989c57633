"""Elementwise arithmetic of reductions: prescale, combine, scale.

Only `Scale` divides a sum by the number of ranks. Pure functions on numpy arrays; any thread may call them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .dtypes import is_half
from .quantised import Quantised
from .request import ReduceOp


class Scale:
    """Multiplies a reduced value by `factor` and divides it by `divisor` (a number of ranks), before it is rounded.

    Integers are divided exactly and truncated toward zero.
    """

    def __init__(self, factor: float = 1.0, divisor: int = 1):
        self.factor, self.divisor = factor, divisor
        self.is_identity = factor == 1.0 and divisor == 1  # Whether `apply` leaves values unchanged.

    def apply(self, source: np.ndarray, target: np.ndarray) -> None:
        """Write the scaled `source` to `target`. Both have the same shape, and may be the same memory.

        For a half precision `target`, `source` may be float32, so that the result is rounded once.
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
    """Return `reduction` with its division moved into the prescale, if the result stays the same.

    The prescale costs nothing, since it is applied during a copy that is made in any case. The result is the same for
    floats and a divisor that is a power of two: both divisions are exact, except for sums below 1e-37 or too large for
    the dtype. Half precision has a smaller range, so its division stays after the sum, in float32.
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
