"""Votes of the ranks of one host, in their shared memory."""

from collections.abc import Callable

from ...core.interfaces import Outcome
from .segment import EVEN_VOTE, ODD_VOTE, HostMemory

# The bits of a vote: which round it is of, whether its rank is ready, and the number.
TAG, _READY, _NUMBER = 3, 4, 8


class SharedMemoryAgreement:
    """One rank's part in the rounds of collectives.base.AgreementRound.

    A vote says of which round it is. It stays readable until its rank votes again but one, and a rank votes again only
    when all have voted. So all ranks read the same votes, and come to the same outcome.

    Args:
        memory: Its counters EVEN_VOTE and ODD_VOTE are used.
        wake_rank: Makes another rank look, if it sleeps.
    """

    def __init__(self, memory: HostMemory, wake_rank: Callable[[int], None]):
        self._memory, self._wake_rank = memory, wake_rank
        self._rank = memory.ranks[memory.index]
        self._others = [rank for rank in memory.ranks if rank != self._rank]
        self._listeners = self._others  # who wants to know of this rank's vote
        self._round, self._counter, self._vote = 1, ODD_VOTE, 0
        self.has_voted = False  # see AgreementRound

    def cast(self, number: int, is_ready: bool = False) -> None:
        """See AgreementRound."""
        self._vote = number * _NUMBER | (self._round & TAG) | (_READY if is_ready else 0)
        self._memory.post(self._vote, self._counter)
        self.has_voted = True
        self._rouse_all(self._listeners)

    def _rouse_all(self, ranks: list[int]) -> None:
        # A rank that goes to sleep says so, and then looks again; so one of the two sees what the other has written.
        self._memory.fence()
        for rank in ranks:
            self._wake_rank(rank)

    def outcome(self) -> Outcome | None:
        """See AgreementRound."""
        votes = self._of_host() if self.has_voted else None
        if votes is None:
            return None
        self._next_round()
        return votes[1]

    def has_news(self) -> bool:
        """See AgreementRound."""
        return self.has_voted and self._all_here_have_voted()

    def missing(self) -> list[int]:
        """See AgreementRound."""
        return [rank for rank in self._memory.ranks
                if (self._memory.counter_of(rank, self._counter) ^ self._round) & TAG]

    def close(self) -> None:
        """Nothing is held."""

    def _all_here_have_voted(self) -> bool:
        for other in self._others:  # noqa: SIM110 - all() of a generator takes ten times as long
            if (self._memory.counter_of(other, self._counter) ^ self._round) & TAG:
                return False
        return True

    def _of_host(self) -> tuple[int, Outcome] | None:
        """What all ranks of the host have voted for, 0 if they differ; None if they have not all voted."""
        mine = in_all = in_any = self._vote
        for other in self._others:
            vote = self._memory.counter_of(other, self._counter)
            if (vote ^ mine) & TAG:
                return None
            in_all &= vote
            in_any |= vote
        self._memory.fence()
        if mine < _NUMBER or (in_all ^ in_any) >= _NUMBER:
            return 0, Outcome.REFUSED
        return mine // _NUMBER, Outcome.ALL_READY if in_all & _READY else Outcome.AGREED

    def _next_round(self) -> None:
        self._round, self.has_voted = self._round + 1, False
        self._counter = ODD_VOTE if self._round % 2 else EVEN_VOTE
