"""Memory for results that all ranks of a host read: each writes what it has reduced, and nobody copies the others'."""

import logging
import mmap
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..memory import IDLE_REFERENCES, rounded_up
from .host_file import HostFile
from .host_memory import MADE, SEEN, HostMemory

# What a rank declares: a bit for each block, whether it is free; and the last bit, whether the rank wants any.
_ROW_BYTES = 32
_MOST_BLOCKS = _ROW_BYTES * 8 - 1
_WANTED = 1 << _MOST_BLOCKS
# A block that was not lent in so many all-reduces may go, and so may what is known of sizes.
_KEPT_TURNS = 1024
# There is a block when results of its size have been wanted twice; the first may have been the only ones.
_ASKED = 2

logger = logging.getLogger(__name__)


class _Block:
    """Memory for the results of one all-reduce."""

    def __init__(self, memory: mmap.mmap, used_at: int):
        self.memory, self.used_at = memory, used_at
        self.array = np.frombuffer(memory, np.uint8)

    @property
    def is_free(self) -> bool:
        """Whether nothing on this rank refers to it: numpy keeps `array` alive for every view."""
        return sys.getrefcount(self.array) == IDLE_REFERENCES


class SharedResults:
    """Blocks of memory that are the same on all ranks of a host, under the same numbers.

    A block may be lent again when it is free on all ranks. With every large all-reduce each rank declares which are
    free on it; when that is over all ranks see what all have declared, and the next all-reduce is lent a block that was
    free on all of them. So a choice takes no exchange of its own, and is late by one: where all-reduces of one size
    follow each other, two blocks are lent in turn.

    Used by the engine's thread alone. `declare` and `learn` are called on all ranks, for the same all-reduces.

    Args:
        memory: Has the counters.
        file: Gives the blocks; nobody else takes memory from it any more. Closed by `close`.

    Raises:
        OSError: There is no memory for the declarations.
    """

    def __init__(self, memory: HostMemory, file: HostFile):
        self._memory, self._file = memory, file
        count = len(memory.ranks)
        # Two tables in turn: a rank that is an all-reduce ahead does not overwrite what others have not yet read.
        self._tables = [memoryview(file.take(count * _ROW_BYTES)) for _ in range(2)]
        self._rows = [slice(index * _ROW_BYTES, (index + 1) * _ROW_BYTES) for index in range(count)]
        self._blocks: dict[int, _Block] = {}
        self._numbers: dict[int, list[int]] = {}  # of the blocks of a size
        self._asked: Counter[int] = Counter()  # how often there was no block of a size
        self._room = _MOST_BLOCKS
        self._turn = self._attempts = 0
        self._is_wanted = False
        self._lent: list[int] = []  # by the latest call: these blocks,
        self._missed: list[int] = []  # and none for results of these sizes
        self._common = 0  # what all ranks have declared

    def lend(self, lists: Sequence[Sequence[np.ndarray]], is_wanted: bool) -> list[list[np.ndarray] | None]:
        """As DataPlane.lend."""
        if lists:
            self._is_wanted = is_wanted
        free = self._common if self._common & _WANTED else 0
        self._lent, self._missed = [], []
        found: list[list[np.ndarray] | None] = []
        for arrays in lists:
            nbytes = _size_for(arrays)
            number = next((number for number in self._numbers.get(nbytes, ()) if free >> number & 1), None)
            if number is None:
                self._missed.append(nbytes)
                found.append(None)
            else:
                self._lent.append(number)
                free ^= 1 << number
                found.append(_laid_out(self._blocks[number].array, arrays))
        return found

    @property
    def is_asked(self) -> bool:
        """Whether `lend` was asked for something since `learn` was called, so that both it and `declare` are due."""
        return bool(self._lent or self._missed)

    def are_lent(self, targets: Sequence[np.ndarray]) -> bool:
        """Whether `targets`, all of which are lent or none is, are what `lend` has given."""
        base = targets[0].base
        numbers = self._numbers.get(base.nbytes) if isinstance(base, np.ndarray) else None
        return numbers is not None and any(self._blocks[number].array is base for number in numbers)

    def declare(self) -> None:
        """Tell what is free on this rank. To be followed by a counter that the others wait for."""
        mask = _WANTED if self._is_wanted else 0
        for number, block in self._blocks.items():
            if block.is_free:
                mask |= 1 << number
        self._tables[self._turn % 2][self._rows[self._memory.index]] = mask.to_bytes(_ROW_BYTES, "little")

    def learn(self) -> None:
        """Take in what all ranks have declared; where all want it, have memory soon for what there was none for.

        Collective within the host, after the wait for the counter that follows on `declare`.
        """
        table = self._tables[self._turn % 2]
        self._common = -1
        for row in self._rows:
            self._common &= int.from_bytes(table[row], "little")
        self._turn += 1
        # Not when it was lent: a rank may have prepared for what it has not executed.
        for number in self._lent:
            self._blocks[number].used_at = self._turn
        for nbytes in self._missed if self._common & _WANTED else ():
            self._asked[nbytes] += 1
            if self._asked[nbytes] >= _ASKED and len(self._blocks) < self._room:
                self._make(nbytes)
        self._lent, self._missed = [], []
        if self._turn % _KEPT_TURNS == 0:
            self._asked.clear()
            self._drop_unused()

    def close(self) -> None:
        """Make no more blocks. What is lent stays. May be called twice."""
        self._file.close()

    def _make(self, nbytes: int) -> None:
        made, rank = None, self._memory.ranks[self._memory.index]
        try:
            made = _Block(self._file.take(nbytes, (self._memory.index, len(self._memory.ranks))), self._turn)
        except OSError as error:
            logger.warning("Rank %d: %.1f MiB of memory cannot be shared with the other ranks of the host: %s. Each "
                           "rank copies its results instead, which is slower.", rank, nbytes / 2**20, error)
        self._attempts += 1
        self._memory.post(2 * self._attempts + (made is not None), MADE)
        self._memory.await_all(MADE, 2 * self._attempts)
        have_all = all(self._memory.counter_of(rank, MADE) % 2 for rank in self._memory.ranks)
        # Nobody goes on to the next attempt while others have yet to see how this one ended.
        self._memory.post(self._attempts, SEEN)
        self._memory.await_all(SEEN, self._attempts)
        if have_all and made is not None:
            number = next(number for number in range(_MOST_BLOCKS) if number not in self._blocks)
            self._blocks[number] = made
            self._numbers.setdefault(nbytes, []).append(number)
            self._common |= 1 << number
        else:
            self._room = 0
            if made is not None:
                made.memory.madvise(mmap.MADV_REMOVE)

    def _drop_unused(self) -> None:
        """Give back blocks that are free on all ranks, for nobody has come for them."""
        for number, block in list(self._blocks.items()):
            if self._common >> number & 1 and self._turn - block.used_at > _KEPT_TURNS:
                del self._blocks[number]
                self._numbers[block.array.nbytes].remove(number)
                self._common ^= 1 << number
                block.memory.madvise(mmap.MADV_REMOVE)


def _size_for(arrays: Sequence[np.ndarray]) -> int:
    return sum([rounded_up(array.nbytes) for array in arrays])


def _laid_out(memory: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays like `arrays`, one after the other in `memory`."""
    found, start = [], 0
    for array in arrays:
        found.append(memory[start:start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += rounded_up(array.nbytes)
    return found
