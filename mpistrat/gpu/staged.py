"""Backend for GPU arrays without NCCL: copies them to pinned host memory, where the ranks reduce them, and back.

The host waits for the copies. The backend is for ranks that share a GPU, for hosts without NCCL, and for tensors that
NCCL cannot reduce. Used by the engine's thread.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..core.arithmetic import Reduction
from ..core.errors import EngineError
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp
from .arrays import Allocated, GpuArray, GpuDevice, GpuEvent, GpuTensors
from .backend import GpuBackend, Reducer, await_on_host


class StagedData(GpuBackend):
    """Collectives over `host`, which has its own errors and `abandon`. Tensors are sent in their own dtype.

    Args:
        host: The data plane for CPU tensors of the same ranks.
        limit_s: Seconds after which a copy between host and GPU fails; 0: never.
    """

    def __init__(self, device: GpuDevice, rank: int, host: DataPlane, limit_s: float):
        self._device, self._rank, self._host, self._limit_s = device, rank, host, limit_s
        self._stream = device.stream()
        self._events: list[GpuEvent] = []  # that the next copy waits for

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        return ""

    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        return ""

    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        self._events = list(events)

    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction, wire_dtype: str = "") -> Reducer:
        kinds = [(array.nbytes, array.dtype) for array in arrays]

        def reduce(sources: Sequence[int], targets: Sequence[int]) -> None:
            fetched = [self.fetched(source, nbytes).view(dtype)
                       for source, (nbytes, dtype) in zip(sources, kinds, strict=True)]
            self._host.allreduce(fetched, fetched, reduction)
            for result, target in zip(fetched, targets, strict=True):
                self._copy_back(result, target)

        return reduce

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            own = self.fetched(source.address, source.nbytes)
            self._host.broadcast(own, root_rank)
            self._copy_back(own, target.address)

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        own, gathered = self.fetched(source.address, source.nbytes), self._device.pinned(target.nbytes)
        self._host.allgather(own, gathered, [count * source.dtype.itemsize for count in counts])
        self._copy_back(gathered, target.address)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        reduced = self.fetched(source.address, source.nbytes).view(source.dtype)
        self._host.allreduce([reduced], [reduced], reduction)
        first = sum(counts[:self._rank])
        self._copy_back(reduced[first:first + counts[self._rank]].view(np.uint8), target.address)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        itemsize, received_bytes = source.dtype.itemsize, self._device.pinned(target.nbytes)
        # `source` may have more rows than are sent.
        own = self.fetched(source.address, source.nbytes)[:sum(sent) * itemsize]
        self._host.alltoall(own, received_bytes, [count * itemsize for count in sent],
                            [count * itemsize for count in received], largest * itemsize)
        self._copy_back(received_bytes, target.address)

    def finish(self) -> list[GpuEvent]:
        return []  # The host has waited for all work.

    def last_events(self) -> list[GpuEvent]:
        return [self._device.record(self._stream)]  # The host may have given up.

    def uploaded(self, arrays: Sequence[np.ndarray]) -> GpuTensors:
        """Copy arrays to the GPU, for a rank in join(), which does not read the results. Local. Waits for the GPU.

        Raises EngineError: The GPU does not have enough memory.
        """
        dtypes = [array.dtype for array in arrays]

        def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
            made: list[GpuArray] = []
            for shape, dtype in zip(shapes, dtypes, strict=True):
                nbytes = math.prod(shape) * dtype.itemsize
                memory = self._device.scratch(max(nbytes, 1))
                if memory is None:
                    raise EngineError(f"the GPU has no memory for {nbytes} bytes, which this rank needs for the "
                                      "collectives of other ranks while it waits in join().")
                made.append(memory)
            # Nothing else uses the memory, and it is freed when the collective is done.
            return Allocated([each.address for each in made], made, None)

        shapes = [array.shape for array in arrays]
        inputs = allocate(shapes)
        for array, address in zip(arrays, inputs.addresses, strict=True):
            staged = self._device.pinned(array.nbytes)
            staged[:] = array.reshape(-1).view(np.uint8)
            self._copy_back(staged, address)
        return GpuTensors(self._device, inputs.addresses, shapes, dtypes, inputs.results, (), (), allocate)

    def fetched(self, source: int, nbytes: int) -> np.ndarray:
        """Copy the bytes at the address `source` to the host. Waits for the GPU."""
        while self._events:
            self._device.wait(self._stream, self._events.pop())
        own = self._device.pinned(nbytes)
        self._device.copy(own.ctypes.data, source, nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
        return own

    def _copy_back(self, result: np.ndarray, target: int) -> None:
        """Copy bytes of the host to the address `target`. Waits for the GPU, so that the bytes may be freed."""
        self._device.copy(target, result.ctypes.data, result.nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
