"""Array: the common properties of numpy arrays and GPU arrays, for code that does not read the elements.

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
        """The sizes of the dimensions."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
