"""Dtypes by name."""

import numpy as np


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name, bfloat16 included."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # Without it the other dtypes can be tested.
    return np.dtype(ml_dtypes.bfloat16)
