"""Copies GPU tensors to the host and back, for jobs in which only some ranks have a GPU and all reduce on the host.

Any thread may call it.
"""

import numpy as np

from .arrays import GpuArray, GpuDevice, GpuInput
from .backend import await_on_host


class HostCopies:
    """Copies between this rank's GPU and pinned memory. Any thread may use it.

    Args:
        device: This rank's GPU.
        limit_s: Seconds after which a copy fails; 0: never.
    """

    def __init__(self, device: GpuDevice, limit_s: float):
        self._device, self._limit_s = device, limit_s
        with device.current():
            self._stream = device.stream()

    def fetched(self, tensor: GpuInput) -> np.ndarray:
        """Return the contents in host memory. Waits for the GPU."""
        with self._device.current():
            memory = self._device.pinned(tensor.nbytes)
            if tensor.ready is not None:
                self._device.wait(self._stream, tensor.ready)
            self._copy(memory.ctypes.data, tensor.address, tensor.nbytes)
        return memory.view(tensor.dtype).reshape(tensor.shape)

    def returned(self, result: np.ndarray, tensor: GpuInput) -> GpuArray:
        """Copy the result to memory of the library of `tensor`. Waits for the GPU."""
        with self._device.current():
            made, stream = tensor.allocate(result.shape)
            memory = self._device.pinned(result.nbytes)
            memory.view(result.dtype)[:] = result.reshape(-1)
            if stream is not None:
                self._device.wait(self._stream, self._device.record(stream))
            self._copy(made.address, memory.ctypes.data, result.nbytes)
        return made

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._device.copy(target, source, nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
