"""Cached properties of dtypes. Without the cache, numpy's `dtype.name` takes as long as a small reduction.

Any thread may call the functions.
"""

from functools import cache

import numpy as np

HALVES = ("float16", "bfloat16")


@cache
def name_of(dtype: np.dtype) -> str:
    """Return the name of a dtype, which is the same on all ranks."""
    return dtype.name


@cache
def is_half(dtype: np.dtype) -> bool:
    """Return whether a dtype is half precision. Such values are combined and scaled in float32."""
    return name_of(dtype) in HALVES
