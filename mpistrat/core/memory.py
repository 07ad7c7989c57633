"""Result memory: aligned blocks that are used again once nobody refers to them.

Fresh memory costs page faults (a quarter of a millisecond per megabyte), so results of the same size step after step
come from the same blocks. TensorFlow adopts a numpy array without a copy only if it is 64-byte aligned.
"""

import math
import sys
from collections import deque

import numpy as np

ALIGNMENT = 64
IDLE_REFERENCES = 2  # what keeps the block, and the argument of getrefcount
_KEPT_TURNS = 64


def rounded_up(count: int, step: int = ALIGNMENT) -> int:
    """The smallest multiple of `step` that is not less than `count`."""
    return -(-count // step) * step


def aligned_empty(nbytes: int) -> np.ndarray:
    """Uninitialised bytes (uint8, 1-D) whose address is a multiple of 64."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset:offset + nbytes]


class _Block:
    """The memory of one result, and the turn in which it was last taken."""

    __slots__ = ("memory", "taken_at")

    def __init__(self, nbytes: int):
        self.memory = aligned_empty(nbytes)
        self.taken_at = 0

    @property
    def is_free(self) -> bool:
        """Whether nothing outside the pool refers to it: numpy keeps the base alive for every view."""
        return sys.getrefcount(self.memory.base) == IDLE_REFERENCES


_NO_BLOCKS: deque[_Block] = deque()


class ResultPool:
    """Hands out arrays over pooled blocks. Used by one thread; the arrays may go to any other.

    A block is free when nothing outside the pool refers to it: numpy keeps the block alive for every view, and
    TensorFlow keeps the view for as long as a tensor uses its memory.

    Memory is bounded by what is in use. Sizes are rounded, so that results whose size changes a little share a block.
    When new blocks have brought the pool to its limit, it keeps only as many bytes of free blocks as are in use (or
    `spare_bytes`, if that is more), those last taken. The limit is then what is in use and twice that.

    Args:
        spare_bytes: So many bytes of free blocks are always allowed.
    """

    def __init__(self, spare_bytes: int = 32 * 2**20):
        self._blocks: dict[int, deque[_Block]] = {}  # by size; the one taken the longest ago first
        self._spare_bytes = self._limit = spare_bytes
        self.nbytes = 0  # of all blocks
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised, aligned, C-contiguous array whose memory nothing else uses."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = block_size(nbytes)
        blocks = self._blocks.get(size, _NO_BLOCKS)
        for _ in range(len(blocks)):
            blocks.rotate(-1)
            block = blocks[-1]
            if block.is_free:
                break
        else:
            block = self._make(size)
        block.taken_at = self._turn
        return block.memory[:nbytes].view(dtype).reshape(shape)

    def _make(self, size: int) -> _Block:
        if self.nbytes + size > self._limit:
            in_use = size + sum(block.memory.nbytes for blocks in self._blocks.values() for block in blocks
                                if not block.is_free)
            allowed = max(in_use, self._spare_bytes)
            self._limit = in_use + 2 * allowed
            self._drop_free(allowed)
        block = _Block(size)
        self._blocks.setdefault(size, deque()).append(block)
        self.nbytes += size
        return block

    def _drop_free(self, allowed_bytes: int, taken_since: int = 0) -> None:
        """Keep so many bytes of free blocks at most, those last taken, and none that was not taken since that turn."""
        free = [block for blocks in self._blocks.values() for block in blocks if block.is_free]
        free.sort(key=lambda block: block.taken_at, reverse=True)
        dropped = set()
        for block in free:
            allowed_bytes -= block.memory.nbytes
            if allowed_bytes < 0 or block.taken_at < taken_since:
                dropped.add(block)
                self.nbytes -= block.memory.nbytes
        for size in {block.memory.nbytes for block in dropped}:
            kept = deque(block for block in self._blocks[size] if block not in dropped)
            if kept:
                self._blocks[size] = kept
            else:
                del self._blocks[size]

    def next_turn(self) -> None:
        """Mark the end of a round of work; now and then blocks that were not taken in the last 64 rounds are freed."""
        self._turn += 1
        if self._turn % _KEPT_TURNS == 0:
            self._drop_free(self.nbytes, taken_since=self._turn - _KEPT_TURNS)


def block_size(nbytes: int) -> int:
    """The size of the block for a result of so many bytes: at most an eighth larger, and a multiple of 64."""
    return rounded_up(nbytes, max(ALIGNMENT, 2 ** (nbytes.bit_length() - 4)) if nbytes else ALIGNMENT)


class FusionBuffer:
    """Memory that grows to the largest bucket seen and is used again for every bucket. One thread only."""

    def __init__(self) -> None:
        self._memory = aligned_empty(0)

    def view(self, elements: int, dtype: np.dtype) -> np.ndarray:
        """A 1-D array of `elements` over the buffer; what it held before is lost."""
        nbytes = elements * dtype.itemsize
        if nbytes > self._memory.nbytes:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes].view(dtype)
