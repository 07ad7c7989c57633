"""Backend for GPU arrays without NCCL: copies them through pinned host memory to the data plane for CPU tensors.

The tensors of a bucket pass as one sequence of bytes, in chunks. While the ranks reduce one chunk, the next one is
copied to the host, and the one before is copied back. Two streams order the copies, one for each direction. Used by
the engine's thread, which waits for the copies to the host.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..core.arithmetic import Reduction
from ..core.interfaces import DataPlane
from ..core.packing import FlatLayout
from ..core.request import ReduceOp
from ..core.tuning import STAGED_CHUNK_BYTES, STAGED_CHUNKS_UNDER_WAY
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import GpuBackend, await_on_host


class StagedData(GpuBackend):
    """Collectives over `host`. Tensors are sent in their own dtype.

    Args:
        device: This rank's GPU.
        rank: This rank.
        host: The data plane for CPU tensors of the same ranks.
        limit_s: Seconds after which a copy between host and GPU fails; 0: never.
        chunk_bytes: Bytes of a chunk.
    """

    def __init__(self, device: GpuDevice, rank: int, host: DataPlane, limit_s: float,
                 chunk_bytes: int = STAGED_CHUNK_BYTES):
        self._device, self._rank, self._host = device, rank, host
        self._limit_s, self._chunk_bytes = limit_s, chunk_bytes
        self._to_host, self._to_gpu = device.stream(), device.stream()
        self._slots: list[np.ndarray] = []

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        return ""

    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        return ""

    def wait_for(self, events: Iterable[GpuEvent]) -> None:
        for event in events:
            self._device.wait(self._to_host, event)
            self._device.wait(self._to_gpu, event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], reduction: Reduction,
                  wire_dtype: str = "") -> None:
        dtype = sources[0].dtype

        def reduce(chunk: np.ndarray) -> None:
            self._host.allreduce([chunk.view(dtype)], [chunk.view(dtype)], reduction)

        self._pass_through(sources, targets, reduce)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._pass_through(sources, targets, lambda chunk: self._host.broadcast(chunk, root_rank))

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        own, gathered = self._fetch(source), self._device.pinned(target.nbytes)
        self._host.allgather(own, gathered, [count * source.dtype.itemsize for count in counts])
        self._copy_back(gathered, target)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        reduced = self._fetch(source).view(source.dtype)
        self._host.allreduce([reduced], [reduced], reduction)
        first = sum(counts[:self._rank])
        self._copy_back(reduced[first:first + counts[self._rank]].view(np.uint8), target)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        itemsize, received_bytes = source.dtype.itemsize, self._device.pinned(target.nbytes)
        own = self._fetch(source)[:sum(sent) * itemsize]  # There may be more rows than are sent.
        self._host.alltoall(own, received_bytes, [count * itemsize for count in sent],
                            [count * itemsize for count in received], largest * itemsize)
        self._copy_back(received_bytes, target)

    def finish(self) -> list[GpuEvent]:
        return [self._device.record(self._to_gpu)]

    def check(self) -> None:
        """Do nothing: all methods raise their own errors."""

    def revoke(self) -> bool:
        """Return True: only `host` waits for other ranks, and it has its own `abandon`."""
        return True

    def abandon(self) -> None:
        """Do nothing: only `host` waits for other ranks, and it has its own `abandon`."""

    def close(self) -> None:
        self._slots.clear()

    def _fetch(self, source: GpuArray) -> np.ndarray:
        """Copy the bytes of `source` to the host. Waits for the GPU."""
        own = self._device.pinned(source.nbytes)
        self._device.copy(own.ctypes.data, source.address, own.nbytes, self._to_host)
        await_on_host(self._device.record(self._to_host), self._limit_s)
        return own

    def _copy_back(self, result: np.ndarray, target: GpuArray) -> None:
        """Copy bytes of the host to `target`. Waits for the GPU, so that the bytes may be freed."""
        self._device.copy(target.address, result.ctypes.data, result.nbytes, self._to_gpu)
        await_on_host(self._device.record(self._to_gpu), self._limit_s)

    def _pass_through(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray],
                      work: Callable[[np.ndarray], None]) -> None:
        """Copy `sources` to the host in chunks, call `work`, which changes a chunk, and copy the chunk to `targets`."""
        if not self._slots:
            self._slots = [self._device.pinned(self._chunk_bytes) for _ in range(STAGED_CHUNKS_UNDER_WAY)]
        sizes = [source.nbytes for source in sources]
        chunks = _chunks(sizes, self._chunk_bytes)
        arrived: list[GpuEvent] = []
        returned: list[GpuEvent] = []

        def start_fetch(number: int) -> None:
            if number >= len(chunks):
                return
            if number >= STAGED_CHUNKS_UNDER_WAY:
                self._device.wait(self._to_host, returned[number - STAGED_CHUNKS_UNDER_WAY])
            address = self._slots[number % STAGED_CHUNKS_UNDER_WAY].ctypes.data
            for i, start, nbytes in chunks[number]:
                self._device.copy(address, sources[i].address + start, nbytes, self._to_host)
                address += nbytes
            arrived.append(self._device.record(self._to_host))

        start_fetch(0)
        for number, segments in enumerate(chunks):
            start_fetch(number + 1)
            await_on_host(arrived[number], self._limit_s)
            chunk = self._slots[number % STAGED_CHUNKS_UNDER_WAY][:sum(nbytes for _, _, nbytes in segments)]
            work(chunk)
            address = chunk.ctypes.data
            for i, start, nbytes in segments:
                self._device.copy(targets[i].address + start, address, nbytes, self._to_gpu)
                address += nbytes
            returned.append(self._device.record(self._to_gpu))
        # The next bucket overwrites the slots, so its copies to the host must wait for these copies.
        self._device.wait(self._to_host, self._device.record(self._to_gpu))


def _chunks(sizes: Sequence[int], limit: int) -> list[list[tuple[int, int, int]]]:
    """Chunks of at most `limit` bytes, each as segments (index of the tensor, first byte, bytes)."""
    layout = FlatLayout(sizes)
    return [[(i, part.start, part.stop - part.start)
             for i, part, _ in layout.segments(start, min(limit, layout.length - start))]
            for start in range(0, layout.length, limit)]
