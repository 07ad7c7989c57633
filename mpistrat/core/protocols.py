"""Array, what numpy arrays and GPU arrays have in common for all that decides without their elements.

Only for annotations.
"""

from typing import Protocol

import numpy as np


class Array(Protocol):
    """C-contiguous elements of one dtype, in the memory of the host or of a GPU."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the dimensions."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
