"""Backend for the ranks of one host: an all-reduce through shared memory, in chunks that stay in the cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.arithmetic import Reduction, Scale, combine, divided_before, scaled_copy
from ...core.interfaces import DataPlane, Prepared
from ...core.memory import FusionBuffer
from .layout import Chunk, lay_out
from .one_shot import OneShot, are_large
from .segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory

# So many views are remembered, of some ten megabytes; they are enough for a few gigabytes of large tensors.
_KEPT_VIEWS = 2**15


class Work(Prepared):
    """One all-reduce under way.

    Attributes:
        chunks: Its parts.
        first: The number of its first chunk: the counters count the chunks of all all-reduces, from 1.
        inputs, outputs: The sources and the targets, flat.
        packed: So many chunks, the first ones, are packed ahead, and the other ranks do not know it yet.
    """

    __slots__ = ("chunks", "first", "inputs", "outputs", "packed")

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction, first: int):
        super().__init__(sources, targets, reduction)
        self.inputs = [source.reshape(-1) for source in sources]
        self.outputs = [target.reshape(-1) for target in targets]
        self.chunks: Sequence[Chunk] = ()
        self.first, self.packed = first, 0


Stage = Callable[[Work, int], None]  # what is done to chunk k


class _Views(NamedTuple):
    """The shared memory as arrays of one dtype."""

    parts: list[np.ndarray]  # what each rank of the host packs into
    slots: list[list[np.ndarray]]  # which chunks use in turn: memory for each rank of the host, and for the result


class SharedMemoryData(DataPlane):
    """Collectives among the ranks of one host.

    An all-reduce goes chunk by chunk. Each rank reduces one slice of a chunk, from the parts of all ranks in the order
    of the ranks. It packs the other slices into its part of the shared memory, and reads its own from the tensors; it
    puts the reduced slice into the shared memory, and copies it to the result, where it then copies the slices that the
    others have reduced. While one chunk is packed the one before is reduced and the one before that unpacked, so that a
    rank that is a little late holds up nobody; and the chunks under way are so few that everything but the tensors
    themselves stays in the processor's cache.

    The results are private to each rank. Results in memory that all ranks of the host read would save the last copy
    (gradients of ResNet-50, 2 ranks: 15 ms instead of 16), but TensorFlow writes in place to slices of the tensors that
    it is given, which changed the results of the other ranks.

    A sum goes to the result by way of the shared memory also on the rank that has computed it: a copy writes large
    memory without reading it first, which an addition does not (102 MB on 2 ranks: 37 ms, and 38 without that; 46 with
    every rank reducing all of it).

    Args:
        memory: Has `memory_bytes` of data at least; nobody else uses those.
        chunk: Bytes of a chunk, a power of two.
        others: Serves what is not an all-reduce.
    """

    name = "shared_memory"
    # How many chunks may be under way: one is packed, one reduced, one unpacked, and a rank may be ahead of the others.
    slots = 4
    # Chunks of half a megabyte are quickest: 102 MB on 2 ranks take 45 ms, with 128 KiB 67 ms, with 1 MiB 42 to 45 ms,
    # with 4 MiB twice as long where the cache is smaller. On more ranks a slice is smaller, and Python's time for a
    # chunk longer (90 ms of 102 MB on 64 ranks, and 135 with 256 KiB), while a host for them has more cache.
    chunk_bytes = 512 * 1024
    # Up to so many bytes of all ranks together, each rank reduces everything instead of its slice: one wait less.
    one_shot_bytes = 512 * 1024

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane):
        self._memory, self._others = memory, others
        self._count, self._index = len(memory.ranks), memory.index
        nbytes = self.memory_bytes(self._count, chunk)
        self._bytes = np.frombuffer(memory.data[:nbytes], np.uint8).reshape(self._count + 1, self.slots, -1)
        self._views: dict[np.dtype, _Views] = {}
        self._layouts: dict[tuple[np.dtype, bool, tuple[int, ...]], list[Chunk]] = {}
        self._kept = 0  # so many views in them
        self._chunks = 0  # so far; the same on all ranks
        self._free_at = [0] * self.slots
        self._scratch = FusionBuffer()
        self._used_bytes = chunk
        self._one_shot_bytes = min(self.one_shot_bytes // self._count, self.slots * chunk)
        self._is_used = True

    @classmethod
    def memory_bytes(cls, count: int, chunk: int) -> int:
        """How much shared memory `count` ranks on a host need for chunks of `chunk` bytes."""
        return cls.slots * (count + 1) * chunk

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        if not self._is_used:
            self._others.allreduce(sources, targets, reduction)
        else:
            self.finish(self._begin(sources, targets, reduction), all_packed=False)

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        if not self._is_used:
            return super().prepare(sources, targets, reduction)
        prepared = self._begin(sources, targets, reduction)
        if isinstance(prepared, OneShot):
            prepared.pack_ahead()
        return prepared

    def _begin(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
               reduction: Reduction) -> Work | OneShot:
        dtype = sources[0].dtype
        elements = sources[0].size if len(sources) == 1 else sum([source.size for source in sources])
        nbytes, views = elements * dtype.itemsize, self._views.get(dtype) or self._make_views(dtype)
        if nbytes <= self._one_shot_bytes:
            return OneShot(self._memory, views.parts, max(self._free_at), self._chunks, sources, targets, elements,
                          divided_before(reduction, dtype))
        work = Work(sources, targets, reduction, self._chunks + 1)
        work.chunks = self._chunks_of(work, nbytes, views.slots)
        return work

    def _chunks_of(self, work: Work, nbytes: int, slots: list[list[np.ndarray]]) -> list[Chunk]:
        sizes, itemsize = tuple([source.size for source in work.inputs]), work.inputs[0].itemsize
        # A copy is quicker than one reduction per tensor where those are small, and is needed to scale them.
        packs_own = work.reduction.prescale != 1.0 or not are_large(nbytes, sizes)
        key = work.inputs[0].dtype, packs_own, sizes
        chunks = self._layouts.get(key)
        if chunks is None:
            chunks = lay_out(sizes, self._used_bytes // itemsize, slots, self._index,
                             lambda size: self._share(size, itemsize), packs_own)
            views = sum([chunk.views for chunk in chunks])
            if self._kept + views > _KEPT_VIEWS:
                self._forget_layouts()
            self._layouts[key] = chunks
            self._kept += views
        return chunks

    def _forget_layouts(self) -> None:
        self._layouts.clear()
        self._kept = 0

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

    def pack_ahead(self, prepared: Prepared) -> None:
        if isinstance(prepared, Work):
            for k, chunk in enumerate(prepared.chunks[:self.slots]):
                if not self._memory.have_all(CONSUMED, self._free_at[k]):
                    break
                self._copy_in(prepared, chunk)
                prepared.packed = k + 1

    def finish(self, prepared: Prepared, all_packed: bool) -> None:
        if isinstance(prepared, OneShot):
            prepared.finish(all_packed, self._scratch)
            self._chunks += 1
            self._free_at = [self._chunks] * self.slots
        elif isinstance(prepared, Work):
            self._run(prepared)
        else:
            super().finish(prepared, all_packed)

    def _run(self, work: Work) -> None:
        count = len(work.chunks)
        if not count:
            return
        stages = self._stages
        for turn in range(count + len(stages) - 1):
            for lag, stage in enumerate(stages):
                if 0 <= turn - lag < count:
                    stage(work, turn - lag)
        self._chunks += count
        for k in range(max(count - self.slots, 0), count):
            self._free_at[k % self.slots] = work.first + k

    def _room_for(self, work: Work, k: int) -> int:
        """How many chunks must be consumed, and unpacked, before what chunk k uses may be written to."""
        return self._free_at[k] if k < self.slots else work.first + k - self.slots

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
        self._forget_layouts()

    @property
    def _stages(self) -> Sequence[Stage]:
        """What is done to a chunk, one turn after the other."""
        return self._pack, self._reduce, self._unpack

    def _pack(self, work: Work, k: int) -> None:
        if k >= work.packed:
            self._memory.await_all(CONSUMED, self._room_for(work, k))
            self._copy_in(work, work.chunks[k])
        self._memory.post(work.first + k, PACKED)

    def _copy_in(self, work: Work, chunk: Chunk) -> None:
        for array, part, place in chunk.packs:
            scaled_copy(work.inputs[array][part], work.reduction.prescale, place)

    def _reduce(self, work: Work, k: int) -> None:
        chunk = work.chunks[k]
        self._memory.await_all(PACKED, work.first + k)
        self._memory.await_all(UNPACKED, self._room_for(work, k))
        self._reduce_slice(work, chunk, chunk.result, work.reduction.scale)
        # Before the others do, for they take it from this processor's cache (102 MB on 2 ranks: 4% quicker).
        self._take_own(work, k)
        self._memory.post(work.first + k, READY, CONSUMED)

    def _reduce_slice(self, work: Work, chunk: Chunk, result: np.ndarray, scale: Scale) -> None:
        """Reduce this rank's slice of a chunk over the host."""
        if not chunk.reads:
            combine(chunk.parts, work.reduction.op, result, scale)
        for array, part, parts, here in chunk.reads:
            pieces = parts[:]
            pieces[self._index] = work.inputs[array][part]
            combine(pieces, work.reduction.op, result[here], scale)

    def _take_own(self, work: Work, k: int) -> None:
        """Copy this rank's slice to its own result."""
        for array, part, place in work.chunks[k].outs:
            work.outputs[array][part] = place

    def _unpack(self, work: Work, k: int) -> None:
        """Copy the slices of the others; this rank's own has been copied when it was reduced."""
        self._memory.await_all(READY, work.first + k)
        for array, part, place in work.chunks[k].others:
            work.outputs[array][part] = place
        self._memory.post(work.first + k, UNPACKED)

    def _make_views(self, dtype: np.dtype) -> _Views:
        parts = [part.reshape(-1).view(dtype) for part in self._bytes[:-1]]
        slots = [[part[k].view(dtype) for part in self._bytes] for k in range(self.slots)]
        views = self._views[dtype] = _Views(parts, slots)
        return views

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        self._others.allgather(source, target, counts)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        self._others.broadcast(array, root_rank)

    def abandon(self, is_stalled: bool) -> None:
        self._memory.abandon(is_stalled)

    def close(self) -> None:
        self._others.close()
