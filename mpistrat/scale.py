"""Factors on the way in and out of a reduction: scaled_copy, and Scale, the one place that makes averages of sums."""

from functools import lru_cache

import numpy as np

from .dtypes import is_half


class Scale:
    """What happens to a reduced value before it is rounded: times `factor`, divided by `divisor` (a number of ranks).

    Integers are divided exactly and truncated toward zero.
    """

    def __init__(self, factor: float = 1.0, divisor: int = 1):
        self.factor, self.divisor = factor, divisor

    @property
    def is_identity(self) -> bool:
        """Whether values are left as they are."""
        return self.factor == 1.0 and self.divisor == 1

    def apply(self, source: np.ndarray, target: np.ndarray) -> None:
        """Write the scaled `source` to `target`; they are of one shape, and may be the same memory.

        For a half precision `target` the `source` may be the float32 that it is computed in.
        """
        if source.dtype.kind in "iu" and self.factor == 1.0 and self.divisor > 1:
            wide = source if source.dtype == np.uint64 else source.astype(np.int64, copy=False)
            divisor = wide.dtype.type(self.divisor)
            np.copyto(target, (wide - np.fmod(wide, divisor)) // divisor, casting="unsafe")
        else:
            scaled_copy(source, self.factor / self.divisor, target)


IDENTITY = Scale()


@lru_cache
def divided_before(scale: Scale, dtype: np.dtype) -> tuple[float, Scale]:
    """By what to multiply the values of each rank, which costs nothing while they are copied, and what is left to do.

    Floats are divided before by powers of two, where the average is the same: both are exact (but for sums below 1e-37,
    or too large for the dtype). Half precision is not so wide, and is summed and divided in float32.
    """
    divisor = scale.divisor
    if divisor & (divisor - 1) == 0 and dtype.kind in "fc" and not is_half(dtype):
        return 1 / divisor, Scale(scale.factor)
    return 1.0, scale


def scaled_copy(source: np.ndarray, scale: float, target: np.ndarray) -> None:
    """`target = source * scale`, computed in float32 for half precision, in float64 for integers (then truncated)."""
    if scale == 1.0:
        if target is not source:
            np.copyto(target, source, casting="unsafe" if is_half(target.dtype) else "same_kind")
    elif is_half(target.dtype):
        np.copyto(target, source.astype(np.float32, copy=False) * np.float32(scale), casting="unsafe")
    elif source.dtype.kind in "iu":
        np.copyto(target, source * np.float64(scale), casting="unsafe")
    else:
        np.multiply(source, source.dtype.type(scale), out=target)
