"""Agreement rounds among several hosts: votes in shared memory within a host, over MPI between hosts.

The first rank of a host (its leader) waits for the votes of its host, exchanges the host's outcome with the other
leaders, and writes the outcome of all hosts to shared memory. In a job of few hosts, the leaders send each other the
votes, followed by the data of small all-reduces (Piggyback), because the data then need no further round trip. The
leaders of many hosts all-reduce the votes, without data. Used by the engine's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import IDENTITY, Reduction, combine, pack, unpack
from ...core.interfaces import DataPlane, Outcome, Prepared
from ...core.memory import aligned_empty
from ...core.topology import Topology
from ...core.tuning import EAGER_MESSAGE_BYTES, PIGGYBACK_CROSS_BYTES, PIGGYBACK_HOST_BYTES, PIGGYBACK_MOST_HOSTS
from ..shm.segment import ROUND_MASK, VERDICT, HostMemory, SharedMemoryAgreement

_OUTCOME_UNIT = ROUND_MASK + 1  # A verdict is outcome * _OUTCOME_UNIT | (round & ROUND_MASK).
# A message between hosts begins with a vote. The data behind it are aligned.
_HEAD_BYTES, _VOTE_AT = 64, 40


# -- small all-reduces, sent together with votes -----------------------------------------------------------------------


class PiggybackedReduce(Prepared):
    """An all-reduce whose data are sent together with the next vote. See Piggyback."""

    __slots__ = ("part", "result")

    part: np.ndarray  # This rank's elements.
    result: np.ndarray  # The elements of the result, in shared memory.

    def finish(self, all_packed: bool) -> None:
        """See Prepared. If `all_packed`, the result is in shared memory, and this method copies it to the targets."""
        if all_packed:
            unpack(self.result, self.targets)
        else:
            super().finish(all_packed)


class Piggyback:
    """The memory of one host for all-reduces whose data are sent together with votes.

    Each rank packs its part into its slot of shared memory (`pack`). The first rank of the host may leave its own part
    where it is, if that is one array. When all ranks have voted and are ready, the first rank reduces the parts
    (`reduce_host`), and sends the result with the host's vote. Then it reduces the results of all hosts into the result
    slot (`reduce_hosts`), and posts the outcome. Each rank copies the result (`PiggybackedReduce.finish`).

    No locks are needed. A rank overwrites its slot only after the outcome, when the slot has been read. The result slot
    is overwritten only after all ranks have voted again, which they do after they have copied the result.

    The results are the same as those of HierarchicalData, because elements are summed in the same order.

    `memory` has `memory_bytes` of shared memory for the `count` ranks of the host. `index`: This rank's position among
    these ranks. `slot_bytes`: Bytes of the largest all-reduce (see `largest`).
    """

    def __init__(self, memory: memoryview, index: int, count: int, slot_bytes: int):
        nbytes = self.memory_bytes(count, slot_bytes)
        self._bytes = np.frombuffer(memory[:nbytes], np.uint8).reshape(count + 1, slot_bytes)
        self._index, self.slot_bytes = index, slot_bytes
        self._views: dict[np.dtype, list[np.ndarray]] = {}
        self._latest: PiggybackedReduce | None = None  # on the first rank

    @staticmethod
    def largest(local_sizes: Sequence[int]) -> int:
        """Return the bytes of the largest all-reduce to send with a vote; 0: none. `local_sizes`: Ranks per host."""
        hosts = len(local_sizes)
        if hosts > PIGGYBACK_MOST_HOSTS:
            return 0
        host_bytes = PIGGYBACK_HOST_BYTES // max(local_sizes)
        return (host_bytes if hosts == 2 else min(host_bytes, PIGGYBACK_CROSS_BYTES // hosts)) // 64 * 64

    @staticmethod
    def memory_bytes(count: int, slot_bytes: int) -> int:
        """Return the bytes of shared memory that the `count` ranks of a host need."""
        return (count + 1) * slot_bytes

    def pack(self, plane: DataPlane, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
             reduction: Reduction, elements: int) -> PiggybackedReduce:
        """Pack `sources`, with `elements` elements and at most `slot_bytes` bytes in all, for the next vote. Local.

        If the outcome of the vote is not ALL_READY, `plane` executes the all-reduce after the vote.
        """
        views, prepared = self._views_of(sources[0].dtype), PiggybackedReduce(plane, sources, targets, reduction)
        if self._index == 0 and len(sources) == 1 and reduction.prescale == 1.0:
            # Only this rank reads its part, so it needs no copy (1 MB, 2 hosts of 2 ranks: 6.3 ms instead of 6.8).
            prepared.part = sources[0].reshape(-1)
        else:
            prepared.part = views[self._index][:elements]
            pack(sources, prepared.part, reduction.prescale)
        prepared.result, prepared.is_packed = views[-1][:elements], True
        if self._index == 0:
            self._latest = prepared
        return prepared

    def _views_of(self, dtype: np.dtype) -> list[np.ndarray]:
        """Return the slots of the ranks, followed by the result slot, as arrays of `dtype`."""
        if dtype not in self._views:
            self._views[dtype] = [part.view(dtype) for part in self._bytes]
        return self._views[dtype]

    # -- on the first rank of a host, when all its ranks have packed and voted ----------------------------------------

    def reduce_host(self, target: np.ndarray) -> int:
        """Reduce the parts of the host's ranks into `target` (`slot_bytes` bytes). Returns the bytes written."""
        prepared = self._latest
        assert prepared is not None
        size, dtype, nbytes = prepared.result.size, prepared.result.dtype, prepared.result.nbytes
        parts = [prepared.part, *[part[:size] for part in self._views_of(dtype)[1:-1]]]
        combine(parts, prepared.reduction.op, target[:nbytes].view(dtype), IDENTITY)
        return nbytes

    def reduce_hosts(self, rows: Sequence[np.ndarray]) -> None:
        """Reduce `rows`, the results of all hosts in order, into the result slot. The outcome must be ALL_READY."""
        prepared = self._latest
        assert prepared is not None
        parts = [row.view(prepared.result.dtype) for row in rows]
        combine(parts, prepared.reduction.op, prepared.result, prepared.reduction.scale)

    def forget(self) -> None:
        """Drop the reference to the latest packed all-reduce. To be called when the round of votes is over."""
        self._latest = None


