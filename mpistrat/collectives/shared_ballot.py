"""Votes of the ranks of one host, in their shared memory."""

from collections.abc import Callable

from .base import Outcome
from .host_memory import EVEN_VOTE, ODD_VOTE, HostMemory

# The bits of a vote: which round it is of, whether its rank is ready, and the number.
_TAG, _READY, _NUMBER = 3, 4, 8


class SharedBallot:
    """One rank's part in the rounds of collectives.base.Ballot.

    A vote says of which round it is. It stays readable until its rank votes again but one, and a rank votes again only
    when all have voted. So all ranks read the same votes, and come to the same outcome.

    Args:
        memory: Its counters EVEN_VOTE and ODD_VOTE are used.
        rouse: Makes another rank look, if it sleeps.
    """

    def __init__(self, memory: HostMemory, rouse: Callable[[int], None]):
        self._memory, self._rouse = memory, rouse
        self._rank = memory.ranks[memory.index]
        self._others = [rank for rank in memory.ranks if rank != self._rank]
        self._round, self._counter, self._vote = 1, ODD_VOTE, 0
        self.has_voted = False  # see Ballot

    def cast(self, number: int, is_ready: bool = False) -> None:
        """See Ballot."""
        self._vote = number * _NUMBER | (self._round & _TAG) | (_READY if is_ready else 0)
        self._memory.post(self._vote, self._counter)
        self.has_voted = True
        # A rank that goes to sleep says so, and then looks again; so one of the two sees what the other has written.
        self._memory.fence()
        for other in self._others:
            self._rouse(other)

    def outcome(self) -> Outcome | None:
        """See Ballot."""
        if not self.has_voted:
            return None
        mine = in_all = in_any = self._vote
        for other in self._others:
            vote = self._memory.counter_of(other, self._counter)
            if (vote ^ mine) & _TAG:
                return None
            in_all &= vote
            in_any |= vote
        self._memory.fence()
        self._round, self.has_voted = self._round + 1, False
        self._counter = ODD_VOTE if self._round % 2 else EVEN_VOTE
        if mine < _NUMBER or (in_all ^ in_any) >= _NUMBER:
            return Outcome.REFUSED
        return Outcome.ALL_READY if in_all & _READY else Outcome.AGREED

    @property
    def is_awaited(self) -> bool:
        """See Ballot."""
        return not self.has_voted and self.has_news()

    def has_news(self) -> bool:
        """Whether this rank is awaited, or the round can be ended."""
        for other in self._others:
            if (self._memory.counter_of(other, self._counter) ^ self._round) & _TAG:
                if self.has_voted:
                    return False
            elif not self.has_voted:
                return True
        return self.has_voted

    def missing(self) -> list[int]:
        """See Ballot."""
        return [rank for rank in self._memory.ranks
                if (self._memory.counter_of(rank, self._counter) ^ self._round) & _TAG]
