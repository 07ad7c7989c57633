"""Memory for results and fusion buffers: aligned, and reused once it is free.

Fresh memory costs page faults (0.25 ms per MB), so results of the same size use the same blocks step after step.
TensorFlow adopts a numpy array without a copy only if it is 64-byte aligned. Only one thread, the driver of the engine,
takes memory from a pool. Any thread may release it.
"""

import math
import sys
from collections import deque
from functools import lru_cache

import numpy as np

from .tuning import IDLE_RESULT_ROUNDS, RESULT_LOOKS, RESULT_SIZE_STEPS, SPARE_RESULT_BYTES

ALIGNMENT = 64
IDLE_REFERENCES = 2  # References to the memory of a free block: its owner, and the argument of getrefcount.


def rounded_up(count: int, step: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `step` that is not less than `count`."""
    return -(-count // step) * step


def aligned_empty(nbytes: int) -> np.ndarray:
    """Return an uninitialised 1-D uint8 array whose address is a multiple of 64."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset:offset + nbytes]


class _Block:
    """The memory of one result."""

    __slots__ = ("memory", "taken_at")

    def __init__(self, nbytes: int):
        self.memory = aligned_empty(nbytes)
        self.taken_at = 0  # The round in which the block was last taken.

    @property
    def is_free(self) -> bool:
        return sys.getrefcount(self.memory.base) == IDLE_REFERENCES


_NO_BLOCKS: deque[_Block] = deque()


class ResultPool:
    """Allocates arrays for results in blocks that it reuses. One thread uses the pool; any thread may use the arrays.

    A block is free when nothing outside the pool refers to it: every numpy view holds a reference to the block, and
    TensorFlow holds the view for as long as a tensor uses its memory. Block sizes are rounded up, so that results of
    nearly equal sizes share blocks.

    The pool has a size limit. A new block that would exceed the limit makes the pool drop free blocks, the least
    recently taken first, until at most K bytes are free. K is the bytes in use, or `spare_bytes` if that is more. The
    limit is then set to the bytes in use plus 2 K.

    `take` looks at no more than RESULT_LOOKS blocks, so its time does not grow with the number of blocks. It may
    therefore overlook a free block. The next call looks at the blocks after these.
    """

    def __init__(self, spare_bytes: int = SPARE_RESULT_BYTES):
        self._blocks: dict[int, deque[_Block]] = {}  # By size, the least recently taken (or found in use) block first.
        self._spare_bytes = self._limit = spare_bytes
        self.nbytes = 0
        self._round = 0
        self._next_drop_at = IDLE_RESULT_ROUNDS

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised, aligned, C-contiguous array in a free block, or else in a new block."""
        size = block_size(math.prod(shape) * dtype.itemsize)
        blocks = self._blocks.get(size, _NO_BLOCKS)
        for _ in range(min(len(blocks), RESULT_LOOKS)):
            blocks.rotate(-1)
            block = blocks[-1]
            if sys.getrefcount(block.memory.base) == IDLE_REFERENCES:  # `is_free` without a call
                break
        else:
            block = self._make(size)
        block.taken_at = self._round
        return np.ndarray(shape, dtype, block.memory)

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
        """Drop free blocks not taken since round `taken_since`, then the oldest until only `allowed_bytes` are free."""
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

    def end_round(self) -> None:
        """End a round (a call of Executor.execute). Now and then, drop blocks unused for IDLE_RESULT_ROUNDS rounds."""
        self._round += 1
        if self._round >= self._next_drop_at:
            self._drop_free(self.nbytes, taken_since=self._round - IDLE_RESULT_ROUNDS)
            # _drop_free looks at all blocks. With more blocks it is called later: RESULT_LOOKS per round on average.
            count = sum(map(len, self._blocks.values()))
            self._next_drop_at = self._round + max(IDLE_RESULT_ROUNDS, count // RESULT_LOOKS)


@lru_cache(1024)
def block_size(nbytes: int) -> int:
    """Return the size of a block for `nbytes` bytes: a multiple of 64. From 512 bytes on it adds at most an eighth."""
    return rounded_up(nbytes, max(ALIGNMENT, (1 << nbytes.bit_length()) // (2 * RESULT_SIZE_STEPS)))


class FusionBuffer:
    """Scratch memory for all buckets. It grows to the size of the largest bucket. For one thread only."""

    def __init__(self) -> None:
        self._memory = aligned_empty(0)

    def view(self, elements: int, dtype: np.dtype) -> np.ndarray:
        """Return a 1-D array of `elements` elements in the buffer. The buffer's former contents are lost."""
        nbytes = elements * dtype.itemsize
        if nbytes > self._memory.nbytes:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes].view(dtype)
