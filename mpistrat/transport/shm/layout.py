"""Layout of an all-reduce in shared memory: which elements of which arrays use which memory, chunk by chunk.

A layout depends only on the sizes of the arrays, so it is computed once and cached. The computation would take longer
than the reduction of some chunks of 512 KiB. Pure, except for the views of the memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...core.arithmetic import FlatLayout


class Move(NamedTuple):
    """A copy between elements of an array and shared memory."""

    array: int  # its index in the list
    part: slice  # the elements of the array
    memory: np.ndarray  # the same number of elements of shared memory


class Read(NamedTuple):
    """Elements of an array that this rank reduces without packing its own part."""

    array: int
    part: slice
    parts: list[np.ndarray]  # the same elements in each rank's memory; this rank's memory is not written
    here: slice  # the same elements, counted in the slice that this rank reduces


class Chunk(NamedTuple):
    """Consecutive elements of the arrays. Some or all ranks reduce one slice of the chunk each."""

    packs: list[Move]  # The copies to shared memory that this rank makes.
    own: slice | None  # The slice of the chunk that this rank reduces; None: it reduces none.
    parts: list[np.ndarray]  # That slice in the memory of each rank of the host.
    reads: list[Read]  # That slice in this rank's arrays, if this rank does not pack it.
    result: np.ndarray  # That slice in the memory of the results.
    own_copies: list[Move]  # The copies of that slice from the results to this rank's targets.
    other_copies: list[Move]  # The copies of the other slices from the results to this rank's targets.

    @property
    def views(self) -> int:
        """The number of numpy views that the chunk holds."""
        return len(self.packs) + len(self.own_copies) + len(self.other_copies) + len(self.parts) * (1 + len(self.reads))


def lay_out(sizes: Sequence[int], per_chunk: int, slots: Sequence[Sequence[np.ndarray]], index: int,
            slices_of: Callable[[int], tuple[slice | None, list[slice]]], packs_own: bool) -> list[Chunk]:
    """Return the chunks for arrays of these sizes.

    Args:
        sizes: The elements of each array.
        per_chunk: The elements of a chunk.
        slots: The memory that the chunks use in turn. Each slot has an array for each rank of the host, then an array
            for the results.
        index: This rank's position among the ranks of the host.
        slices_of: Maps a number of elements to (the slice that this rank reduces, the other slices).
        packs_own: Whether this rank also packs the slice that it reduces.
    """
    layout, chunks = FlatLayout(sizes), []
    for k, start in enumerate(range(0, layout.length, per_chunk)):
        size, slot = min(per_chunk, layout.length - start), slots[k % len(slots)]
        own, rest = slices_of(size)
        packed, reduced = slot[index], slot[-1]
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


def _moves(layout: FlatLayout, start: int, parts: Sequence[slice], memory: np.ndarray) -> list[Move]:
    """The copies for the slices `parts` of a chunk that starts at element `start` and uses `memory`."""
    return [Move(array, part, memory[elements][here]) for elements in parts
            for array, part, here in layout.segments(start + elements.start, elements.stop - elements.start)]
