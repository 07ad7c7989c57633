"""Agreement rounds among several hosts: votes in shared memory within a host, over MPI between hosts.

The first rank of a host (the leader) waits for the votes of its host, exchanges the host's outcome with the other
leaders (leader_exchange), and writes the overall outcome to shared memory. Used by the engine's thread.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...core.interfaces import Outcome
from ..shm.agreement import ROUND_MASK, SharedMemoryAgreement
from ..shm.segment import VERDICT, HostMemory
from .leader_exchange import LeaderExchange

_OUTCOME_UNIT = ROUND_MASK + 1  # A verdict is outcome * _OUTCOME_UNIT | (round & ROUND_MASK).


class HierarchicalAgreement(SharedMemoryAgreement):
    """One rank's part in the rounds.

    Args:
        memory: The memory of this host, of which the counters EVEN_VOTE, ODD_VOTE and VERDICT are used.
        wake_rank: Wakes another rank of this host, if that rank sleeps.
        hosts: The result of leader_exchange. `close` closes it.
        elsewhere: The ranks of the other hosts.
    """

    def __init__(self, memory: HostMemory, wake_rank: Callable[[int], None], hosts: LeaderExchange | None,
                 elsewhere: Sequence[int]):
        super().__init__(memory, wake_rank)
        self._elsewhere = list(elsewhere)
        self._hosts, self._leader = hosts, memory.ranks[0]
        self._ranks_to_wake = [] if hosts is not None else [self._leader]

    def outcome(self) -> Outcome | None:
        if not self.has_voted:
            return None
        result = self._read_verdict() if self._hosts is None else self._between_hosts(self._hosts)
        if result is not None:
            self._round, self.has_voted = self._round + 1, False
        return result

    def _between_hosts(self, hosts: LeaderExchange) -> Outcome | None:
        if not hosts.is_under_way:
            votes = self._host_outcome()
            if votes is None:
                return None
            hosts.begin(*votes)
        result = hosts.poll()
        if result is None:
            return None
        self._memory.post(result * _OUTCOME_UNIT | (self._round & ROUND_MASK), VERDICT)
        self._wake_all(self._others)
        return result

    def _read_verdict(self) -> Outcome | None:
        verdict = self._memory.counter_of(self._leader, VERDICT)
        if (verdict ^ self._round) & ROUND_MASK:
            return None
        self._memory.fence()
        return Outcome(verdict // _OUTCOME_UNIT)

    def has_news(self) -> bool:
        if not self.has_voted:
            return False
        if self._hosts is None:
            return self._read_verdict() is not None
        return self._hosts.has_news() if self._hosts.is_under_way else self._host_has_voted()

    def missing(self) -> list[int]:
        return super().missing() or self._elsewhere

    def revoke(self) -> list[Any]:
        return [] if self._hosts is None else self._hosts.revoke()

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
