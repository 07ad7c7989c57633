"""A large reduce-scatter among the ranks of one host: what each rank writes to and reads from shared memory.

Pure, but for the arrays that it is given. SharedMemoryData runs the chunks, and waits for the other ranks in between.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...core.arithmetic import Reduction, combine, scaled_copy
from ...core.memory import ALIGNMENT
from ...core.tuning import SHM_SCATTERS_UNDER_WAY


class ReduceScatter:
    """The chunks of a reduce-scatter; see two_shot.InChunks.

    Chunk k has piece k of each rank's part. Each rank writes the pieces that others reduce to its memory, side by side.

    Args:
        memories: A row for each rank of the host, its memory, of the dtype of the elements.
        index: This rank's position among the ranks of the host.
        first: The number of the first chunk.
        source, target, counts, reduction: As in DataPlane.reducescatter.
    """

    def __init__(self, memories: np.ndarray, index: int, first: int, source: np.ndarray,
                 target: np.ndarray, counts: Sequence[int], reduction: Reduction):
        self._memories, self._index, self._count = memories, index, len(counts)
        self._source, self._target, self._reduction = source, target, reduction
        piece_bytes = memories[index].nbytes // (SHM_SCATTERS_UNDER_WAY * self._count) // ALIGNMENT * ALIGNMENT
        self._step = piece_bytes // source.itemsize  # elements of a piece
        self._bounds = [(end - count, end) for end, count in zip(accumulate(counts), counts)]
        self._packs_own = reduction.prescale != 1.0  # That needs the copy.
        self.first, self.chunks = first, range(-(-max(counts) // self._step))

    def room_for(self, k: int) -> int:
        """How many chunks of all collectives must be consumed before chunk k may overwrite its memory."""
        return self.first + max(k - SHM_SCATTERS_UNDER_WAY, -1)

    def pack(self, k: int) -> None:
        """Write the pieces of chunk k to this rank's memory."""
        for rank in range(self._count):
            if rank != self._index or self._packs_own:
                piece = self._piece(rank, k)
                scaled_copy(piece, self._reduction.prescale, self._packed(self._index, rank, k, piece.size))

    def reduce(self, k: int) -> None:
        """Reduce this rank's piece of chunk k, which all ranks have packed, into the target."""
        target = self._target[k * self._step:(k + 1) * self._step]
        parts = [self._packed(rank, self._index, k, target.size) for rank in range(self._count)]
        if not self._packs_own:
            parts[self._index] = self._piece(self._index, k)
        combine(parts, self._reduction.op, target, self._reduction.scale)

    def _piece(self, rank: int, k: int) -> np.ndarray:
        """Piece k of a rank's part of the source; empty if that part has fewer pieces."""
        start, stop = self._bounds[rank]
        return self._source[min(start + k * self._step, stop):min(start + (k + 1) * self._step, stop)]

    def _packed(self, owner: int, rank: int, k: int, size: int) -> np.ndarray:
        """The `size` elements of piece k for `rank` in the memory of `owner`."""
        start = (k % SHM_SCATTERS_UNDER_WAY * self._count + rank) * self._step
        return self._memories[owner][start:start + size]