# -- the exchange of the hosts' votes, by their leaders ----------------------------------------------------------------


class LeaderExchange(ABC):
    """One leader's part in rounds of votes among the leaders, one after another. A leader is a host's first rank.

    `hosts`: The communicator of the leaders, reserved for this object. `close` frees `hosts`.
    """

    def __init__(self, hosts: MPI.Comm):
        self._hosts = hosts
        self._sending: list[MPI.Request] = []
        self._receiving: list[MPI.Request] = []
        self.is_under_way = False  # Whether a round has begun, and `poll` has not returned its outcome

    @abstractmethod
    def begin(self, number: int, outcome: Outcome) -> None:
        """Begin a round: start to send this host's vote, which consists of `number` and `outcome`."""

    def has_news(self) -> bool:
        """Return whether all messages that this rank waits for have arrived. If so, the caller should call `poll`."""
        return MPI.Request.Testall(self._receiving)

    @abstractmethod
    def poll(self) -> Outcome | None:
        """Return the outcome over all hosts, or None if the round is not complete. Does not wait."""

    def revoke(self) -> list[Any]:
        return [self._hosts, *self._sending, *self._receiving]

    def close(self) -> None:
        """Free the communicator. No round may be in flight."""
        self._hosts.Free()


def leader_exchange(comm: MPI.Comm, topology: Topology, piggyback: Piggyback | None) -> LeaderExchange | None:
    """Return the LeaderExchange of this rank, or None if this rank is not the first of its host.

    Collective over `comm`. `piggyback`: The data to send with votes; None (on all ranks): votes are sent without data.
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
        """Return the pieces, except the first, in which the `end` bytes of `message` are sent."""
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
    """Return a view of the vote in a message: the number, the outcome, and the length of the message in bytes."""
    return message[_VOTE_AT:_HEAD_BYTES].view(np.int64)


class ReducedExchange(LeaderExchange):
    """The exchange of many hosts, without data: an all-reduce (MPI_MIN) of (number, -number, outcome)."""

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


# -- the rounds --------------------------------------------------------------------------------------------------------


class HierarchicalAgreement(SharedMemoryAgreement):
    """One rank's votes in rounds among several hosts. For `memory` and `wake_rank` see SharedMemoryAgreement.

    `hosts`: The result of `leader_exchange`. `close` closes `hosts`. `elsewhere`: The ranks of the other hosts.
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
