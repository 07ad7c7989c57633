"""Exchange of the hosts' votes over MPI, by the first rank of each host (the leader).

A few hosts send their votes to each other directly, followed by the data of small all-reduces (piggyback). Many hosts
all-reduce the votes, without data. Used by the engine's thread.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from mpi4py import MPI

from ...core.interfaces import Outcome
from ...core.memory import aligned_empty
from ...core.topology import Topology
from ...core.tuning import EAGER_MESSAGE_BYTES, PIGGYBACK_MOST_HOSTS
from .piggyback import Piggyback

# A message begins with a vote. The data behind it are aligned.
_HEAD_BYTES, _VOTE_AT = 64, 40


class LeaderExchange(ABC):
    """Rounds of votes among hosts, one after the other. The first rank of each host uses it.

    Args:
        hosts: The communicator of the leaders, reserved for this object. `close` frees it.
    """

    def __init__(self, hosts: MPI.Comm):
        self._hosts = hosts
        self._sending: list[MPI.Request] = []
        self._receiving: list[MPI.Request] = []
        self.is_under_way = False  # Whether a round has begun, and `poll` has not returned its outcome

    @abstractmethod
    def begin(self, number: int, outcome: Outcome) -> None:
        """Start to send the number for which this host has voted, and its outcome."""

    def has_news(self) -> bool:
        """Whether messages have arrived, so that `poll` should be called."""
        return MPI.Request.Testall(self._receiving)

    @abstractmethod
    def poll(self) -> Outcome | None:
        """Return the outcome over all hosts, or None if votes are still missing. Does not wait."""

    def revoke(self) -> list[Any]:
        """See DataPlane."""
        return [self._hosts, *self._sending, *self._receiving]

    def close(self) -> None:
        """Free the communicator. No round may be in flight."""
        self._hosts.Free()


def leader_exchange(comm: MPI.Comm, topology: Topology, piggyback: Piggyback | None) -> LeaderExchange | None:
    """Return the exchange object of this rank, or None on ranks that are not the first of their host.

    Collective over `comm`. `piggyback`: Has the data to send with votes; None (on all ranks) sends votes alone.
    """
    is_leader = topology.local_rank == 0
    hosts = comm.Split(0 if is_leader else MPI.UNDEFINED, topology.hosts.index(topology.host))
    if not is_leader:
        return None
    if piggyback is not None or len(topology.local_sizes) <= PIGGYBACK_MOST_HOSTS:
        return DirectExchange(hosts, piggyback)
    return ReducedExchange(hosts)


class DirectExchange(LeaderExchange):
    """The exchange of few hosts. Each host sends its vote to all others, then its data if all its ranks are ready."""

    def __init__(self, hosts: MPI.Comm, piggyback: Piggyback | None):
        super().__init__(hosts)
        self._host, self._piggyback = hosts.Get_rank(), piggyback
        self._others = [h for h in range(hosts.Get_size()) if h != self._host]
        nbytes = _HEAD_BYTES + (piggyback.slot_bytes if piggyback is not None else 0)
        self._messages = [aligned_empty(nbytes) for _ in range(hosts.Get_size())]
        self._first = min(nbytes, EAGER_MESSAGE_BYTES)
        self._have_votes = False

    def begin(self, number: int, outcome: Outcome) -> None:
        message, end = self._messages[self._host], _HEAD_BYTES
        if self._piggyback is not None and outcome is Outcome.ALL_READY:
            end += self._piggyback.reduce_host(message[_HEAD_BYTES:])
        _vote_in(message)[:] = number, outcome, end
        self._receiving = [self._hosts.Irecv([self._messages[h][_VOTE_AT:self._first], MPI.BYTE], h)
                           for h in self._others]
        pieces = [message[_VOTE_AT:min(end, self._first)], *self._further_pieces(message, end)]
        self._sending = [self._hosts.Isend([piece, MPI.BYTE], h) for piece in pieces for h in self._others]
        self._have_votes, self.is_under_way = False, True

    def _further_pieces(self, message: np.ndarray, end: int) -> list[np.ndarray]:
        """The pieces of a message of `end` bytes, without the first piece."""
        return [message[start:min(start + EAGER_MESSAGE_BYTES, end)]
                for start in range(self._first, end, EAGER_MESSAGE_BYTES)]

    def poll(self) -> Outcome | None:
        if not self.has_news():
            return None
        votes = [_vote_in(message).tolist() for message in self._messages]
        if not self._have_votes:
            self._have_votes = True
            # The data were sent before the outcome was known, and must be received whatever the outcome is.
            self._receiving = [self._hosts.Irecv([piece, MPI.BYTE], h) for h in self._others
                               for piece in self._further_pieces(self._messages[h], votes[h][2])]
            if not self.has_news():
                return None
        # After the outcome this rank may make no MPI call for a while, but MPI needs calls to finish sending.
        if not MPI.Request.Testall(self._sending):
            return None
        self.is_under_way = False
        number, least, end = votes[self._host][0], min(vote[1] for vote in votes), votes[self._host][2]
        outcome = Outcome(least) if all(vote[0] == number for vote in votes) else Outcome.REFUSED
        if self._piggyback is not None:
            if outcome is Outcome.ALL_READY:
                self._piggyback.reduce_hosts([message[_HEAD_BYTES:end] for message in self._messages])
            self._piggyback.forget()
        return outcome


def _vote_in(message: np.ndarray) -> np.ndarray:
    """The vote in a message: the number, the outcome, and the bytes of the message."""
    return message[_VOTE_AT:_HEAD_BYTES].view(np.int64)


class ReducedExchange(LeaderExchange):
    """The exchange of many hosts: an all-reduce (minimum) of the votes and of the negated votes, without data."""

    def __init__(self, hosts: MPI.Comm):
        super().__init__(hosts)
        self._sent, self._least = np.zeros(3, np.int64), np.zeros(3, np.int64)

    def begin(self, number: int, outcome: Outcome) -> None:
        self._sent[:] = number, -number, outcome
        self._receiving = [self._hosts.Iallreduce(self._sent, self._least, MPI.MIN)]
        self.is_under_way = True

    def poll(self) -> Outcome | None:
        if not self.has_news():
            return None
        self.is_under_way = False
        number, minus_number, least = self._least.tolist()
        return Outcome(least) if number == -minus_number else Outcome.REFUSED
