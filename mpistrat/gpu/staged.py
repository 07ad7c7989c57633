"""Collectives on GPU arrays by way of pinned host memory and the paths for CPU tensors, where NCCL cannot serve.

The tensors of a bucket go through in chunks, as one stream of bytes: while the ranks reduce one, the next is on its way
to the host, and the one before on its way back.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..core.arithmetic import Reduction
from ..core.interfaces import DataPlane
from ..core.packing import FlatLayout
from ..core.request import ReduceOp
from .arrays import GpuArray
from .backend import Completion, GpuBackend, await_on_host

CHUNK_BYTES = 8 * 1024 * 1024
_SLOTS = 3


class StagedData(GpuBackend):
    """Collectives over `host`, which must be able to reduce CPU tensors of the same ranks. Tensors travel as they are.

    Args:
        device: This rank's GPU.
        rank: This rank.
        host: Reduces what is in host memory.
        limit_s: How long copies between host and GPU may take; 0: for ever.
        chunk_bytes: Of one piece on its way.
    """

    def __init__(self, device: Any, rank: int, host: DataPlane, limit_s: float, chunk_bytes: int = CHUNK_BYTES):
        self._device, self._rank, self._host = device, rank, host
        self._limit_s, self._chunk_bytes = limit_s, chunk_bytes
        self._to_host, self._to_gpu = device.stream(), device.stream()
        self._slots: list[np.ndarray] = []

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire: str = "") -> str:
        return ""

    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        return ""

    def wait_for(self, events: Iterable[Any]) -> None:
        for event in events:
            self._device.wait(self._to_host, event)
            self._device.wait(self._to_gpu, event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], reduction: Reduction,
                  wire: str = "") -> None:
        dtype = sources[0].dtype

        def reduce(chunk: np.ndarray) -> None:
            self._host.allreduce([chunk.view(dtype)], [chunk.view(dtype)], reduction)

        self._pass_through(sources, targets, reduce)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._pass_through(sources, targets, lambda chunk: self._host.broadcast(chunk, root_rank))

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        own, everybody = self._fetched(source), self._device.pinned(target.nbytes)
        self._host.allgather(own, everybody, [count * source.dtype.itemsize for count in counts])
        self._return(everybody, target)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        reduced = self._fetched(source).view(source.dtype)
        self._host.allreduce([reduced], [reduced], reduction)
        first = sum(counts[:self._rank])
        self._return(reduced[first:first + counts[self._rank]].view(np.uint8), target)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int]) -> None:
        size, own = len(sent), self._fetched(source)
        table = np.empty(size * size, np.int64)
        self._host.allgather(np.array(sent, np.int64) * source.dtype.itemsize, table, [size] * size)
        # What reduces CPU tensors has no such exchange: everybody gets everything, and keeps its part.
        everybody = np.empty(int(table.sum()), np.uint8)
        self._host.allgather(own, everybody, table.reshape(size, size).sum(axis=1).tolist())
        ends = np.cumsum(table)
        places = range(self._rank, size * size, size)
        mine: np.ndarray = self._device.pinned(target.nbytes)
        np.concatenate([everybody[ends[i] - table[i]:ends[i]] for i in places], out=mine)
        self._return(mine, target)

    def barrier(self) -> None:
        byte = np.zeros(1, np.uint8)
        self._host.allreduce([byte], [byte], Reduction(ReduceOp.MAX))

    def finish(self) -> Completion:
        return Completion([self._device.record(self._to_gpu)])

    def check(self) -> None:
        """What goes wrong on this path is raised where it does."""

    def abandon(self) -> None:
        """What waits for other ranks is `host`, which has its own `abandon`."""

    def close(self) -> None:
        self._slots.clear()

    def _fetched(self, source: GpuArray) -> np.ndarray:
        """The bytes of `source` on the host."""
        own: np.ndarray = self._device.pinned(source.nbytes)
        self._device.copy(own.ctypes.data, source.address, own.nbytes, self._to_host)
        await_on_host(self._device.record(self._to_host), self._limit_s)
        return own

    def _return(self, result: np.ndarray, target: GpuArray) -> None:
        """Write bytes of the host to `target`. Waits until they may be freed."""
        self._device.copy(target.address, result.ctypes.data, result.nbytes, self._to_gpu)
        await_on_host(self._device.record(self._to_gpu), self._limit_s)

    def _pass_through(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray],
                      work: Callable[[np.ndarray], None]) -> None:
        """Take `sources` to the host, chunk by chunk, let all ranks work on a chunk in place, and take it back."""
        if not self._slots:
            self._slots = [self._device.pinned(self._chunk_bytes) for _ in range(_SLOTS)]
        sizes = [source.nbytes for source in sources]
        chunks = _chunks(sizes, self._chunk_bytes)
        arrived: list[Any] = []
        returned: list[Any] = []

        def send_for(number: int) -> None:
            if number >= len(chunks):
                return
            if number >= _SLOTS:
                self._device.wait(self._to_host, returned[number - _SLOTS])
            place = self._slots[number % _SLOTS].ctypes.data
            for i, start, nbytes in chunks[number]:
                self._device.copy(place, sources[i].address + start, nbytes, self._to_host)
                place += nbytes
            arrived.append(self._device.record(self._to_host))

        send_for(0)
        for number, pieces in enumerate(chunks):
            send_for(number + 1)
            await_on_host(arrived[number], self._limit_s)
            chunk = self._slots[number % _SLOTS][:sum(nbytes for _, _, nbytes in pieces)]
            work(chunk)
            place = chunk.ctypes.data
            for i, start, nbytes in pieces:
                self._device.copy(targets[i].address + start, place, nbytes, self._to_gpu)
                place += nbytes
            returned.append(self._device.record(self._to_gpu))
        # The next bucket writes to the slots from its first chunk on.
        self._device.wait(self._to_host, self._device.record(self._to_gpu))


def _chunks(sizes: Sequence[int], limit: int) -> list[list[tuple[int, int, int]]]:
    """Chunks of at most `limit` bytes, each as pieces (index of the tensor, first byte, bytes)."""
    line = FlatLayout(sizes)
    return [[(i, part.start, part.stop - part.start)
             for i, part, _ in line.pieces(start, min(limit, line.length - start))]
            for start in range(0, line.length, limit)]
