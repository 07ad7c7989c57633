"""Votes of the ranks of several hosts: within a host in shared memory, between hosts over MPI."""

from collections.abc import Callable, Sequence

from ...core.interfaces import Outcome
from ..shm.agreement import TAG, SharedMemoryAgreement
from ..shm.segment import VERDICT, HostMemory
from .leader_exchange import LeaderExchange

_OUTCOME = 4  # the place of the outcome in a verdict, above the round's tag


class HierarchicalAgreement(SharedMemoryAgreement):
    """One rank's part in the rounds of collectives.base.AgreementRound.

    The first rank of each host waits for the votes of its host, and puts what they come to together with what the
    other hosts have come to. The outcome it writes into its host's shared memory.

    Args:
        memory: Of the ranks of this host. Its counters EVEN_VOTE, ODD_VOTE and VERDICT are used.
        wake_rank: Makes another rank of this host look, if it sleeps.
        hosts: As leader_exchange gives it. Closed by `close`.
        elsewhere: The ranks of the other hosts.
    """

    def __init__(self, memory: HostMemory, wake_rank: Callable[[int], None], hosts: LeaderExchange | None,
                 elsewhere: Sequence[int]):
        super().__init__(memory, wake_rank)
        self._elsewhere = list(elsewhere)
        self._hosts, self._leader = hosts, memory.ranks[0]
        self._listeners = [] if hosts is not None else [self._leader]

    def outcome(self) -> Outcome | None:
        """See AgreementRound."""
        if not self.has_voted:
            return None
        result = self._heard() if self._hosts is None else self._between_hosts(self._hosts)
        if result is not None:
            self._next_round()
        return result

    def _between_hosts(self, hosts: LeaderExchange) -> Outcome | None:
        if not hosts.is_under_way:
            votes = self._of_host()
            if votes is None:
                return None
            hosts.begin(*votes)
        result = hosts.poll()
        if result is None:
            return None
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
        """See AgreementRound."""
        if not self.has_voted:
            return False
        if self._hosts is None:
            return self._heard() is not None
        return self._hosts.has_news() if self._hosts.is_under_way else self._all_here_have_voted()

    def missing(self) -> list[int]:
        """See AgreementRound."""
        return super().missing() or self._elsewhere

    def close(self) -> None:
        """Release the communicator. No round is under way."""
        if self._hosts is not None:
            self._hosts.close()
