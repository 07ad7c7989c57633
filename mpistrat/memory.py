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


class ResultPool:
    """Hands out arrays over pooled blocks. Used by one thread; the arrays may go to any other.

    A block is free when nothing outside the pool refers to it: numpy keeps the block alive for every view, and
    TensorFlow keeps the view for as long as a tensor uses its memory.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, deque[np.ndarray]] = {}  # the one that was handed out the longest ago first
        self._last_use: dict[int, int] = {}
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised, aligned, C-contiguous array that nobody else uses."""
        nbytes = math.prod(shape) * dtype.itemsize
        self._last_use[nbytes] = self._turn
        blocks = self._blocks.get(nbytes)
        if blocks is None:
            blocks = self._blocks[nbytes] = deque()
        for _ in range(len(blocks)):
            blocks.rotate(-1)
            block = blocks[-1]
            if sys.getrefcount(block.base) == IDLE_REFERENCES:
                break
        else:
            block = aligned_empty(nbytes)
            blocks.append(block)
        return block.view(dtype).reshape(shape)

    def next_turn(self) -> None:
        """Mark the end of a round of work; sizes not asked for in the last 64 rounds lose their free blocks."""
        self._turn += 1
        if self._turn % _KEPT_TURNS:
            return
        for nbytes in [n for n, last in self._last_use.items() if self._turn - last > _KEPT_TURNS]:
            self.give_back(nbytes)

    def give_back(self, nbytes: int) -> bool:
        """Part with the free blocks of a size. Returns whether there are no others."""
        blocks = self._blocks.pop(nbytes, ())
        in_use = deque(block for block in blocks if sys.getrefcount(block.base) > IDLE_REFERENCES)
        if in_use:
            self._blocks[nbytes] = in_use
        else:
            self._last_use.pop(nbytes, None)
        return not in_use
