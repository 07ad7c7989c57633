"""All-reduces of the ranks of one host in shared memory, in chunks that fit into the cache (two-shot).

Small all-reduces are one-shot: every rank reads the parts of all ranks, and reduces all elements. Used by the engine's
thread.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...core import tuning
from ...core.arithmetic import (
    FlatLayout,
    Reduction,
    Scale,
    combine,
    divided_before,
    pack,
    scaled_copy,
    segments,
    unpack,
)
from ...core.interfaces import DataPlane, Prepared
from ...core.memory import FusionBuffer
from .segment import CHUNK_BYTES, CONSUMED, PACKED, READY, UNPACKED, HostMemory

Stage = Callable[[Any, int], None]  # a step on chunk k of a collective

# -- all-reduces in flight ---------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """A copy from an array to shared memory, or from shared memory to an array."""

    array: int  # the index of the array
    part: slice  # the elements of the array
    memory: np.ndarray  # the same number of elements of shared memory


class Read(NamedTuple):
    """Elements of the slice that this rank reduces. It reads them from its own array, and does not pack them."""

    array: int
    part: slice
    parts: list[np.ndarray]  # the same elements in each rank's memory; this rank's memory is not written
    here: slice  # the same elements, counted in the slice that this rank reduces


class Chunked(Protocol):
    """A collective that runs in chunks. Their number is the same on all ranks. `first`: See TwoShotData.run."""

    @property
    def chunks(self) -> Sized: ...

    @property
    def first(self) -> int: ...


class Chunk(NamedTuple):
    """Consecutive elements of the arrays, in slices that different ranks reduce. Some ranks may have no slice."""

    packs: list[Move]  # The copies to shared memory that this rank makes.
    own: slice | None  # The slice of the chunk that this rank reduces; None: this rank reduces no slice.
    parts: list[np.ndarray]  # That slice in the memory of each rank of the host.
    reads: list[Read]  # That slice in this rank's arrays, if this rank does not pack it.
    result: np.ndarray  # That slice in the memory of the results.
    own_copies: list[Move]  # The copies of that slice from the results to this rank's targets.
    other_copies: list[Move]  # The copies of the other slices from the results to this rank's targets.


class TwoShotReduce(Prepared):
    """A two-shot all-reduce in flight."""

    __slots__ = ("ahead_s", "chunk_bytes", "chunks", "first", "inputs", "kind", "outputs", "packed", "wait_s")

    plane: "TwoShotData"

    def __init__(self, plane: "TwoShotData", sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 reduction: Reduction, first: int):
        super().__init__(plane, sources, targets, reduction)
        self.inputs = [source.reshape(-1) for source in sources]
        self.outputs = [target.reshape(-1) for target in targets]
        self.first, self.chunks = first, list[Chunk]()  # See TwoShotData.run.
        self.packed = 0  # How many of the first chunks are packed ahead, without being posted to the other ranks.
        self.kind: ChunkKey | None = None  # The key of the choice of the chunk size; None: the all-reduce is not timed.
        self.chunk_bytes = 0  # Bytes of a chunk.
        self.ahead_s = 0.0  # Seconds of packing ahead.
        self.wait_s = 0.0  # Seconds of the wait for the last rank to begin.

    def pack_ahead(self) -> None:
        """See Prepared. Packs the first chunks, as far as their memory is free."""
        began = time.perf_counter()
        for k, chunk in enumerate(self.chunks[:self.plane.slots]):
            if not self.plane.memory.have_all(self.plane.free_at[k], CONSUMED):
                break
            self.copy_in(chunk)
            self.packed = k + 1
        self.ahead_s += time.perf_counter() - began

    def finish(self, all_packed: bool) -> None:
        self.plane.run_timed(self)

    def copy_in(self, chunk: Chunk) -> None:
        """Copy this rank's part of a chunk to shared memory."""
        for array, part, memory in chunk.packs:
            scaled_copy(self.inputs[array][part], self.reduction.prescale, memory)

    def copy_out(self, moves: Sequence[Move]) -> None:
        """Copy results from shared memory to this rank's targets."""
        for array, part, memory in moves:
            self.outputs[array][part] = memory


