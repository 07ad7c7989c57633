"""Data plane of the ranks of one host: all-reduces and reduce-scatters, and small all-to-alls and all-gathers.

Used by the engine's thread.
"""

import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ...core import tuning
from ...core.arithmetic import Reduction, combine, divided_before, scaled_copy
from ...core.interfaces import DataPlane
from ...core.memory import ALIGNMENT
from .segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from .two_shot import TwoShotData

_BYTE = np.dtype(np.uint8)


class ReduceScatter:
    """A large reduce-scatter that runs in chunks (see TwoShotData.run). Chunk k has piece k of each rank's part.

    On one host, `memories` are shared: a rank writes pieces to its own row, where the other ranks read them. If each
    host has one rank, `memories` are local: a rank receives a piece into the row of the sender.

    `memories`: A row for each rank, in the dtype of the elements. `index`: This rank's position among the ranks.
    """

    def __init__(self, memories: np.ndarray, index: int, first: int, source: np.ndarray,
                 target: np.ndarray, counts: Sequence[int], reduction: Reduction):
        self._memories, self._index, self._count = memories, index, len(counts)
        self._source, self._target, self._reduction = source, target, reduction
        piece_bytes = memories[index].nbytes // (tuning.SHM_SCATTERS_UNDER_WAY * self._count) // ALIGNMENT * ALIGNMENT
        self._step = piece_bytes // source.itemsize  # elements of a piece
        self._bounds = [(end - count, end) for end, count in zip(accumulate(counts), counts)]
        self._packs_own = reduction.prescale != 1.0  # A prescale needs a copy.
        self.first, self.chunks = first, range(-(-max(counts) // self._step))

    def pack(self, k: int) -> None:
        """Write this rank's pieces of chunk k to its row of `memories`."""
        for rank in range(self._count):
            if rank != self._index or self._packs_own:
                piece = self._piece(rank, k)
                scaled_copy(piece, self._reduction.prescale, self._packed(self._index, rank, k, piece.size))

    def reduce(self, k: int) -> None:
        """Reduce this rank's piece of chunk k, which all ranks have packed or sent, into the target."""
        target = self._target[k * self._step:(k + 1) * self._step]
        parts = self.received(k)
        if not self._packs_own:
            parts[self._index] = self._piece(self._index, k)
        combine(parts, self._reduction.op, target, self._reduction.scale)

    def sent(self, k: int) -> list[np.ndarray]:
        """Return the pieces of chunk k to send, one to each rank, multiplied by the prescale factor."""
        if not self._packs_own:
            return [self._piece(rank, k) for rank in range(self._count)]
        self.pack(k)
        return [self._packed(self._index, rank, k, self._piece(rank, k).size) for rank in range(self._count)]

    def received(self, k: int) -> list[np.ndarray]:
        """Return, for each rank, the memory for that rank's values of the piece of chunk k that this rank reduces."""
        size = self._piece(self._index, k).size
        return [self._packed(rank, self._index, k, size) for rank in range(self._count)]

    def _piece(self, rank: int, k: int) -> np.ndarray:
        """Return piece k of the part of the source for `rank`; empty if that part has fewer pieces."""
        start, stop = self._bounds[rank]
        return self._source[min(start + k * self._step, stop):min(start + (k + 1) * self._step, stop)]

    def _packed(self, owner: int, rank: int, k: int, size: int) -> np.ndarray:
        """Return where the row of `owner` has piece k of the part that `rank` reduces. `size`: Its elements."""
        start = (k % tuning.SHM_SCATTERS_UNDER_WAY * self._count + rank) * self._step
        return self._memories[owner][start:start + size]


class SharedMemoryData(TwoShotData):
    """Collectives among the ranks of one host.

    All-reduces are those of TwoShotData. A reduce-scatter is the first half of an all-reduce: a rank reduces its part
    directly into its target. A small reduce-scatter is one-shot, like a small all-reduce.

    All-to-alls and all-gathers copy arrays into shared memory, and from there to the targets, if the arrays fit. Larger
    arrays are passed to `others`, because MPI libraries copy large messages directly between two processes.
    """

    name = "shared_memory"

    def __init__(self, memory: HostMemory, chunks: Sequence[int], others: DataPlane):
        super().__init__(memory, chunks, others)
        self._memories = self._views_of(_BYTE).parts
        self._memory_bytes = self._memories[0].nbytes  # of one rank

    @classmethod
    def chunks_for(cls, count: int) -> tuple[int, ...]:
        """Return the chunk sizes (bytes, ascending) to try with `count` ranks on this host, limited by its memory."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = min(tuning.SHM_MOST_CHUNK_MEMORY, memory // tuning.SHM_MOST_CHUNK_MEMORY_PART)
        return cls.chunk_bytes, *(chunk for chunk in tuning.SHM_LARGER_CHUNKS if cls.memory_bytes(count, chunk) <= most)

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        memories = self._views_of(source.dtype).parts
        if source.nbytes > self._one_shot_bytes:
            work = ReduceScatter(memories, self._index, self.last_chunk + 1, source, target, counts, reduction)
            self.run(work, (self._scatter, self._reduce_part))
            self.free_at = [self.last_chunk] * self.slots
            return
        reduction, start = divided_before(reduction, source.dtype), sum(counts[:self._index])
        mine, parts = memories[self._index][:source.size], [part[start:start + target.size] for part in memories]
        self._in_one_chunk(lambda: scaled_copy(source, reduction.prescale, mine),
                           lambda: combine(parts, reduction.op, target, reduction.scale))

    def _scatter(self, work: ReduceScatter, k: int) -> None:
        self.memory.await_all(work.first + max(k - tuning.SHM_SCATTERS_UNDER_WAY, -1), CONSUMED)
        work.pack(k)
        self.memory.post(work.first + k, PACKED)

    def _reduce_part(self, work: ReduceScatter, k: int) -> None:
        self.memory.await_all(work.first + k, PACKED)
        work.reduce(k)
        self.memory.post(work.first + k, CONSUMED, READY, UNPACKED)

    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        index, itemsize, room = self._index, source.itemsize, self._memory_bytes // self._count // ALIGNMENT * ALIGNMENT
        if largest * itemsize > room:
            self._others.alltoall(source, target, sent, received, largest)
            return
        data, result = source.view(_BYTE), target.view(_BYTE)
        to, from_ = _parts(sent, itemsize), _parts(received, itemsize)
        others = [rank for rank in range(self._count) if rank != index]

        def write() -> None:
            for rank in others:
                part = data[to[rank]]
                self._memories[index][rank * room:rank * room + part.size] = part

        def read() -> None:
            result[from_[index]] = data[to[index]]
            for rank in others:
                part = result[from_[rank]]
                part[...] = self._memories[rank][index * room:index * room + part.size]

        self._in_one_chunk(write, read)

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        if max(counts) * source.itemsize > self._memory_bytes:
            self._others.allgather(source, target, counts)
            return
        data, result, parts = source.view(_BYTE), target.view(_BYTE), _parts(counts, source.itemsize)

        def read() -> None:
            for memory, part in zip(self._memories, parts, strict=True):
                result[part] = memory[:part.stop - part.start]

        self._in_one_chunk(lambda: np.copyto(self._memories[self._index][:data.size], data), read)

    def _in_one_chunk(self, write: Callable[[], None], read: Callable[[], None]) -> None:
        """Call `write`, then `read` after all ranks have returned from `write`. Both may use all of `_memories`."""
        memory, number = self.memory, self.last_chunk + 1
        memory.await_all(max(self.free_at), CONSUMED)
        write()
        memory.post(number, PACKED)
        memory.await_all(number, PACKED)
        read()
        memory.post(number, CONSUMED, READY, UNPACKED)
        self.last_chunk, self.free_at = number, [number] * self.slots


def _parts(counts: Sequence[int], itemsize: int) -> list[slice]:
    """Return the byte range of each part. The parts follow each other, and part r has `counts[r]` elements."""
    ends = list(accumulate(counts))
    return [slice((end - count) * itemsize, end * itemsize) for end, count in zip(ends, counts, strict=True)]
