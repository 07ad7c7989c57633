"""The arguments and results of a custom call that XLA has compiled for a GPU: in GPU memory, in the order of a stream.

Tests run it with host memory in place of GPU memory.

XLA calls the handler when it launches the call. The arguments are complete only when XLA's stream reaches the call;
before, earlier work may still use the memory of a result. So a collective begins after an event of the stream. When the
handler returns, XLA may launch the work after the call. By then the stream waits for the collective, or the results are
complete.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...api.tensors import host_copies_of, this_ranks_gpu
from ...core.errors import EngineError
from ...gpu.arrays import Allocated, GpuArray, GpuStream, GpuTensors
from ..bridge.gpu_device import has_gpu
from . import ffi

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.


def is_used() -> bool:
    """Whether custom calls use GPU memory: TensorFlow runs compiled functions on a GPU if it has one."""
    return has_gpu()


def place_of(call: ffi.Call) -> "tuple[Device, GpuStream]":
    """The GPU that runs a program, and XLA's stream. Raises as api.tensors.this_ranks_gpu."""
    device = this_ranks_gpu(call.device_number())
    return device, device.stream_at(call.stream())


class GpuMemory:
    """The arguments and results of one call; valid until the handler returns.

    Args:
        given: The dtypes of the arguments, of numpy.
        returned: The dtypes of the results.
    """

    def __init__(self, call: ffi.Call, given: Sequence[Any], returned: Sequence[Any]):
        self._device, self.stream = place_of(call)
        # arguments, results: As arrays.
        self.arguments: list[GpuArray] = call.arguments(given, _array)
        self.results: list[GpuArray] = call.results(returned, _array)

    def is_in_place(self, first: int, count: int) -> bool:
        """Whether `count` results from `first` on have the memory of the arguments with these indices."""
        return all(self.arguments[index].address == self.results[index].address or not self.results[index].nbytes
                   for index in range(first, first + count))

    def tensors(self, arguments: Sequence[GpuArray], results: Sequence[GpuArray], reads: bool = True) -> GpuTensors:
        """Return some of the arguments as tensors for the engine, with the memory of their results.

        `reads`: Whether XLA's stream reads the results when the request is complete. If False, it waits for them later.
        """
        def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
            made = [result if shape == result.shape else self._other(shape, result.dtype)
                    for shape, result in zip(shapes, results, strict=True)]
            return Allocated([array.address for array in made], made, None)

        tensors = GpuTensors(self._device, [array.address for array in arguments], [array.shape for array in arguments],
                             [array.dtype for array in arguments], None, [self.stream],
                             ([self.stream] if reads else []) if self._device.can_wait(self.stream) else None, allocate)
        tensors.prepare(keeps_shapes=False)
        return tensors

    def _other(self, shape: tuple[int, ...], dtype: np.dtype) -> GpuArray:
        """Memory for another number of rows than XLA has compiled: the call ends in an error, after the collective."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._device.scratch(max(nbytes, 1))
        if memory is None:
            raise EngineError(f"the GPU has no memory left for a result of {nbytes} bytes")
        return GpuArray(memory.address, shape, dtype, memory.owner)

    def on_host(self, first: int, count: int) -> list[np.ndarray]:
        """Copies of `count` arguments from `first` on. Waits for XLA's stream."""
        return host_copies_of(self._device).fetched(self.tensors(self.arguments[first:first + count], ()))

    def write_number(self, index: int, number: int) -> None:
        """Write the integer that is the result with this index, in XLA's stream. The host does not wait."""
        result = self.results[index]
        with self._device.current():
            self._device.write_number(result.address, number, result.dtype.itemsize // 4, self.stream)

    def write(self, index: int, value: np.ndarray) -> None:
        """Copy the result with this index from the host. Waits for XLA's stream."""
        with self._device.current():
            tensors = self.tensors((), self.results[index:index + 1])
        host_copies_of(self._device).returned([value], tensors)


def _array(buffer: ffi.Buffer, dtype: np.dtype) -> GpuArray:
    return GpuArray(buffer.data or 0, tuple(buffer.dims[:buffer.rank]), dtype, None)