class OneShot(Prepared):
    """A one-shot all-reduce of small arrays. TwoShotData counts it as one chunk.

    A small all-reduce spends most of its time in Python calls (about 0.8 us each with cold caches), so the methods make
    few calls. If all ranks have packed before they agree on the all-reduce, no rank waits for another afterwards.
    """

    __slots__ = ("parts",)

    plane: "TwoShotData"
    parts: np.ndarray  # The memory into which the ranks of the host pack: for each rank a row of all elements.

    def pack_ahead(self) -> None:
        """See Prepared. Packs this rank's part if the memory is free."""
        memory = self.plane.memory
        if not self.is_packed and memory.have_all(max(self.plane.free_at), CONSUMED):
            pack(self.sources, self.parts[memory.index], self.reduction.prescale)
            self.is_packed = True

    def finish(self, all_packed: bool) -> None:
        plane, parts, targets, op, scale = self.plane, self.parts, self.targets, self.reduction.op, self.reduction.scale
        memory, number = plane.memory, plane.last_chunk + 1
        if not all_packed:
            if not self.is_packed:
                memory.await_all(max(plane.free_at), CONSUMED)
                pack(self.sources, parts[memory.index], self.reduction.prescale)
            memory.post(number, PACKED)
            memory.await_all(number, PACKED)
        if len(targets) == 1:
            combine(parts, op, targets[0].reshape(-1), scale)
        elif _are_large(parts[0].nbytes, targets):
            for elements, target in segments(targets):
                combine(parts[:, elements], op, target, scale)
        else:
            result = plane.scratch.view(parts[0].size, parts.dtype)
            combine(parts, op, result, scale)
            unpack(result, targets)
        memory.post(number, PACKED, CONSUMED, READY, UNPACKED)
        # It has used the memory of all slots.
        plane.last_chunk, plane.free_at = number, [number] * plane.slots


def _are_large(nbytes: int, tensors: Sized) -> bool:
    """Return whether to reduce `tensors`, which have `nbytes` in all, one by one, and not as one packed array."""
    return nbytes >= len(tensors) * tuning.SHM_LARGE_TENSOR_BYTES


# -- the choice of the bytes of a chunk --------------------------------------------------------------------------------


class ChunkKey(NamedTuple):
    """The dtype and size class of an all-reduce. All-reduces with equal keys share one chunk size."""

    dtype: np.dtype
    bits: int  # of the number of bytes

    def __str__(self) -> str:
        return f"All-reduces of {2**(self.bits - 21)} to {2**(self.bits - 20)} MiB of {self.dtype}"


