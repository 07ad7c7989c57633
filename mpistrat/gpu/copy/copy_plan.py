"""The plan of launches of the batched copy kernel, as plain data: pieces, scale, and the blocks of each piece. Pure.

A launch packs tensors of a bucket into a fusion buffer, or unpacks them, and converts and scales the elements. The
kernel (copy_kernel) reads the table of pieces; tests execute the same table with numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ...core.arithmetic import IDENTITY, Scale
from ...core.memory import rounded_up
from ...core.tuning import COPY_BLOCK_ELEMENTS

# The row of one piece: addresses, number of elements, and first block. Its blocks end before those of the next row.
PIECE = np.dtype([("source", np.uint64), ("target", np.uint64), ("count", np.uint64), ("first_block", np.uint64)])
# A GPU thread can load and store 16 bytes at a time, if both addresses are multiples of 16.
ALIGNMENT = 16
# The rows of a table. The table is a parameter of the launch, and all parameters together may have 4 KB. So a launch
# needs no GPU memory, and a rank that is out of memory does not fail when other ranks wait for it in the collective.
PIECES_PER_LAUNCH = 120


@dataclass(frozen=True)
class CopyJob:
    """How elements are copied: `target = (target's dtype) (source * factor / divisor)`.

    As in arithmetic.Scale: half precision is scaled in float32. Integers are divided exactly and truncated if the
    factor is 1, and scaled in float64 otherwise.
    """

    # source, target: Names of dtypes in copy_kernel.TYPES.
    source: str
    target: str
    factor: float = 1.0
    divisor: int = 1

    @classmethod
    def between(cls, source: str, target: str, scale: Scale = IDENTITY) -> "CopyJob":
        """Return the job that applies `scale`."""
        return cls(source, target, scale.factor, scale.divisor)

    @property
    def is_plain(self) -> bool:
        """Whether bytes are copied unchanged."""
        return self.source == self.target and self.factor == 1.0 and self.divisor == 1


def copy_tables(sources: Sequence[int] | np.ndarray, targets: Sequence[int] | np.ndarray,
                counts: Sequence[int]) -> list[np.ndarray]:
    """Return a table for each launch that copies `counts[i]` elements from address `sources[i]` to `targets[i]`.

    A table has at most PIECES_PER_LAUNCH rows of dtype PIECE. Omits pieces without elements.
    """
    pieces = np.zeros(len(counts), PIECE)
    pieces["source"], pieces["target"], pieces["count"] = sources, targets, counts
    pieces = pieces[pieces["count"] > 0]
    tables = [pieces[start:start + PIECES_PER_LAUNCH] for start in range(0, len(pieces), PIECES_PER_LAUNCH)]
    for table in tables:
        blocks = _blocks(table)
        table["first_block"] = np.cumsum(blocks) - blocks
    return tables


def block_count(table: np.ndarray) -> int:
    """The number of blocks of threads for a launch over the table."""
    return int(_blocks(table).sum())


class FusedCopies:
    """The launches that copy arrays of the same sizes to a fusion buffer, and back, again and again.

    Both methods return the table and the number of blocks of each launch. The tables change with the next call: a
    launch takes its table by value.

    Args:
        counts: Elements of each array.
        memory_bytes, itemsize: The bytes of an element in the arrays and in the buffer. The smaller one is aligned.
    """

    def __init__(self, counts: Sequence[int], memory_bytes: int, itemsize: int):
        # total: Elements in the buffer.
        offsets, self.total = fused_offsets(counts, min(memory_bytes, itemsize))
        self._filled = None if 0 not in counts else np.flatnonzero(counts)
        self._offsets = np.asarray(self._of_filled(np.array(offsets, np.uint64) * np.uint64(itemsize)))
        nothing = np.zeros(len(counts), np.uint64)
        tables = copy_tables(nothing, nothing, counts)
        self._launches = [(table, block_count(table)) for table in tables]
        pieces = cast("np.ndarray", tables[0].base) if tables else np.zeros(0, PIECE)
        self._sources, self._targets = pieces["source"], pieces["target"]

    def to_buffer(self, sources: Sequence[int], buffer: int) -> list[tuple[np.ndarray, int]]:
        """The launches that pack the arrays at these addresses."""
        self._sources[:], self._targets[:] = self._of_filled(sources), self._offsets + np.uint64(buffer)
        return self._launches

    def from_buffer(self, buffer: int, targets: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """The launches that unpack to these addresses."""
        self._sources[:], self._targets[:] = self._offsets + np.uint64(buffer), self._of_filled(targets)
        return self._launches

    def _of_filled(self, addresses: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        return addresses if self._filled is None else np.asarray(addresses, np.uint64)[self._filled]


def fused_offsets(counts: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """The aligned offsets, in elements, of tensors of `counts` elements in a fusion buffer, and its length."""
    step = max(ALIGNMENT // itemsize, 1)
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += rounded_up(count, step)
    return offsets, end


def _blocks(table: np.ndarray) -> np.ndarray:
    return -(-table["count"].astype(np.int64) // COPY_BLOCK_ELEMENTS)
