"""Votes of the ranks of several hosts: within a host in shared memory, between hosts over MPI."""

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from .base import Outcome
from .host_memory import VERDICT, HostMemory
from .shared_ballot import TAG, SharedBallot

_OUTCOME = 4  # the place of the outcome in a verdict, above the round's tag


class HostsBallot(SharedBallot):
    """One rank's part in the rounds of collectives.base.Ballot.

    The first rank of each host waits for the votes of its host, and all-reduces what they come to with those of the
    other hosts: their minimum and that of their negatives, which tell together whether all are equal. So a round takes
    as many messages one after the other as an all-reduce among the hosts. What comes out it writes into its host's
    shared memory.

    Args:
        memory: Of the ranks of this host. Its counters EVEN_VOTE, ODD_VOTE and VERDICT are used.
        rouse: Makes another rank of this host look, if it sleeps.
        hosts: As hierarchical.counterparts gives it, of which those of the first ranks serve; nobody else uses it.
        elsewhere: The ranks of the other hosts.
    """

    def __init__(self, memory: HostMemory, rouse: Callable[[int], None], hosts: MPI.Comm, elsewhere: Sequence[int]):
        super().__init__(memory, rouse)
        self._elsewhere = list(elsewhere)
        self._hosts, self._leader = hosts, memory.ranks[0]
        self._leads = self._rank == self._leader
        self._listeners = [] if self._leads else [self._leader]
        self._under_way: MPI.Request | None = None
        self._sent, self._least = np.zeros(3, np.int64), np.zeros(3, np.int64)

    def outcome(self) -> Outcome | None:
        """See Ballot."""
        if not self.has_voted:
            return None
        result = self._between_hosts() if self._leads else self._heard()
        if result is not None:
            self._next_round()
        return result

    def _between_hosts(self) -> Outcome | None:
        if self._under_way is None:
            votes = self._of_host()
            if votes is None:
                return None
            number, of_host = votes
            self._sent[:] = number, -number, of_host
            self._under_way = self._hosts.Iallreduce(self._sent, self._least, MPI.MIN)
        if not self._under_way.Test():
            return None
        self._under_way = None
        number, minus_number, least = self._least.tolist()
        result = Outcome(least) if number == -minus_number else Outcome.REFUSED
        self._memory.post(result * _OUTCOME | (self._round & TAG), VERDICT)
        self._rouse_all(self._others)
        return result

    def _heard(self) -> Outcome | None:
        verdict = self._memory.counter_of(self._leader, VERDICT)
        if (verdict ^ self._round) & TAG:
            return None
        self._memory.fence()
        return Outcome(verdict // _OUTCOME)

    def has_news(self) -> bool:
        """See Ballot."""
        if not self.has_voted:
            return False
        if not self._leads:
            return self._heard() is not None
        if self._under_way is None:
            return self._all_here_have_voted()
        return self._under_way.Test()

    def missing(self) -> list[int]:
        """See Ballot."""
        return super().missing() or self._elsewhere

    def close(self) -> None:
        """Release the communicator. No round is under way."""
        if self._hosts != MPI.COMM_NULL:
            self._hosts.Free()