class ChunkChoice:
    """Chooses the chunk size for all-reduces of one dtype and nearly the same size, by their measured times.

    Cores that share a cache pass small chunks to each other from cache to cache. Cores without a shared cache (two
    sockets, two parts of one processor) fetch a small chunk line by line from the writer's cache, and prefetch a large
    chunk, which is in memory. The kernel's information on shared caches is wrong in a virtual machine, and a virtual
    machine may move. Therefore the choice depends on measured times.

    In a trial, a few all-reduces use all candidates in turn, and the best candidate is kept. The next trial follows
    after a number of all-reduces, which doubles when a trial changes nothing, and earlier if the speed has changed. A
    change of speed cannot be the only trigger: large chunks keep their speed when ranks move to cores that share a
    cache, although small chunks are faster there.

    `candidates`: Chunk sizes in bytes. The first trial begins with the first all-reduce.
    """

    def __init__(self, candidates: Sequence[int]):
        self._candidates, self.chunk = tuple(candidates), candidates[0]  # `chunk`: The choice.
        self.s_per_byte: dict[int, float] = {}  # Of the last trial, by candidate; empty before the first trial's end.
        self._tried: dict[int, list[float]] = {}
        self._untried: deque[int] = deque()
        self._keeps = tuning.CHUNK_KEPT_LEAST  # all-reduces between two trials
        self._kept = 0  # all-reduces since the last trial
        self._at_first: list[float] = []  # seconds per byte of the first of them
        self._lately: deque[float] = deque(maxlen=tuning.CHUNK_SPEED_TIMES)
        # The first time of each has page faults and the making of its layout in it.
        self._try_all(1 + tuning.CHUNK_TRIES)

    def __str__(self) -> str:
        """Return the chosen chunk size, with the measured times on which the choice is based."""
        tried = ", ".join(f"{_size(chunk)} {s_per_byte * 2**20 * 1e6:.0f}" for chunk, s_per_byte in
                          self.s_per_byte.items())
        return f"{_size(self.chunk)} (us per MiB: {tried})" if tried else _size(self.chunk)

    def upcoming(self) -> int:
        """Return the chunk size in bytes for the all-reduce after the current one. To be called once per all-reduce."""
        return self._untried.popleft() if self._untried else self.chunk

    def took(self, chunk: int, s_per_byte: float) -> bool:
        """Note the time of an all-reduce with chunks of `chunk` bytes. Returns whether there is a new choice now.

        `s_per_byte`: The seconds per byte, without the wait for the last rank to begin.
        """
        if self._tried:
            self._tried[chunk].append(s_per_byte)
            return self._choose() if min(map(len, self._tried.values())) >= self._tries else False
        if chunk != self.chunk:
            return False  # It was announced before the trial ended.
        self._kept += 1
        if len(self._at_first) < tuning.CHUNK_SPEED_TIMES:
            self._at_first.append(s_per_byte)
            return False
        self._lately.append(s_per_byte)
        least = self._keeps // tuning.CHUNK_EARLIER
        if self._kept >= self._keeps or (self._kept >= least and self._speed_has_changed()):
            self._try_all(tuning.CHUNK_TRIES)
        return False

    def _speed_has_changed(self) -> bool:
        ratio = statistics.median(self._lately) / statistics.median(self._at_first)
        return max(ratio, 1 / ratio) > tuning.CHUNK_SPEED_FACTOR

    def _try_all(self, tries: int) -> None:
        self._tries, self._tried = tries, {chunk: [] for chunk in self._candidates}
        self._untried.extend(self._candidates * tries)
        self._kept = 0
        self._at_first.clear()
        self._lately.clear()

    def _choose(self) -> bool:
        is_first = not self.s_per_byte
        self.s_per_byte = {chunk: min(times[is_first:]) for chunk, times in self._tried.items()}
        self._tried.clear()
        best = min(self.s_per_byte, key=self.s_per_byte.__getitem__)
        is_other = self.s_per_byte[best] < tuning.CHUNK_GAIN * self.s_per_byte[self.chunk]
        if is_other:
            self.chunk, self._keeps = best, tuning.CHUNK_KEPT_LEAST
        elif not is_first:
            self._keeps = min(2 * self._keeps, tuning.CHUNK_KEPT_MOST)
        return is_other or is_first


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"


# -- the data plane ----------------------------------------------------------------------------------------------------


class _Views(NamedTuple):
    """The shared memory as arrays of one dtype."""

    parts: np.ndarray  # a row for each rank of the host: its memory, as much as the slots of the smallest chunk have
    # By the bytes of a chunk, used by chunks in turn: the memory of each rank of the host, then of the results.
    slots: dict[int, list[list[np.ndarray]]]


