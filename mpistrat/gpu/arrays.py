"""Arrays on a GPU as the engine sees them: an address, a dtype, a shape, and who keeps the memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class GpuArray:
    """C-contiguous elements in the memory of this rank's GPU.

    Attributes:
        address: Of the first element, as the GPU knows it.
        owner: Keeps the memory; for a result it is what the caller gets.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: Any = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class GpuInput(GpuArray):
    """A tensor handed over for a collective, in place of a numpy array.

    Memory for the result comes from the library that the tensor is of, in the order of the caller's stream: so it may
    be freed, and used again by work that the caller enqueues later, like any other memory of that library.

    Attributes:
        device: This rank's GPU (`device.Device`, or what stands in for it).
        ready: An event after everything that the contents wait for.
        allocate: Makes an uninitialised array of the same library and dtype, and of a given shape. Also returns an
            event after everything that still uses the memory.
    """

    device: Any = None
    ready: Any = None
    allocate: Callable[[tuple[int, ...]], tuple[GpuArray, Any]] | None = None
