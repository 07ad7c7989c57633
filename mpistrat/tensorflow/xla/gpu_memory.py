"""The arguments and results of a custom call that XLA has compiled for a GPU: in its memory, in the order of a stream.

Tests run it with host memory in place of a GPU's.

XLA calls the handler when it launches the call, so arguments are complete only where XLA's stream has come to it. Until
then the memory of a result may be in use by work before the call. So a collective begins behind an event of the stream.
When the handler returns, the results are complete, and XLA may launch what comes after.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...api.interop.own_gpu import gpu_input, host_copies_of, this_ranks_gpu
from ...core.errors import EngineError
from ...gpu.arrays import Allocated, GpuArray, GpuInput, GpuStream
from . import context, ffi

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.


def is_used() -> bool:
    """Whether the memory of custom calls is a GPU's."""
    return context.is_for_gpu()


def place_of(call: ffi.Call) -> "tuple[Device, GpuStream]":
    """The GPU that runs a program, and XLA's stream. Raises as api.interop.own_gpu.this_ranks_gpu."""
    device = this_ranks_gpu(call.device_number())
    return device, device.stream_at(call.stream())


class GpuMemory:
    """The arguments and results of one call; valid until the handler returns.

    Args:
        call: The call.
        given: The dtypes of the arguments.
        returned: The dtypes of the results. An argument that has a result has the same place.

    Attributes:
        inputs: The arguments, as the engine takes them. The results of a collective on them are those of the call.
        shapes: Those of the results.
    """

    def __init__(self, call: ffi.Call, given: Sequence[Any], returned: Sequence[Any]):
        self._device, self._stream = place_of(call)
        with self._device.current():
            ready = self._device.record(self._stream)
        results = call.results(returned, _array)
        self.shapes = [result.shape for result in results]
        self._results = [gpu_input(result, self._device, ready, self._allocator(result)) for result in results]
        self.inputs = [gpu_input(argument, self._device, ready, self._results[i].allocate if i < len(results) else
                                 self._allocator(argument))
                       for i, argument in enumerate(call.arguments(given, _array))]

    def _allocator(self, result: GpuArray) -> Any:
        def allocate(shape: tuple[int, ...]) -> Allocated:
            if shape == result.shape:
                return result, self._stream
            # Another number of rows than XLA has compiled: the call ends in an error, after the collective.
            made = GpuArray(0, shape, result.dtype, None)
            memory = self._device.scratch(max(made.nbytes, 1))
            if memory is None:
                raise EngineError(f"there is no GPU memory for a result of {made.nbytes} bytes")
            return GpuArray(memory.address, shape, result.dtype, memory.owner), None
        return allocate

    def on_host(self, tensor: GpuInput) -> np.ndarray:
        """A copy of an argument. Waits for XLA's stream."""
        return host_copies_of(self._device).fetched(tensor)

    def write(self, place: int, value: np.ndarray) -> None:
        """Copy the result with this place from the host."""
        host_copies_of(self._device).returned(value, self._results[place])


def _array(buffer: ffi.Buffer, dtype: np.dtype | type) -> GpuArray:
    return GpuArray(buffer.data or 0, tuple(buffer.dims[:buffer.rank]), np.dtype(dtype), None)
