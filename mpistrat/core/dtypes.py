"""Names of dtypes, remembered: numpy composes them anew at every look, which takes longer than a small reduction."""

from functools import cache

import numpy as np

HALVES = ("float16", "bfloat16")


@cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's name, as it is known to all ranks."""
    return dtype.name


@cache
def is_half(dtype: np.dtype) -> bool:
    """Whether values are combined and scaled in float32 instead of the dtype itself."""
    return name_of(dtype) in HALVES
