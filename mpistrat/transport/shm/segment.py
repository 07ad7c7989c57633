"""Shared memory of the ranks of one host, with counters by which the ranks wait for each other and vote.

Used by the engine's thread.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

from ...core.errors import EngineError, StallError
from ...core.interfaces import AgreementRound, Outcome, RankLeftError
from ...core.interruption import Interruption
from ...core.memory import rounded_up
from ...core.topology import Topology, describe_wait, likely_causes
from ...core.tuning import SHM_SLEEP_S, SHM_SPIN_LOOKS, SHM_YIELD_S

# The indices of the counters of a rank, each used by one class only.
PACKED, CONSUMED, READY, UNPACKED = range(4)  # TwoShotData: numbers of chunks
EVEN_VOTE, ODD_VOTE = 4, 5  # SharedMemoryAgreement
ASLEEP = 6  # ShmRing
VERDICT = 7  # HierarchicalAgreement
CHUNK_BYTES = 8  # TwoShotData: the bytes of a chunk, from the first rank of the host

_WORDS_PER_RANK = 16  # of 8 bytes, for counters: two cache lines, since processors prefetch pairs of lines
_ABANDONED = _WORDS_PER_RANK - 1  # the index of a counter with 0, _HAS_LEFT or _HAS_STALLED
_HAS_LEFT, _HAS_STALLED = 1, 2

# A vote is number * _NUMBER_UNIT | (_READY_BIT if its rank is ready) | (round & ROUND_MASK).
ROUND_MASK, _READY_BIT, _NUMBER_UNIT = 3, 4, 8


class HostMemory:
    """A block of memory that the ranks of a host share, with counters and data, all zero at first.

    `index`: This rank's position in `ranks`. A wait fails after `limit_s` seconds (0: never), or when `interruption`
    ends it. `topology`: The hosts of all ranks, for error texts; None: all ranks are on this host.
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
        """Return the bytes of a block for `count` ranks and `data_bytes` of data."""
        return rounded_up(count * _WORDS_PER_RANK * 8, mmap.PAGESIZE) + data_bytes

    def post(self, value: int, *counters: int) -> None:
        """Set `counters` of this rank to `value`, after all its earlier reads and writes (release)."""
        self._release()
        self._acquire()
        for counter in counters:
            self.words[self._first + counter] = value

    def await_all(self, value: int, counter: int) -> None:
        """Wait until `counter` of every rank is at least `value`. What they wrote before is then visible (acquire).

        Raises:
            StallError: A rank is late by more than the limit, or has abandoned the memory because it waited too long.
            EngineError: A rank has abandoned the memory for a different reason.
            RanksLostError: The wait is interrupted.
        """
        words = self.words
        for other in self._others:
            if words[other * _WORDS_PER_RANK + counter] < value:
                self._await(other, value, counter)
        self._release()
        self._acquire()

    def have_all(self, value: int, counter: int) -> bool:
        """Return whether `await_all` would return at once. Never waits. If true, acts as `await_all` (acquire)."""
        for other in self._others:
            if self.words[other * _WORDS_PER_RANK + counter] < value:
                return False
        self._release()
        self._acquire()
        return True

    def place(self, rank: int, counter: int) -> int:
        """Return where a counter of `rank` is in the array of all counters (`HostMemory.words`)."""
        return self._first_of[rank] + counter

    def counter_of(self, rank: int, counter: int) -> int:
        """Return the value of a counter of `rank`, as this rank sees it now."""
        return self.words[self._first_of[rank] + counter]

    def abandon(self, is_stalled: bool = False) -> None:
        """Make the waits of all other ranks for this rank fail, from now on. Only the first call has an effect.

        `is_stalled`: This rank abandons the memory because it has waited too long for others.
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
        """Return the error for waits for a rank that has abandoned the memory. `other`: Its position in `ranks`."""
        left = f"rank {self._topology.job_ranks[self.ranks[other]]} has left in the middle of a collective"
        if self.words[other * _WORDS_PER_RANK + _ABANDONED] == _HAS_LEFT:
            return RankLeftError(f"{left}.")
        return StallError(f"{left}, after it had waited too long for others. {likely_causes(self._topology)}")

    def fence(self) -> None:
        """Execute a full memory barrier: all earlier reads and writes of this thread come before all later ones."""
        self._release()
        self._acquire()


class SharedMemoryAgreement(AgreementRound):
    """Agreement rounds among the ranks of one host: each rank writes its vote to a counter that all ranks read.

    A vote is one 64-bit word: the number that the rank votes for, whether it is ready, and the round modulo 4. The word
    itself shows whether the vote is of this round. Therefore no counter has to be reset.

    Even and odd rounds have different counters. A rank votes in round n+2 only when all ranks have voted in round n+1,
    and so have read the votes of round n. Therefore all ranks read the same votes, and derive the same outcome.

    The counters are EVEN_VOTE and ODD_VOTE of `memory`. `wake_rank` wakes another rank of the host if it sleeps.
    """

    def __init__(self, memory: HostMemory, wake_rank: Callable[[int], None]):
        self._memory, self._wake_rank = memory, wake_rank
        self._rank = memory.ranks[memory.index]
        self._others = [rank for rank in memory.ranks if rank != self._rank]
        self._ranks_to_wake = self._others  # the ranks to wake after this rank's vote
        self._asleep_at = {rank: memory.place(rank, ASLEEP) for rank in self._others}
        self._votes_at = {counter: [memory.place(rank, counter) for rank in self._others]
                          for counter in (EVEN_VOTE, ODD_VOTE)}
        self._round, self._counter, self._vote = 1, ODD_VOTE, 0
        self.has_voted = False  # in this round

    def vote(self, number: int, is_ready: bool = False) -> None:
        self._counter = ODD_VOTE if self._round % 2 else EVEN_VOTE
        self._vote = number * _NUMBER_UNIT | (_READY_BIT if is_ready else 0) | (self._round & ROUND_MASK)
        self._memory.post(self._vote, self._counter)
        self.has_voted = True
        self._wake_all(self._ranks_to_wake)

    def _wake_all(self, ranks: list[int]) -> None:
        # A rank posts ASLEEP, then checks the votes, then sleeps. So it sees the vote, or this rank sees ASLEEP.
        self._memory.fence()
        for rank in ranks:
            if self._memory.words[self._asleep_at[rank]]:
                self._wake_rank(rank)

    def outcome(self) -> Outcome | None:
        votes = self._host_outcome() if self.has_voted else None
        if votes is None:
            return None
        self._round, self.has_voted = self._round + 1, False
        return votes[1]

    def has_news(self) -> bool:
        return self.has_voted and self._host_has_voted()

    def missing(self) -> list[int]:
        return [rank for rank in self._memory.ranks
                if (self._memory.counter_of(rank, self._counter) ^ self._round) & ROUND_MASK]

    def _host_has_voted(self) -> bool:
        for place in self._votes_at[self._counter]:  # all() of a generator takes ten times as long.
            if (self._memory.words[place] ^ self._round) & ROUND_MASK:
                return False
        return True

    def _host_outcome(self) -> tuple[int, Outcome] | None:
        """Return (number, outcome); (0, REFUSED) if the host's ranks do not agree; None if one has not voted."""
        own = common = any_of = self._vote
        for place in self._votes_at[self._counter]:
            vote = self._memory.words[place]
            if (vote ^ own) & ROUND_MASK:
                return None
            common &= vote
            any_of |= vote
        self._memory.fence()
        if own < _NUMBER_UNIT or (common ^ any_of) >= _NUMBER_UNIT:
            return 0, Outcome.REFUSED
        return own // _NUMBER_UNIT, Outcome.ALL_READY if common & _READY_BIT else Outcome.AGREED
