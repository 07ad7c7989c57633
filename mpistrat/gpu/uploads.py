"""Copies of host arrays on the GPU as inputs of a collective, for a rank in join() that has no tensors of its own.

Used by the engine's thread, within `GpuDevice.current()`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..core.errors import EngineError
from .arrays import Allocated, GpuArray, GpuDevice, GpuInput


def uploaded(device: GpuDevice, arrays: Sequence[np.ndarray]) -> list[GpuInput]:
    """Enqueue copies of `arrays` to new memory of the GPU. Local; the host does not wait.

    Raises:
        EngineError: The GPU has not enough memory.
    """
    stream = device.stream()
    inputs = []
    for array in arrays:
        staged = device.pinned(max(array.nbytes, 1))
        staged[:array.nbytes] = array.reshape(-1).view(np.uint8)
        memory = _memory(device, array.nbytes)
        device.copy(memory.address, staged.ctypes.data, array.nbytes, stream)

        def allocate(shape: tuple[int, ...], dtype: np.dtype = array.dtype) -> Allocated:
            result = _memory(device, math.prod(shape) * dtype.itemsize)
            # Only this module's inputs and results use the memory, and these are freed when their work is complete.
            return GpuArray(result.address, shape, dtype, result), None

        # The owner keeps the pinned memory too, until the collective is complete.
        inputs.append(GpuInput(memory.address, array.shape, array.dtype, (memory, staged), device, None, allocate))
    ready = device.record(stream)
    return [dataclasses.replace(array, ready=ready) for array in inputs]


def _memory(device: GpuDevice, nbytes: int) -> GpuArray:
    memory = device.scratch(max(nbytes, 1))
    if memory is None:
        raise EngineError(f"the GPU has no memory for {nbytes} bytes, which this rank needs for the collectives of "
                          "other ranks while it waits in join().")
    return memory
