"""Backend for the ranks of one host: an all-reduce through shared memory, in chunks that stay in the cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..fusion import FusionBuffer
from ..messages import ReduceOp
from ..scale import Scale, divided_before
from ..stream import Stream
from .at_once import AtOnce, are_large, reduce_onto
from .base import DataPlane, Prepared
from .host_memory import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from .reduction import combine

# Chunks of half a megabyte are quickest (102 MB on 2 ranks: 23 ms; with 64 KiB 34 ms, with 4 MiB 43 ms), as long as
# those of all ranks stay in the processor's cache.
LARGEST_CHUNK, SMALLEST_CHUNK = 512 * 1024, 64 * 1024
_CACHE_BYTES = 16 * 1024 * 1024
# Up to this many bytes of all ranks together, each rank reduces everything instead of its slice: one wait less. Two
# ranks always do so: they read and write 5 times the bytes then, and 5.5 times by slices.
DIRECT_BYTES = 64 * 1024
# Up to this many bytes they do so at once (1 MB takes 40 us less than in two chunks).
_AT_ONCE_BYTES = 1024 * 1024


class Work(Prepared):
    """One all-reduce under way: `chunks` chunks of `chunk` elements, the last one maybe shorter.

    The first `packed` of them are packed ahead, and the other ranks do not know it yet.

    Args:
        sources, targets, op, prescale, scale: As in DataPlane.allreduce.
        slots: For each of them an array for each rank of the host, and one for the result.
        elements: Of all sources.
        chunk: How many of them a chunk has.
        first: Number of its first chunk, counted over all all-reduces.
        free_at: For each slot, how many chunks must be consumed, and unpacked, before it may be used.
    """

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
                 scale: Scale, slots: list[list[np.ndarray]], elements: int, chunk: int, first: int,
                 free_at: list[int]):
        super().__init__(sources, targets, op, prescale, scale)
        self.slots, self.elements, self.chunk, self.first, self.free_at = slots, elements, chunk, first, free_at
        self.ins, self.outs = Stream(sources), Stream(targets)
        self.is_of_large = are_large(elements * self.itemsize, targets)
        self.packed = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.slots[0][0].itemsize

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.elements // self.chunk)

    def size_of(self, k: int) -> int:
        """Elements in chunk `k`."""
        return min(self.chunk, self.elements - k * self.chunk)

    def slot_of(self, k: int) -> list[np.ndarray]:
        """Where chunk `k` is."""
        return self.slots[k % len(self.slots)]

    def place_is_free_at(self, k: int) -> int:
        """How many chunks must be consumed, or unpacked, before the place of chunk `k` may be written to."""
        slots = len(self.slots)
        return self.free_at[k] if k < slots else self.first + k - slots + 1


Stage = Callable[[Work, int], None]


class _Views(NamedTuple):
    """The shared memory as arrays of one dtype."""

    parts: list[np.ndarray]  # what each rank of the host packs into
    slots: list[list[np.ndarray]]  # as in Work.slots


class SharedMemoryData(DataPlane):
    """Collectives among the ranks of one host.

    An all-reduce packs the tensors chunk by chunk into this rank's part of the shared memory, reduces this rank's slice
    of each chunk from the parts of all ranks, in the order of the ranks, and unpacks the slices of all ranks from where
    they put them. While one chunk is packed the one before is reduced and the one before that unpacked, so that a rank
    that is a little late holds up nobody; and the chunks under way are so few that everything but the tensors
    themselves stays in the processor's cache.

    Args:
        memory: Has `memory_bytes` of data at least; nobody else uses those.
        chunk: Bytes of a chunk, as chunk_bytes has it.
        others: Serves what is not an all-reduce.
    """

    name = "shared_memory"
    # How many chunks may be under way: one is packed, one reduced, one unpacked, and a rank may be ahead of the others.
    slots = 4

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane):
        self._memory, self._others = memory, others
        self._count, self._index = len(memory.ranks), memory.index
        nbytes = self.memory_bytes(self._count, chunk)
        self._bytes = np.frombuffer(memory.data[:nbytes], np.uint8).reshape(self._count + 1, self.slots, -1)
        self._views: dict[np.dtype, _Views] = {}
        self._chunks = 0  # so far; the same on all ranks
        self._free_at = [0] * self.slots
        self._scratch = FusionBuffer()
        self._used_bytes = chunk
        self._at_once_bytes = min(_AT_ONCE_BYTES, self.slots * chunk)
        self._is_used = True

    @classmethod
    def chunk_bytes(cls, count: int) -> int:
        """Bytes of a chunk for `count` ranks on a host, the most of any host; a power of two."""
        fitting = _CACHE_BYTES // (cls.slots * (count + 1))
        return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, 1 << (fitting.bit_length() - 1)))

    @classmethod
    def memory_bytes(cls, count: int, chunk: int) -> int:
        """How much shared memory `count` ranks on a host need for chunks of `chunk` bytes."""
        return cls.slots * (count + 1) * chunk

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
                  scale: Scale) -> None:
        if not self._is_used:
            self._others.allreduce(sources, targets, op, prescale, scale)
        else:
            self.finish(self._begin(sources, targets, op, prescale, scale), all_packed=False)

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
                scale: Scale) -> Prepared:
        if not self._is_used:
            return super().prepare(sources, targets, op, prescale, scale)
        prepared = self._begin(sources, targets, op, prescale, scale)
        if isinstance(prepared, AtOnce):
            prepared.pack_ahead()
        return prepared

    def _begin(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
               scale: Scale) -> Work | AtOnce:
        dtype = sources[0].dtype
        elements = sources[0].size if len(sources) == 1 else sum([source.size for source in sources])
        nbytes, views = elements * dtype.itemsize, self._views.get(dtype) or self._make_views(dtype)
        if scale.divisor != 1:
            before, scale = divided_before(scale, dtype)
            prescale *= before
        if nbytes <= self._at_once_bytes and self._is_direct(nbytes):
            return AtOnce(self._memory, views.parts, max(self._free_at), self._chunks, sources, targets, elements, op,
                          prescale, scale)
        return Work(sources, targets, op, prescale, scale, views.slots, elements, self._used_bytes // dtype.itemsize,
                    self._chunks, self._free_at)

    def _is_direct(self, nbytes: int) -> bool:
        """Whether every rank reduces all of it."""
        return self._count == 2 or nbytes * self._count <= DIRECT_BYTES

    def pack_ahead(self, prepared: Prepared) -> None:
        if isinstance(prepared, Work):
            for k in range(min(prepared.chunks, self.slots)):
                if not self._memory.have_all(CONSUMED, prepared.place_is_free_at(k)):
                    break
                self._copy_in(prepared, k)
                prepared.packed += 1

    def finish(self, prepared: Prepared, all_packed: bool) -> None:
        if isinstance(prepared, AtOnce):
            prepared.finish(all_packed, self._scratch)
            self._chunks += 1
            self._free_at = [self._chunks] * self.slots
        elif isinstance(prepared, Work):
            self._run(prepared)
        else:
            super().finish(prepared, all_packed)

    def _run(self, work: Work) -> None:
        stages = self._stages_of(work)
        for turn in range(work.chunks + len(stages) - 1):
            for lag, stage in enumerate(stages):
                if 0 <= turn - lag < work.chunks:
                    stage(work, turn - lag)
        self._chunks += work.chunks
        for k in range(max(work.chunks - self.slots, 0), work.chunks):
            self._free_at[k % self.slots] = work.first + k + 1

    @property
    def in_use(self) -> str:
        return self.name if self._is_used else self._others.in_use

    def knobs(self) -> dict[str, tuple[Any, ...]]:
        largest = self._bytes.shape[-1]
        return {"backend": (self.name, self._others.name),
                "chunk_bytes": (largest, *(largest >> k for k in (1, 2, 3) if largest >> k >= SMALLEST_CHUNK))}

    def choose(self, choice: Mapping[str, Any]) -> None:
        self._is_used = choice["backend"] == self.name
        self._used_bytes = choice["chunk_bytes"]

    def _stages_of(self, work: Work) -> Sequence[Stage]:
        """What is done to a chunk, one turn after the other."""
        if self._is_direct(work.elements * work.itemsize):
            return self._pack, self._reduce_directly
        return self._pack, self._reduce, self._unpack

    def _pack(self, work: Work, k: int) -> None:
        number = work.first + k
        if k >= work.packed:
            self._memory.await_all(CONSUMED, work.place_is_free_at(k))
            self._copy_in(work, k)
        self._memory.post(number + 1, PACKED)

    def _copy_in(self, work: Work, k: int) -> None:
        work.ins.copy_to(work.slot_of(k)[self._index][:work.size_of(k)], work.prescale)

    def _reduce(self, work: Work, k: int) -> None:
        number, size, slot = work.first + k, work.size_of(k), work.slot_of(k)
        mine = slice(size * self._index // self._count, size * (self._index + 1) // self._count)
        self._memory.await_all(PACKED, number + 1)
        self._memory.await_all(UNPACKED, work.place_is_free_at(k))
        combine([part[mine] for part in slot[:-1]], work.op, slot[-1][mine], work.scale)
        self._memory.post(number + 1, CONSUMED, READY)

    def _unpack(self, work: Work, k: int) -> None:
        number = work.first + k
        self._memory.await_all(READY, number + 1)
        work.outs.copy_from(work.slot_of(k)[-1][:work.size_of(k)])
        self._memory.post(number + 1, UNPACKED)

    def _reduce_directly(self, work: Work, k: int) -> None:
        """Every rank reduces all of the chunk, from the parts of all."""
        number, size = work.first + k, work.size_of(k)
        self._memory.await_all(PACKED, number + 1)
        parts = [part[:size] for part in work.slot_of(k)[:-1]]
        reduce_onto(work.outs, work.is_of_large, parts, work.op, work.scale, self._scratch)
        self._memory.post(number + 1, CONSUMED, READY, UNPACKED)

    def _make_views(self, dtype: np.dtype) -> _Views:
        parts = [part.reshape(-1).view(dtype) for part in self._bytes[:-1]]
        slots = [[part[k].view(dtype) for part in self._bytes] for k in range(self.slots)]
        views = self._views[dtype] = _Views(parts, slots)
        return views

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        self._others.allgather(source, target, counts)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        self._others.broadcast(array, root_rank)

    def abandon(self) -> None:
        self._memory.abandon()

    def close(self) -> None:
        self._others.close()
