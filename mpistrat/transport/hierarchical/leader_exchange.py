"""How the first ranks of the hosts put the votes of their hosts together, over MPI."""

from typing import Protocol

import numpy as np
from mpi4py import MPI

from ...core.interfaces import Outcome
from ...core.memory import aligned_empty
from ...core.topology import Topology
from .piggyback import MOST_HOSTS, Piggyback

# A message begins with a vote, behind which data are aligned.
_HEAD_BYTES, _VOTE_AT = 64, 40
# MPI sends messages of a certain size at once, and asks the receiver before larger ones, which takes another round
# trip. Over TCP that is 64 KiB in Open MPI, its own header among it.
_PIECE_BYTES = 48 * 1024


class LeaderExchange(Protocol):
    """One round after the other among hosts. Used by the first rank of each host."""

    is_under_way: bool

    def begin(self, number: int, outcome: Outcome) -> None:
        """Say what the ranks of this host have voted for, and with which outcome."""

    def has_news(self) -> bool:
        """Whether `poll` gets further."""

    def poll(self) -> Outcome | None:
        """The outcome over all hosts, once all have said theirs; None before."""

    def close(self) -> None:
        """Release the communicator. No round is under way."""


def leader_exchange(comm: MPI.Comm, topology: Topology, piggyback: Piggyback | None) -> LeaderExchange | None:
    """This rank's part in the votes among hosts; None if it is not the first of its host. Collective over `comm`.

    Args:
        comm: Of all ranks.
        topology: Where they are.
        piggyback: What goes with the votes of this rank's host; None, on all ranks: nothing does.
    """
    leads = topology.local_rank == 0
    hosts = comm.Split(0 if leads else MPI.UNDEFINED, topology.hosts.index(topology.host))
    if not leads:
        return None
    if piggyback is not None or len(topology.local_sizes) <= MOST_HOSTS:
        return DirectExchange(hosts, piggyback)
    return ReducedExchange(hosts)


class DirectExchange:
    """Among a few hosts: each sends all others its vote, and right behind it its data, if all its ranks are ready.

    Args:
        hosts: One rank of each host; nobody else uses it.
        piggyback: As for leader_exchange.
    """

    def __init__(self, hosts: MPI.Comm, piggyback: Piggyback | None):
        self._hosts, self._host, self._piggyback = hosts, hosts.Get_rank(), piggyback
        self._others = [h for h in range(hosts.Get_size()) if h != self._host]
        nbytes = _HEAD_BYTES + (piggyback.slot_bytes if piggyback is not None else 0)
        self._messages = [aligned_empty(nbytes) for _ in range(hosts.Get_size())]
        self._first = min(nbytes, _PIECE_BYTES)
        self._sending: list[MPI.Request] = []
        self._receiving: list[MPI.Request] = []
        self._have_votes = False
        self.is_under_way = False

    def begin(self, number: int, outcome: Outcome) -> None:
        """See LeaderExchange."""
        message, end = self._messages[self._host], _HEAD_BYTES
        if self._piggyback is not None and outcome is Outcome.ALL_READY:
            end += self._piggyback.reduce_host(message[_HEAD_BYTES:])
        _vote_in(message)[:] = number, outcome, end
        self._receiving = [self._hosts.Irecv([self._messages[h][_VOTE_AT:self._first], MPI.BYTE], h)
                           for h in self._others]
        pieces = [message[_VOTE_AT:min(end, self._first)], *self._more(message, end)]
        self._sending = [self._hosts.Isend([piece, MPI.BYTE], h) for piece in pieces for h in self._others]
        self._have_votes, self.is_under_way = False, True

    def _more(self, message: np.ndarray, end: int) -> list[np.ndarray]:
        """What of a message does not go in the first piece of it."""
        return [message[start:min(start + _PIECE_BYTES, end)] for start in range(self._first, end, _PIECE_BYTES)]

    def has_news(self) -> bool:
        """See LeaderExchange."""
        return MPI.Request.Testall(self._receiving)

    def poll(self) -> Outcome | None:
        """See LeaderExchange."""
        if not MPI.Request.Testall(self._receiving):
            return None
        votes = [_vote_in(message).tolist() for message in self._messages]
        if not self._have_votes:
            self._have_votes = True
            # It was sent before anybody knew the outcome, and must be received whatever that is.
            self._receiving = [self._hosts.Irecv([piece, MPI.BYTE], h) for h in self._others
                               for piece in self._more(self._messages[h], votes[h][2])]
            if not MPI.Request.Testall(self._receiving):
                return None
        # Once there is an outcome this rank may not ask MPI for a while, and others wait for what it still has to send.
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

    def close(self) -> None:
        """See LeaderExchange."""
        self._hosts.Free()


def _vote_in(message: np.ndarray) -> np.ndarray:
    """The number, the outcome, and where the message ends."""
    return message[_VOTE_AT:_HEAD_BYTES].view(np.int64)


class ReducedExchange:
    """Among many hosts: an all-reduce of the votes, their minimum and that of their negatives. Nothing goes with it."""

    def __init__(self, hosts: MPI.Comm):
        self._hosts = hosts
        self._sent, self._least = np.zeros(3, np.int64), np.zeros(3, np.int64)
        self._request = MPI.REQUEST_NULL
        self.is_under_way = False

    def begin(self, number: int, outcome: Outcome) -> None:
        """See LeaderExchange."""
        self._sent[:] = number, -number, outcome
        self._request = self._hosts.Iallreduce(self._sent, self._least, MPI.MIN)
        self.is_under_way = True

    def has_news(self) -> bool:
        """See LeaderExchange."""
        return self._request.Test()

    def poll(self) -> Outcome | None:
        """See LeaderExchange."""
        if not self._request.Test():
            return None
        self.is_under_way = False
        number, minus_number, least = self._least.tolist()
        return Outcome(least) if number == -minus_number else Outcome.REFUSED

    def close(self) -> None:
        """See LeaderExchange."""
        self._hosts.Free()
