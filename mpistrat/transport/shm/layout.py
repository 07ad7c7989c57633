"""Which elements of a list of arrays go through which part of the shared memory, chunk by chunk.

That is the same whenever arrays of those sizes are reduced, so it is worked out once: with chunks of half a megabyte it
would take longer than to reduce some of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...core.packing import FlatLayout


class Move(NamedTuple):
    """Elements of an array, and the shared memory that they are copied to or from."""

    array: int  # its number in the list
    part: slice  # of the array
    place: np.ndarray


class Read(NamedTuple):
    """Elements of an array that are reduced from there."""

    array: int
    part: slice
    parts: list[np.ndarray]  # what each rank has packed of the same elements; this one has not
    here: slice  # which elements of the slice they are


class Chunk(NamedTuple):
    """Consecutive elements, of which each of some ranks reduces a slice.

    Attributes:
        packs: What this rank packs.
        mine: Which of the elements this rank reduces, if any.
        parts: Those, as each rank of the host packs them.
        reads: Those, if this rank does not pack them.
        result: Those, reduced.
        outs: What becomes of the result on this rank.
        others: What becomes, on this rank, of what others have reduced.
    """

    packs: list[Move]
    mine: slice | None
    parts: list[np.ndarray]
    reads: list[Read]
    result: np.ndarray
    outs: list[Move]
    others: list[Move]

    @property
    def views(self) -> int:
        """How many there are in it."""
        return len(self.packs) + len(self.outs) + len(self.others) + len(self.parts) * (1 + len(self.reads))


def lay_out(sizes: Sequence[int], per_chunk: int, slots: Sequence[Sequence[np.ndarray]], index: int,
            share: Callable[[int], tuple[slice | None, list[slice]]], packs_own: bool) -> list[Chunk]:
    """The chunks of arrays of those sizes.

    Args:
        sizes: In elements.
        per_chunk: Elements of a chunk.
        slots: Which chunks use in turn: memory for each rank of the host, and for the result.
        index: This rank's position among the ranks of the host.
        share: Of so many elements of a chunk, what this rank reduces and what others do.
        packs_own: Whether this rank packs what it reduces itself.
    """
    line, chunks = FlatLayout(sizes), []
    for k, start in enumerate(range(0, line.length, per_chunk)):
        size, slot = min(per_chunk, line.length - start), slots[k % len(slots)]
        mine, rest = share(size)
        packed, reduced = slot[index], slot[-1]
        packs = _moves(line, start, [slice(0, size)] if packs_own else rest, packed)
        others = _moves(line, start, rest, reduced)
        if mine is None:
            chunks.append(Chunk(packs, None, [], [], reduced[:0], [], others))
            continue
        parts, result = [part[mine] for part in slot[:-1]], reduced[mine]
        own = line.pieces(start + mine.start, mine.stop - mine.start)
        reads = [] if packs_own else [
            Read(array, part, [packed[here] for packed in parts], here) for array, part, here in own]
        outs = [Move(array, part, result[here]) for array, part, here in own]
        chunks.append(Chunk(packs, mine, parts, reads, result, outs, others))
    return chunks


def _moves(line: FlatLayout, start: int, parts: Sequence[slice], memory: np.ndarray) -> list[Move]:
    """For the elements `parts` of a chunk that begins with element `start`, and is in `memory`."""
    return [Move(array, part, memory[elements][here]) for elements in parts
            for array, part, here in line.pieces(start + elements.start, elements.stop - elements.start)]
