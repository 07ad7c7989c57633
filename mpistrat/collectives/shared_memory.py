"""Backend for the ranks of one host: an all-reduce through shared memory, in chunks that stay in the cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..fusion import FusionBuffer
from ..messages import ReduceOp
from ..scale import Scale, divided_before
from ..stream import Stream
from .at_once import AtOnce, are_large
from .base import DataPlane, Prepared
from .host_memory import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from .reduction import combine
from .shared_results import SharedResults

# Up to this many bytes of all ranks together, each rank reduces everything instead of its slice: one wait less.
AT_ONCE_BYTES = 512 * 1024


class Chunk(NamedTuple):
    """Consecutive elements of an all-reduce, and how they are shared out."""

    number: int  # from 1, counted over all all-reduces; what the counters are when it is done
    start: int  # its first element
    slot: list[np.ndarray]  # memory for each rank of the host, and for the result
    free_at: int  # how many chunks must be consumed, and unpacked, before that may be written to
    size: int  # in elements
    mine: slice | None  # what this rank reduces, if any
    rest: list[slice]  # what others do


class Work(Prepared):
    """One all-reduce under way.

    Attributes:
        chunks: Its parts.
        are_lent: The targets are memory that all ranks of the host read.
        packed: So many chunks, the first ones, are packed ahead, and the other ranks do not know it yet.
    """

    __slots__ = ("are_lent", "chunks", "ins", "outs", "packed", "packs_own")

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
                 scale: Scale, chunks: list[Chunk], nbytes: int, are_lent: bool):
        super().__init__(sources, targets, op, prescale, scale)
        self.chunks, self.are_lent = chunks, are_lent
        self.ins, self.outs = Stream(sources), Stream(targets)
        # A copy is quicker than one reduction per tensor where those are small, and is needed to scale them.
        self.packs_own = prescale != 1.0 or not are_large(nbytes, sources)
        self.packed = 0


Stage = Callable[[Work, Chunk], None]


class _Views(NamedTuple):
    """The shared memory as arrays of one dtype."""

    parts: list[np.ndarray]  # what each rank of the host packs into
    slots: list[list[np.ndarray]]  # each as in Chunk.slot


class SharedMemoryData(DataPlane):
    """Collectives among the ranks of one host.

    An all-reduce goes chunk by chunk. Each rank reduces one slice of a chunk, from the parts of all ranks in the order
    of the ranks. It packs the other slices into its part of the shared memory, and reads its own from the tensors; it
    puts the reduced slice into the shared memory, and copies it to the result, where it then copies the slices that the
    others have reduced. While one chunk is packed the one before is reduced and the one before that unpacked, so that a
    rank that is a little late holds up nobody; and the chunks under way are so few that everything but the tensors
    themselves stays in the processor's cache.

    If the result is memory that all ranks of the host read (SharedResults), nothing is left to do once a slice is in it
    (102 MB on 2 ranks: 32 ms instead of 42).

    A sum goes to the result by way of the shared memory also on the rank that has computed it: a copy writes large
    memory without reading it first, which an addition does not (102 MB on 2 ranks: 37 ms, and 38 without that; 46 with
    every rank reducing all of it).

    Args:
        memory: Has `memory_bytes` of data at least; nobody else uses those.
        chunk: Bytes of a chunk, a power of two.
        others: Serves what is not an all-reduce.
        results: Memory for results.
    """

    name = "shared_memory"
    # How many chunks may be under way: one is packed, one reduced, one unpacked, and a rank may be ahead of the others.
    slots = 4
    # Chunks of half a megabyte are quickest: 102 MB on 2 ranks take 45 ms, with 128 KiB 67 ms, with 1 MiB 42 to 45 ms,
    # with 4 MiB twice as long where the cache is smaller. On more ranks a slice is smaller, and Python's time for a
    # chunk longer (90 ms of 102 MB on 64 ranks, and 135 with 256 KiB), while a host for them has more cache.
    chunk_bytes = 512 * 1024

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane, results: SharedResults):
        self._memory, self._others, self._results = memory, others, results
        self._count, self._index = len(memory.ranks), memory.index
        nbytes = self.memory_bytes(self._count, chunk)
        self._bytes = np.frombuffer(memory.data[:nbytes], np.uint8).reshape(self._count + 1, self.slots, -1)
        self._views: dict[np.dtype, _Views] = {}
        self._chunks = 0  # so far; the same on all ranks
        self._free_at = [0] * self.slots
        self._scratch = FusionBuffer()
        self._used_bytes = chunk
        self._at_once_bytes = min(AT_ONCE_BYTES // self._count, self.slots * chunk)
        self._is_used = True

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

    def lend(self, lists: Sequence[Sequence[np.ndarray]], is_wanted: bool) -> list[list[np.ndarray] | None]:
        if not self._is_used:
            return super().lend(lists, is_wanted)
        return self._results.lend(lists, is_wanted)

    def _begin(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
               scale: Scale) -> Work | AtOnce:
        dtype = sources[0].dtype
        elements = sources[0].size if len(sources) == 1 else sum([source.size for source in sources])
        nbytes, views = elements * dtype.itemsize, self._views.get(dtype) or self._make_views(dtype)
        if self._is_at_once(nbytes):
            if scale.divisor != 1:
                before, scale = divided_before(scale, dtype)
                prescale *= before
            return AtOnce(self._memory, views.parts, max(self._free_at), self._chunks, sources, targets, elements, op,
                          prescale, scale)
        chunks = self._chunks_of(elements, dtype.itemsize, views.slots)
        return Work(sources, targets, op, prescale, scale, chunks, nbytes, self._results.are_lent(targets))

    def _chunks_of(self, elements: int, itemsize: int, slots: list[list[np.ndarray]]) -> list[Chunk]:
        chunks, count, per_chunk = [], len(slots), self._used_bytes // itemsize
        whole = self._share(per_chunk, itemsize)
        for k, start in enumerate(range(0, elements, per_chunk)):
            size, number = min(per_chunk, elements - start), self._chunks + k + 1
            mine, rest = whole if size == per_chunk else self._share(size, itemsize)
            free_at = self._free_at[k] if k < count else number - count
            chunks.append(Chunk(number, start, slots[k % count], free_at, size, mine, rest))
        return chunks

    def _share(self, size: int, itemsize: int) -> tuple[slice | None, list[slice]]:
        """Of `size` elements of a chunk, what this rank reduces and what others do."""
        reducers = self._reducers(size * itemsize)
        if self._index >= reducers:
            return None, [slice(0, size)]
        mine = slice(size * self._index // reducers, size * (self._index + 1) // reducers)
        return mine, [part for part in (slice(0, mine.start), slice(mine.stop, size)) if part.start < part.stop]

    def _reducers(self, nbytes: int) -> int:
        """How many ranks, the first ones of the host, reduce a slice of a chunk of so many bytes."""
        return self._count

    def _is_at_once(self, nbytes: int) -> bool:
        """Whether every rank reduces all of it, in one step."""
        return nbytes <= self._at_once_bytes

    def pack_ahead(self, prepared: Prepared) -> None:
        if isinstance(prepared, Work):
            for chunk in prepared.chunks[:self.slots]:
                if not self._memory.have_all(CONSUMED, chunk.free_at):
                    break
                self._copy_in(prepared, chunk)
                prepared.packed = chunk.number

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
        chunks = work.chunks
        if not chunks:
            return
        stages = self._stages[:-1] if work.are_lent else self._stages
        self._results.declare()
        for turn in range(len(chunks) + len(stages) - 1):
            for lag, stage in enumerate(stages):
                if 0 <= turn - lag < len(chunks):
                    stage(work, chunks[turn - lag])
        self._chunks += len(chunks)
        for k in range(max(len(chunks) - self.slots, 0), len(chunks)):
            self._free_at[k % self.slots] = chunks[k].number
        self._memory.await_all(READY, self._chunks)
        self._results.learn(work.targets)

    @property
    def in_use(self) -> str:
        return self.name if self._is_used else self._others.in_use

    def knobs(self) -> dict[str, tuple[Any, ...]]:
        largest = self._bytes.shape[-1]
        return {"backend": (self.name, self._others.name),
                "chunk_bytes": tuple(largest >> k for k in range(4))}

    def choose(self, choice: Mapping[str, Any]) -> None:
        self._is_used = choice["backend"] == self.name
        self._used_bytes = choice["chunk_bytes"]

    @property
    def _stages(self) -> Sequence[Stage]:
        """What is done to a chunk, one turn after the other; the last is to copy what others have reduced."""
        return self._pack, self._reduce, self._unpack

    def _pack(self, work: Work, chunk: Chunk) -> None:
        if chunk.number > work.packed:
            self._memory.await_all(CONSUMED, chunk.free_at)
            self._copy_in(work, chunk)
        self._memory.post(chunk.number, PACKED)

    def _copy_in(self, work: Work, chunk: Chunk) -> None:
        part = chunk.slot[self._index]
        if work.packs_own:
            work.ins.copy_to(part[:chunk.size], work.prescale, chunk.start)
        else:
            for piece in chunk.rest:
                work.ins.copy_to(part[piece], 1.0, chunk.start + piece.start)

    def _reduce(self, work: Work, chunk: Chunk) -> None:
        assert chunk.mine is not None
        self._memory.await_all(PACKED, chunk.number)
        self._memory.await_all(UNPACKED, chunk.free_at)
        self._reduce_slice(work, chunk, chunk.slot[-1][chunk.mine], work.scale)
        self._publish(work, chunk, CONSUMED)

    def _reduce_slice(self, work: Work, chunk: Chunk, result: np.ndarray, scale: Scale) -> None:
        """Reduce this rank's slice of a chunk over the host."""
        assert chunk.mine is not None
        parts = [part[chunk.mine] for part in chunk.slot[:-1]]
        if work.packs_own:
            combine(parts, work.op, result, scale)
            return
        for place, own in work.ins.pieces(chunk.start + chunk.mine.start, result.size):
            here = slice(place, place + own.size)
            pieces = [part[here] for part in parts]
            pieces[self._index] = own
            combine(pieces, work.op, result[here], scale)

    def _publish(self, work: Work, chunk: Chunk, *counters: int) -> None:
        """Have the other ranks see this one's slice, and these counters."""
        if chunk.mine is not None:
            # First, for the others take it from this processor's cache (102 MB on 2 ranks: 4% quicker).
            self._copy_out(work, chunk, chunk.mine)
        if work.are_lent:
            counters = *counters, UNPACKED
        self._memory.post(chunk.number, READY, *counters)

    def _unpack(self, work: Work, chunk: Chunk) -> None:
        """Copy the slices of the others; this rank's own has been copied when it was reduced."""
        self._memory.await_all(READY, chunk.number)
        for part in chunk.rest:
            self._copy_out(work, chunk, part)
        self._memory.post(chunk.number, UNPACKED)

    def _copy_out(self, work: Work, chunk: Chunk, part: slice) -> None:
        work.outs.copy_from(chunk.slot[-1][part], chunk.start + part.start)

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
        self._results.close()
        self._others.close()
