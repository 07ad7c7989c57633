"""Agreement rounds among the ranks of one host: each rank writes its vote to a counter that all ranks read.

A vote is one 64-bit word: the number of the operation, whether the rank is ready, and the round modulo 4. The word
alone shows whether the vote is of this round, so no counter has to be reset. Used by the engine's thread
(negotiation/fast_path.py).
"""

from collections.abc import Callable

from ...core.interfaces import AgreementRound, Outcome
from .segment import ASLEEP, EVEN_VOTE, ODD_VOTE, HostMemory

# A vote is number * _NUMBER_UNIT | (_READY_BIT if its rank is ready) | (round & ROUND_MASK).
ROUND_MASK, _READY_BIT, _NUMBER_UNIT = 3, 4, 8


class SharedMemoryAgreement(AgreementRound):
    """One rank's part in the rounds.

    Votes are double-buffered. A counter is reused two rounds later, and round n + 1 starts only when round n is
    complete. So all ranks read the same votes, and derive the same outcome.

    It uses the counters EVEN_VOTE and ODD_VOTE of `memory`. `wake_rank` wakes another rank of the host if it sleeps.
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
        """(number, outcome) of the host's votes, with number 0 if they differ; None if a rank has not voted."""
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
