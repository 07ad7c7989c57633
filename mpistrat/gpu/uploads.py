"""Copies of host arrays on the GPU as inputs of a collective, for a rank in join() that has no tensors of its own.

Used by the engine's thread, within `GpuDevice.current()`.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..core.errors import EngineError
from .arrays import Allocated, GpuArray, GpuDevice, GpuTensors


def uploaded(device: GpuDevice, arrays: Sequence[np.ndarray]) -> GpuTensors:
    """Enqueue copies of `arrays` to new memory of the GPU. Local; the host does not wait.

    Raises:
        EngineError: The GPU has not enough memory.
    """
    stream, memory, staged = device.stream(), [], []
    for array in arrays:
        memory.append(_memory(device, array.nbytes))
        staged.append(device.pinned(max(array.nbytes, 1)))
        staged[-1][:array.nbytes] = array.reshape(-1).view(np.uint8)
        device.copy(memory[-1].address, staged[-1].ctypes.data, array.nbytes, stream)
    dtypes = [array.dtype for array in arrays]

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        results = [_memory(device, math.prod(shape) * dtype.itemsize)
                   for shape, dtype in zip(shapes, dtypes, strict=True)]
        # Only this module's inputs and results use the memory, and these are freed when their work is done.
        return Allocated([result.address for result in results], results, None)

    # Nobody reads the results.
    tensors = GpuTensors(device, [array.address for array in memory], [array.shape for array in arrays], dtypes,
                         (memory, staged), [stream], (), allocate)
    tensors.prepare(keeps_shapes=False)
    return tensors


def _memory(device: GpuDevice, nbytes: int) -> GpuArray:
    memory = device.scratch(max(nbytes, 1))
    if memory is None:
        raise EngineError(f"the GPU has no memory for {nbytes} bytes, which this rank needs for the collectives of "
                          "other ranks while it waits in join().")
    return memory
