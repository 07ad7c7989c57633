"""The plan of a launch of the batched copy kernel, as plain data: pieces, scale, and the blocks of each piece. Pure.

One launch packs a bucket of tensors into a fusion buffer, or unpacks it, and converts and scales the elements. The
kernel (copy.kernel) reads the table of pieces; tests execute the same table with numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arithmetic import IDENTITY, Scale
from ...core.memory import rounded_up
from ...core.tuning import COPY_BLOCK_ELEMENTS

# The row of one piece: addresses, elements, and the first of its blocks, which end before those of the next row.
PIECE = np.dtype([("source", np.uint64), ("target", np.uint64), ("count", np.uint64), ("first_block", np.uint64)])
# A GPU thread can load and store 16 bytes at a time, if both addresses are multiples of that.
ALIGNMENT = 16


@dataclass(frozen=True)
class CopyJob:
    """How elements are copied: `target = (target's dtype) (source * factor / divisor)`.

    As in arithmetic.Scale: half precision is scaled in float32. Integers are divided exactly and truncated if the
    factor is 1, and scaled in float64 otherwise.

    Attributes:
        source, target: Names of dtypes in copy.kernel.TYPES.
    """

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


def copy_table(sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Return the rows, of dtype PIECE, to copy `counts[i]` elements from address `sources[i]` to `targets[i]`.

    Omits pieces without elements.
    """
    table = np.zeros(len(counts), PIECE)
    table["source"], table["target"], table["count"] = sources, targets, counts
    table = table[table["count"] > 0]
    blocks = _blocks(table)
    table["first_block"] = np.cumsum(blocks) - blocks
    return table


def block_count(table: np.ndarray) -> int:
    """The number of blocks of threads for a launch over the table."""
    return int(_blocks(table).sum())


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
