"""Cached properties of dtypes: numpy composes `dtype.name` at each access, which takes as long as a small reduction.

Any thread may call the functions.
"""

from functools import cache

import numpy as np

HALVES = ("float16", "bfloat16")


@cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's name, which is the same on all ranks."""
    return dtype.name


@cache
def is_half(dtype: np.dtype) -> bool:
    """Whether the dtype is half precision, which is combined and scaled in float32."""
    return name_of(dtype) in HALVES
