"""What one launch of the batched copy kernel does, as plain data: which pieces, which scale, which block copies what.

One launch packs a bucket of tensors into a fusion buffer, or unpacks it, with the change of dtype and the scale on the
way. The table of pieces is read by `copy_kernel.source`; tests read the same table with numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arithmetic import IDENTITY, Scale
from ...core.memory import rounded_up

# The row of one piece. `count` is in elements; blocks from `first_block` up to that of the next row work on it.
PIECE = np.dtype([("source", np.uint64), ("target", np.uint64), ("count", np.uint64), ("first_block", np.uint64)])
BLOCK_ELEMENTS = 16384
BLOCK_THREADS = 256
# A processor of the GPU reads and writes 16 bytes at once where both sides begin at a multiple of that.
ALIGNMENT = 16


@dataclass(frozen=True)
class CopyJob:
    """How every element is copied: `target = (target's dtype) (source * factor / divisor)`.

    As in `scale`: halves are scaled in float32; integers are divided exactly and truncated when there is no factor, and
    scaled in float64 otherwise.

    Attributes:
        source, target: Names of dtypes that the kernel knows, see `copy_kernel.TYPES`.
    """

    source: str
    target: str
    factor: float = 1.0
    divisor: int = 1

    @classmethod
    def between(cls, source: str, target: str, scale: Scale = IDENTITY) -> "CopyJob":
        """The job with a Scale."""
        return cls(source, target, scale.factor, scale.divisor)

    @property
    def is_plain(self) -> bool:
        """Whether bytes are copied as they are."""
        return self.source == self.target and self.factor == 1.0 and self.divisor == 1


def copy_table(sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """The rows, of dtype PIECE, that copy `counts[i]` elements from address `sources[i]` to `targets[i]`.

    Pieces without elements are left out.
    """
    table = np.zeros(len(counts), PIECE)
    table["source"], table["target"], table["count"] = sources, targets, counts
    table = table[table["count"] > 0]
    blocks = _blocks(table)
    table["first_block"] = np.cumsum(blocks) - blocks
    return table


def block_count(table: np.ndarray) -> int:
    """How many blocks of threads a launch over the table needs."""
    return int(_blocks(table).sum())


def fused_offsets(counts: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Where in a fusion buffer tensors of `counts` elements begin, aligned, and how many elements it then has."""
    step = max(ALIGNMENT // itemsize, 1)
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += rounded_up(count, step)
    return offsets, end


def _blocks(table: np.ndarray) -> np.ndarray:
    return -(-table["count"].astype(np.int64) // BLOCK_ELEMENTS)
