"""Counters in memory that the ranks of one host share, by which they wait for each other."""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

from ...core.errors import EngineError, StallError
from ...core.memory import rounded_up
from ...core.stalls import describe_wait, likely_causes
from ...core.topology import Topology

# The counters of a rank, each used by one class only.
PACKED, CONSUMED, READY, UNPACKED = range(4)  # chunks; SharedMemoryData
EVEN_VOTE, ODD_VOTE = 4, 5  # SharedMemoryAgreement
ASLEEP = 6  # ShmRing
VERDICT = 7  # HierarchicalAgreement

_LINE = 16  # eight-byte words of counters per rank: two cache lines, for processors fetch pairs of them
_ABANDONED = _LINE - 1
_HAS_LEFT, _HAS_STALLED = 1, 2  # what is there then
_SPINS = 50
# How long a rank that waits stays awake. All ranks have come to the collective by then, and one that is late copies its
# chunk; a sleep takes 150 us at least (102 MB on 2 ranks: 72 ms with 0.1 ms of it, 39 with 1 ms, 39 with 3 ms).
_YIELD_S = 1e-3
_SLEEP_S = 100e-6


class Regions:
    """Named parts of a block of memory, one after the other.

    Args:
        sizes: The bytes of each.

    Attributes:
        start_of: The offset of each in the block.
        nbytes: The bytes of all.
    """

    def __init__(self, **sizes: int):
        self.start_of = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
        self.nbytes = sum(sizes.values())


class HostMemory:
    """A block of zeroed memory that the ranks of a host share.

    Args:
        memory: The block.
        index: This rank's position among the ranks of the host.
        ranks: The ranks of the host.
        limit_s: How long a wait for another rank may take; 0: for ever.
        topology: Where all ranks are; None: there are no others than these.
    """

    def __init__(self, memory: mmap.mmap, index: int, ranks: Sequence[int], limit_s: float = 0.0,
                 topology: Topology | None = None):
        self.index, self.ranks = index, tuple(ranks)
        self._limit_s = limit_s
        self._topology = topology or Topology(ranks[index], ("",) * (max(ranks) + 1))
        header = self.size_for(len(ranks), 0)
        view = memoryview(memory)
        self._words = view[:header].cast("Q")
        self._mine = index * _LINE
        self._line_of = {rank: i * _LINE for i, rank in enumerate(ranks)}
        self.data = view[header:]
        self._others = [i for i in range(len(ranks)) if i != index]
        fence = threading.Lock()
        fence.acquire()
        # A release of a lock followed by its acquisition is what Python has for a full memory barrier. It takes 0.1 us.
        # Methods that are called for each small all-reduce have it in their own lines: a call takes longer than that.
        self._release, self._acquire = fence.release, fence.acquire

    @staticmethod
    def size_for(count: int, data_bytes: int) -> int:
        """Bytes to ask for when `count` ranks shall have `data_bytes` of data."""
        return rounded_up(count * _LINE * 8, mmap.PAGESIZE) + data_bytes

    def post(self, value: int, *counters: int) -> None:
        """Set some of this rank's counters (0 to 14), after all that this rank has read and written before."""
        self._release()
        self._acquire()
        for counter in counters:
            self._words[self._mine + counter] = value

    def await_all(self, counter: int, value: int) -> None:
        """Return when that counter of every rank is at least `value`; what they wrote before can then be read.

        Raises:
            StallError: A rank has not come within the limit, or has abandoned the memory since another has not.
            EngineError: A rank has abandoned the memory.
        """
        words = self._words
        for other in self._others:
            if words[other * _LINE + counter] < value:
                self._await(other, counter, value)
        self._release()
        self._acquire()

    def have_all(self, counter: int, value: int) -> bool:
        """Whether `await_all` would return at once; if so, it has."""
        for other in self._others:
            if self._words[other * _LINE + counter] < value:
                return False
        self._release()
        self._acquire()
        return True

    def counter_of(self, rank: int, counter: int) -> int:
        """The value of a counter of `rank`, as far as this rank can see it."""
        return self._words[self._line_of[rank] + counter]

    def abandon(self, is_stalled: bool = False) -> None:
        """Tell ranks that wait for this one, now or later, that it will not come. The first call counts.

        Args:
            is_stalled: Because it has itself waited too long for others.
        """
        self._acquire(False)  # If Ctrl-C came between the two halves of a fence; the engine fails then.
        if not self._words[self._mine + _ABANDONED]:
            self._words[self._mine + _ABANDONED] = _HAS_STALLED if is_stalled else _HAS_LEFT

    def _await(self, other: int, counter: int, value: int) -> None:
        words, place = self._words, other * _LINE + counter
        for _ in range(_SPINS):
            if words[place] >= value:
                return
        began = time.monotonic()
        while words[place] < value:
            waited_s = time.monotonic() - began
            if words[other * _LINE + _ABANDONED]:
                raise self._error_of(other)
            if 0 < self._limit_s < waited_s:
                raise StallError(describe_wait(self._topology, [self.ranks[other]], waited_s))
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)

    def _error_of(self, other: int) -> EngineError:
        """What to raise when a rank has abandoned the memory."""
        left = f"rank {self.ranks[other]} has left in the middle of a collective"
        if self._words[other * _LINE + _ABANDONED] == _HAS_LEFT:
            return EngineError(f"{left}.")
        return StallError(f"{left}, after it had waited too long for others. {likely_causes(self._topology)}")

    def fence(self) -> None:
        """All that this thread has read and written before comes before all that it reads and writes after."""
        self._release()
        self._acquire()