class TwoShotData(DataPlane):
    """All-reduces of the ranks of one host in shared memory. `others` executes all other collectives.

    A chunk of an all-reduce consists of slices, one for each rank, and takes three steps. First, each rank packs into
    its shared memory the slices that other ranks reduce. Second, it reduces its own slice, in the order of the ranks,
    from the others' memory and from its own tensors. It writes the result to shared memory, and copies it from there to
    its targets. Third, it copies to its targets the slices that other ranks have reduced. While one chunk is packed,
    the chunk before it is reduced, and the chunk before that is unpacked. Therefore a rank that is a little late delays
    no other. Small chunks stay in the processor's cache. ChunkChoice finds the fastest chunk size: the first rank of
    the host times the all-reduces. With the first chunk of an all-reduce, it posts the chunk size of the next
    all-reduce with the same ChunkKey.

    The results are private to each rank. Results in memory that all ranks of the host read would save the last copy
    (gradients of ResNet-50, 2 ranks: 15 ms instead of 16). But TensorFlow writes in place to slices of tensors that it
    is given, and thereby changed the results of the other ranks.

    A rank adds up its slice in shared memory, and then copies it to its targets. To add it up in the targets would take
    longer, because an addition reads the memory that it writes to, and a large copy does not: for 102 MB on 2 ranks,
    38 ms instead of 37. If every rank reduced all slices, it would take 46 ms.

    Args:
        memory: Has at least `memory_bytes` of data, reserved for this object.
        chunks: Sizes of a chunk in bytes, powers of two, ascending. The larger sizes are tried for large all-reduces.
        others: Executes the other collectives. `close` closes `others`.
    """

    slots = tuning.SHM_CHUNKS_UNDER_WAY
    chunk_bytes = tuning.SHM_CHUNK_BYTES
    one_shot_bytes = tuning.SHM_ONE_SHOT_BYTES
    choice_bytes = tuning.SHM_CHOICE_BYTES

    def __init__(self, memory: HostMemory, chunks: Sequence[int], others: DataPlane):
        self.memory, self._others = memory, others
        self._count, self._index = len(memory.ranks), memory.index
        nbytes = self.memory_bytes(self._count, chunks[-1])
        self._bytes = np.frombuffer(memory.data[:nbytes], np.uint8).reshape(self._count + 1, -1)
        self._views: dict[np.dtype, _Views] = {}
        self._layouts: dict[tuple[np.dtype, int, bool, tuple[int, ...]], list[Chunk]] = {}
        self._kept_views = 0  # How many numpy views these layouts hold.
        self.last_chunk = 0  # The number of the last chunk; the same on all ranks.
        # For each slot, how many chunks all ranks must have consumed before it may be overwritten.
        self.free_at = [0] * self.slots
        self.scratch = FusionBuffer()  # Memory of this rank alone.
        self._chunks = tuple(chunks)
        self._chunk_of: dict[ChunkKey, int] = {}  # for the next all-reduce of a kind, as the first rank has said
        # On the first rank of the host, the choice of the chunk for each kind of all-reduce that was timed.
        self.choices: dict[ChunkKey, ChunkChoice] = {}
        self.on_choice: Callable[[str], None] = lambda _: None  # Called with a sentence when a choice changes.
        self._one_shot_bytes = min(self.one_shot_bytes // self._count, self.slots * chunks[0])

    @classmethod
    def memory_bytes(cls, count: int, chunk: int) -> int:
        """Return the bytes of shared memory for `count` ranks on a host and chunks of `chunk` bytes."""
        return cls.slots * (count + 1) * chunk

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        # Not self.prepare: a subclass that cannot prepare calls this method in its place.
        TwoShotData.prepare(self, sources, targets, reduction).finish(all_packed=False)

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        dtype = sources[0].dtype
        elements = sources[0].size if len(sources) == 1 else sum([source.size for source in sources])
        nbytes, views = elements * dtype.itemsize, self._views.get(dtype) or self._views_of(dtype)
        if nbytes <= self._one_shot_bytes:
            one_shot = OneShot(self, sources, targets, divided_before(reduction, dtype))
            one_shot.parts = views.parts[:, :elements]
            one_shot.pack_ahead()
            return one_shot
        work = TwoShotReduce(self, sources, targets, reduction, self.last_chunk + 1)
        work.chunk_bytes = self._chunks[0]
        if len(self._chunks) > 1 and nbytes >= self.choice_bytes:
            work.kind = ChunkKey(dtype, nbytes.bit_length())
            work.chunk_bytes = self._chunk_of.get(work.kind, self._chunks[0])
        work.chunks = self._chunks_of(work, nbytes, views.slots[work.chunk_bytes])
        return work

    def _chunks_of(self, work: TwoShotReduce, nbytes: int, slots: list[list[np.ndarray]]) -> list[Chunk]:
        sizes, itemsize = tuple([source.size for source in work.inputs]), work.inputs[0].itemsize
        # Small tensors: one copy each is faster than one reduction each. A prescale needs the copy, too.
        packs_own = work.reduction.prescale != 1.0 or not _are_large(nbytes, sizes)
        key = work.inputs[0].dtype, work.chunk_bytes, packs_own, sizes
        chunks = self._layouts.get(key)
        if chunks is None:
            chunks = self._lay_out(sizes, work.chunk_bytes // itemsize, slots, packs_own)
            views = sum([len(chunk.packs) + len(chunk.own_copies) + len(chunk.other_copies)
                         + len(chunk.parts) * (1 + len(chunk.reads)) for chunk in chunks])
            if self._kept_views + views > tuning.SHM_KEPT_VIEWS:
                self._layouts.clear()
                self._kept_views = 0
            self._layouts[key] = chunks
            self._kept_views += views
        return chunks

    def _lay_out(self, sizes: Sequence[int], per_chunk: int, slots: Sequence[Sequence[np.ndarray]],
                 packs_own: bool) -> list[Chunk]:
        """Divide arrays of `sizes` elements into chunks of `per_chunk`. The memory of chunk k is slots[k % len(slots)].

        The caller keeps the result, because computing it takes longer than reducing a few chunks of 512 KiB.

        `packs_own`: Whether this rank also packs the slice that it reduces.
        """
        layout, chunks = FlatLayout(sizes), []
        for k, start in enumerate(range(0, layout.length, per_chunk)):
            size, slot = min(per_chunk, layout.length - start), slots[k % len(slots)]
            packed, reduced = slot[self._index], slot[-1]
            own, rest = self._slices_of(size, reduced.itemsize)
            packs = _moves(layout, start, [slice(0, size)] if packs_own else rest, packed)
            other_copies = _moves(layout, start, rest, reduced)
            if own is None:
                chunks.append(Chunk(packs, None, [], [], reduced[:0], [], other_copies))
                continue
            parts, result = [part[own] for part in slot[:-1]], reduced[own]
            own_segments = layout.segments(start + own.start, own.stop - own.start)
            reads = [] if packs_own else [
                Read(array, part, [packed[here] for packed in parts], here) for array, part, here in own_segments]
            own_copies = [Move(array, part, result[here]) for array, part, here in own_segments]
            chunks.append(Chunk(packs, own, parts, reads, result, own_copies, other_copies))
        return chunks

    def _slices_of(self, size: int, itemsize: int) -> tuple[slice | None, list[slice]]:
        """Return the slice of a chunk of `size` elements that this rank reduces, or None, and the slices around it."""
        reducers = self._reducers(size * itemsize)
        if self._index >= reducers:
            return None, [slice(0, size)]
        own = slice(size * self._index // reducers, size * (self._index + 1) // reducers)
        return own, [part for part in (slice(0, own.start), slice(own.stop, size)) if part.start < part.stop]

    def _reducers(self, nbytes: int) -> int:
        """Return into how many slices a chunk of `nbytes` is divided. The i-th rank of the host reduces slice i."""
        return self._count

    def run(self, work: Chunked, stages: Sequence[Stage]) -> None:
        """Run `stages` on all chunks of the collective `work`. Each stage is one chunk behind the stage before it.

        All ranks have the same number of chunks. Chunks are numbered from 1, over all collectives of this object, and
        `work.first` is the number of the first chunk of `work`. The counters of HostMemory hold these numbers.
        """
        count = len(work.chunks)
        if not count:
            return
        for tick in range(count + len(stages) - 1):
            for lag, stage in enumerate(stages):
                if 0 <= tick - lag < count:
                    stage(work, tick - lag)
        self.last_chunk += count
        for k in range(max(count - self.slots, 0), count):
            self.free_at[k % self.slots] = work.first + k

    def run_timed(self, work: TwoShotReduce) -> None:
        """Run an all-reduce. If `work.kind` is set, the host's first rank times it, and posts the next chunk size."""
        if work.kind is None or self._index:
            self.run(work, self.stages)
            return
        choice = self.choices.get(work.kind) or self.choices.setdefault(work.kind, ChunkChoice(self._chunks))
        # Posted before the first chunk, with which the other ranks read it.
        self.memory.post(choice.upcoming(), CHUNK_BYTES)
        began = time.perf_counter()
        self.run(work, self.stages)
        took_s = time.perf_counter() - began - work.wait_s + work.ahead_s
        if choice.took(work.chunk_bytes, took_s / sum([source.nbytes for source in work.inputs])):
            self.on_choice(f"{work.kind} use chunks of {choice}.")

    def measured_choices(self) -> list[str]:
        return [f"{kind} use chunks of {choice}." for kind, choice in list(self.choices.items()) if choice.s_per_byte]

    def _room_for(self, work: TwoShotReduce, k: int) -> int:
        """Return the number of the chunk that all ranks must have finished before chunk k may use the same memory."""
        return self.free_at[k] if k < self.slots else work.first + k - self.slots

    @property
    def stages(self) -> Sequence[Stage]:
        return self._pack, self._reduce, self._unpack

    def _pack(self, work: TwoShotReduce, k: int) -> None:
        if k >= work.packed:
            self.memory.await_all(self._room_for(work, k), CONSUMED)
            work.copy_in(work.chunks[k])
        self.memory.post(work.first + k, PACKED)

    def _reduce(self, work: TwoShotReduce, k: int) -> None:
        chunk = work.chunks[k]
        began = time.perf_counter() if k == 0 else 0.0
        self.memory.await_all(work.first + k, PACKED)
        if k == 0 and work.kind is not None:
            work.wait_s = time.perf_counter() - began
            # The first rank cannot post the next one before this rank has ended this all-reduce.
            self._chunk_of[work.kind] = self.memory.counter_of(self.memory.ranks[0], CHUNK_BYTES)
        self.memory.await_all(self._room_for(work, k), UNPACKED)
        self._reduce_slice(work, chunk, chunk.result, work.reduction.scale)
        # Before other ranks read the slice, which evicts it from this processor's cache (102 MB, 2 ranks: 4 % faster).
        work.copy_out(chunk.own_copies)
        self.memory.post(work.first + k, READY, CONSUMED)

    def _reduce_slice(self, work: TwoShotReduce, chunk: Chunk, result: np.ndarray, scale: Scale) -> None:
        """Reduce this rank's slice of a chunk over the ranks of the host, into `result`."""
        if not chunk.reads:
            combine(chunk.parts, work.reduction.op, result, scale)
        for array, part, parts, here in chunk.reads:
            all_parts = parts[:]
            all_parts[self._index] = work.inputs[array][part]
            combine(all_parts, work.reduction.op, result[here], scale)

    def _unpack(self, work: TwoShotReduce, k: int) -> None:
        """Copy to the targets the slices of chunk k that other ranks have reduced."""
        self.memory.await_all(work.first + k, READY)
        work.copy_out(work.chunks[k].other_copies)
        self.memory.post(work.first + k, UNPACKED)

    def _views_of(self, dtype: np.dtype) -> _Views:
        if dtype not in self._views:
            slots = {chunk: [[row[k * chunk:(k + 1) * chunk].view(dtype) for row in self._bytes]
                             for k in range(self.slots)] for chunk in self._chunks}
            self._views[dtype] = _Views(self._bytes[:-1, :self.slots * self._chunks[0]].view(dtype), slots)
        return self._views[dtype]

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        self._others.allgather(source, target, counts)

    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        self._others.alltoall(source, target, sent, received, largest)

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        self._others.reducescatter(source, target, counts, reduction)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        self._others.broadcast(array, root_rank)

    def abandon(self, is_stalled: bool) -> None:
        self.memory.abandon(is_stalled)

    def revoke(self) -> list[Any]:
        return self._others.revoke()

    def close(self) -> None:
        self._others.close()


def _moves(layout: FlatLayout, start: int, parts: Sequence[slice], memory: np.ndarray) -> list[Move]:
    """Return the copies for the slices `parts` of a chunk. The chunk starts at element `start` and uses `memory`."""
    return [Move(array, part, memory[elements][here]) for elements in parts
            for array, part, here in layout.segments(start + elements.start, elements.stop - elements.start)]
