"""Votes of the ranks of one host, in their shared memory."""

from collections.abc import Callable

from .host_memory import HostMemory

# Counters of HostMemory; SharedMemoryData has the lower ones, and SharedMail another.
_ROUND, _VOTE = 4, 5  # the latest round in which a rank has voted, and what for: 5 in odd rounds, 6 in even ones


class SharedBallot:
    """One rank's part in the rounds of collectives.base.Ballot.

    A vote stays readable until its rank votes again but one, and a rank votes again only when all have voted. So all
    ranks read the same votes, and come to the same outcome.

    Args:
        memory: Nobody else uses its counters 4 to 6.
        rouse: Makes another rank look, if it sleeps.
    """

    def __init__(self, memory: HostMemory, rouse: Callable[[int], None]):
        self._memory, self._rouse = memory, rouse
        self._rank = memory.ranks[memory.index]
        self._others = [rank for rank in memory.ranks if rank != self._rank]
        self._round, self._has_voted = 1, False

    def cast(self, number: int) -> None:
        """See Ballot."""
        self._memory.post(_VOTE + self._round % 2, number)
        self._memory.post(_ROUND, self._round)
        self._has_voted = True
        # A rank that goes to sleep says so, and then looks again; so one of the two sees what the other has written.
        self._memory.fence()
        for other in self._others:
            self._rouse(other)

    def outcome(self) -> bool | None:
        """See Ballot."""
        if not self._has_voted or not self._all_others_have():
            return None
        self._memory.fence()
        place = _VOTE + self._round % 2
        votes = {self._memory.counter_of(rank, place) for rank in self._memory.ranks}
        self._round, self._has_voted = self._round + 1, False
        return len(votes) == 1 and 0 not in votes

    @property
    def has_voted(self) -> bool:
        """See Ballot."""
        return self._has_voted

    @property
    def is_awaited(self) -> bool:
        """See Ballot."""
        if not self._has_voted:
            for other in self._others:
                if self._memory.counter_of(other, _ROUND) >= self._round:
                    return True
        return False

    def has_news(self) -> bool:
        """Whether this rank is awaited, or the round can be ended."""
        return self._all_others_have() if self._has_voted else self.is_awaited

    def missing(self) -> list[int]:
        """See Ballot."""
        return [rank for rank in self._memory.ranks if self._memory.counter_of(rank, _ROUND) < self._round]

    def _all_others_have(self) -> bool:
        for other in self._others:  # noqa: SIM110 - any() of a generator takes several times as long
            if self._memory.counter_of(other, _ROUND) < self._round:
                return False
        return True
