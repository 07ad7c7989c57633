"""Shared memory of the ranks of one host, with counters on which they wait for each other.

Used by the engine's thread.
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

from ...core.errors import EngineError, StallError
from ...core.interfaces import RankLeftError
from ...core.interruption import Interruption
from ...core.memory import rounded_up
from ...core.topology import Topology, describe_wait, likely_causes
from ...core.tuning import SHM_SLEEP_S, SHM_SPIN_LOOKS, SHM_YIELD_S

# The indices of the counters of a rank, each used by one class only.
PACKED, CONSUMED, READY, UNPACKED = range(4)  # numbers of chunks; SharedMemoryData
EVEN_VOTE, ODD_VOTE = 4, 5  # SharedMemoryAgreement
ASLEEP = 6  # ShmRing
VERDICT = 7  # HierarchicalAgreement
CHUNK_BYTES = 8  # of the first rank of the host; SharedMemoryData

_WORDS_PER_RANK = 16  # of 8 bytes, for counters: two cache lines, since processors prefetch pairs of lines
_ABANDONED = _WORDS_PER_RANK - 1  # index of a counter that is 0, or one of these
_HAS_LEFT, _HAS_STALLED = 1, 2


class Regions:
    """Named regions of a block of memory, one after the other. `sizes`: The bytes of each region."""

    def __init__(self, **sizes: int):
        # The offset of each region in the block.
        self.start_of = dict(zip(sizes, accumulate(sizes.values(), initial=0)))
        self.nbytes = sum(sizes.values())  # The bytes of all regions.


class HostMemory:
    """A block of zeroed memory that the ranks of a host share.

    Args:
        index: This rank's position among the ranks of the host.
        limit_s: Seconds after which a wait for another rank fails; 0: never.
        topology: The hosts of all ranks; None: all ranks are on this host.
        interruption: Interrupts waits; None: waits cannot be interrupted.
    """

    def __init__(self, memory: mmap.mmap, index: int, ranks: Sequence[int], limit_s: float = 0.0,
                 topology: Topology | None = None, interruption: Interruption | None = None):
        self.index, self.ranks = index, tuple(ranks)
        self._limit_s, self._interruption = limit_s, interruption or Interruption()
        self._topology = topology or Topology(ranks[index], ("",) * (max(ranks) + 1))
        header = self.size_for(len(ranks), 0)
        view = memoryview(memory)
        # The counters of all ranks; `place` says where. Small operations read them without a call.
        self.words = view[:header].cast("Q")
        self._first = index * _WORDS_PER_RANK
        self._first_of = {rank: i * _WORDS_PER_RANK for i, rank in enumerate(ranks)}
        self.data = view[header:]  # The memory behind the counters.
        self._others = [i for i in range(len(ranks)) if i != index]
        fence = threading.Lock()
        fence.acquire()
        # Releasing and acquiring a lock is the only full memory barrier in Python. It takes 0.1 us. Methods that every
        # small all-reduce calls have it inline instead of calling `fence`, since a call takes longer than that.
        self._release, self._acquire = fence.release, fence.acquire

    @staticmethod
    def size_for(count: int, data_bytes: int) -> int:
        """Bytes of a block for `count` ranks and `data_bytes` of data."""
        return rounded_up(count * _WORDS_PER_RANK * 8, mmap.PAGESIZE) + data_bytes

    def post(self, value: int, *counters: int) -> None:
        """Set `counters` (0 to 14) of this rank to `value`, after all its earlier reads and writes (release)."""
        self._release()
        self._acquire()
        for counter in counters:
            self.words[self._first + counter] = value

    def await_all(self, value: int, counter: int) -> None:
        """Wait until `counter` of every rank is at least `value`. Their earlier writes are then visible (acquire).

        Raises:
            StallError: A rank is late by more than the limit, or abandoned the memory because another rank was late.
            EngineError: A rank has abandoned the memory for another reason.
            RanksLostError: The wait is interrupted.
        """
        words = self.words
        for other in self._others:
            if words[other * _WORDS_PER_RANK + counter] < value:
                self._await(other, value, counter)
        self._release()
        self._acquire()

    def have_all(self, value: int, counter: int) -> bool:
        """Whether `await_all` would return at once. If true, also acts as `await_all` (acquire). Never waits."""
        for other in self._others:
            if self.words[other * _WORDS_PER_RANK + counter] < value:
                return False
        self._release()
        self._acquire()
        return True

    def place(self, rank: int, counter: int) -> int:
        """The index in `words` of a counter of `rank`."""
        return self._first_of[rank] + counter

    def counter_of(self, rank: int, counter: int) -> int:
        """The value of a counter of `rank` that is visible to this rank."""
        return self.words[self._first_of[rank] + counter]

    def abandon(self, is_stalled: bool = False) -> None:
        """Make waits of other ranks for this rank fail, now and later. Only the first call has an effect.

        `is_stalled`: This rank leaves because it has waited too long for others.
        """
        self._acquire(False)  # A Ctrl-C inside of a fence may have left the lock released.
        if not self.words[self._first + _ABANDONED]:
            self.words[self._first + _ABANDONED] = _HAS_STALLED if is_stalled else _HAS_LEFT

    def _await(self, other: int, value: int, counter: int) -> None:
        words, at = self.words, other * _WORDS_PER_RANK + counter
        for _ in range(SHM_SPIN_LOOKS):
            if words[at] >= value:
                return
        began = time.monotonic()
        while words[at] < value:
            waited_s = time.monotonic() - began
            self._interruption.check()
            if words[other * _WORDS_PER_RANK + _ABANDONED]:
                raise self._error_of(other)
            if 0 < self._limit_s < waited_s:
                raise StallError(describe_wait(self._topology, [self.ranks[other]], waited_s))
            if waited_s < SHM_YIELD_S:
                os.sched_yield()
            else:
                self._interruption.progress()
                time.sleep(SHM_SLEEP_S)

    def _error_of(self, other: int) -> EngineError:
        """The error to raise in a wait for a rank that has abandoned the memory."""
        left = f"rank {self._topology.job_ranks[self.ranks[other]]} has left in the middle of a collective"
        if self.words[other * _WORDS_PER_RANK + _ABANDONED] == _HAS_LEFT:
            return RankLeftError(f"{left}.")
        return StallError(f"{left}, after it had waited too long for others. {likely_causes(self._topology)}")

    def fence(self) -> None:
        """A full memory barrier: orders all earlier reads and writes of this thread before all later ones."""
        self._release()
        self._acquire()
