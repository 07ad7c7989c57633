"""Backend for hosts of several ranks: shared memory within a host and MPI between hosts, at the same time."""

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import IDENTITY, Reduction, combine
from ...core.interfaces import DataPlane, Prepared
from ...core.memory import FusionBuffer
from ...core.topology import Topology
from ..mpi.peer_wait import PeerWait
from ..shm.segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from ..shm.two_shot import SharedMemoryData, Stage, Work
from .piggyback import Piggyback, PiggybackedReduce

# One exchange of whole slices is quicker than a scatter and a gather up to about this many bytes from all hosts.
_SMALL_BYTES = 32 * 1024
# Slices smaller than this would cost more messages than the wire gains by having several senders.
_SLICE_BYTES = 16 * 1024


def cross_comm(comm: MPI.Comm, topology: Topology) -> MPI.Comm:
    """The ranks that have this rank's local_rank, in the order of their hosts. Collective over `comm`.

    COMM_NULL if not all hosts have such a rank; the others send on its behalf.
    """
    is_sender = topology.local_rank < min(topology.local_sizes)
    return comm.Split(topology.local_rank if is_sender else MPI.UNDEFINED, topology.hosts.index(topology.host))


class HierarchicalData(SharedMemoryData):
    """Collectives among hosts of ranks.

    A chunk is packed into shared memory by all ranks of a host; each of the first ranks reduces a slice of it, and
    all-reduces that slice with its cross_comm on the other hosts, all of them at the same time; all ranks unpack the
    slices. The slice between the hosts is exchanged as in MpiData, or by two hosts as a whole: 2 (H-1)/H of the host's
    bytes cross the wire, for H hosts. Chunks are at different stages at the same time, so that the wire and the memory
    are busy together.

    An element is summed over the ranks of each host in their order, and then over the hosts in theirs. Half precision
    is summed in float32 both times, and rounded for the wire.

    Args:
        memory: As for SharedMemoryData.
        chunk: Likewise; the same on all hosts.
        others: Likewise.
        cross: As `cross_comm` gives it; nobody else uses it.
        senders: How many ranks every host has at least.
        wait: For the ranks of `cross`.
        piggyback: Takes small all-reduces along with votes; None: nothing travels with them.
    """

    name = "hierarchical"
    slots = 6
    # Exchanges between hosts cost more than missing the cache (16 MB on 2 hosts of 2 ranks, with two exchanges a chunk:
    # 51 ms with chunks of half a megabyte, 43 with 1 MiB, 38 with 2, 35 with 4); but the wire waits for large ones.
    chunk_bytes = 2 * 1024 * 1024
    one_shot_bytes = -1  # never

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane, cross: MPI.Comm, senders: int, wait: PeerWait,
                 piggyback: Piggyback | None = None):
        super().__init__(memory, chunk, others)
        self._piggyback = piggyback
        self._cross, self._senders, self._wait = cross, senders, wait
        self._hosts = cross.Get_size() if cross != MPI.COMM_NULL else 0
        self._partial = [FusionBuffer() for _ in range(self.slots)]
        self._rows = [FusionBuffer() for _ in range(self.slots)]
        self._underway: dict[int, tuple[list[MPI.Request], list[np.ndarray]]] = {}

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        elements = sum([source.size for source in sources])
        if not self._is_used or self._piggyback is None or elements * sources[0].itemsize > self._piggyback.slot_bytes:
            return super().prepare(sources, targets, reduction)
        return self._piggyback.pack(sources, targets, reduction, elements)

    def finish(self, prepared: Prepared, all_packed: bool) -> None:
        if not isinstance(prepared, PiggybackedReduce):
            super().finish(prepared, all_packed)
        elif not all_packed:
            self.allreduce(prepared.sources, prepared.targets, prepared.reduction)
        else:
            prepared.take()

    @property
    def _stages(self) -> Sequence[Stage]:
        return self._pack, self._send, self._combine, self._receive, self._unpack

    def _reducers(self, nbytes: int) -> int:
        return max(1, min(self._senders, nbytes // _SLICE_BYTES))

    def _send(self, work: Work, k: int) -> None:
        """Reduce this rank's slice over the host, and send each other host its part of that."""
        chunk, number = work.chunks[k], work.first + k
        if chunk.mine is not None:
            self._memory.await_all(PACKED, number)
            slot = number % self.slots
            partial = self._partial[slot].view(chunk.result.size, chunk.result.dtype)
            self._reduce_slice(work, chunk, partial, IDENTITY)
            self._underway[number] = self._exchange(partial, self._rows[slot])
        self._memory.post(number, CONSUMED)

    def _exchange(self, partial: np.ndarray, buffer: FusionBuffer) -> tuple[list[MPI.Request], list[np.ndarray]]:
        """Begin to send what the other hosts need of `partial`, and to receive for `buffer` what this one needs.

        Returns what to wait for, and what is there then: for each host, its values of all elements of the slice or of
        those that this host is to reduce.
        """
        hosts, host, sent = self._hosts, self._cross.Get_rank(), partial.view(np.uint8)
        if hosts == 2:
            # Two hosts send as many bytes if both reduce all of it, and need no second exchange.
            theirs = buffer.view(partial.size, partial.dtype)
            requests = [self._cross.Irecv([theirs.view(np.uint8), MPI.BYTE], 1 - host),
                        self._cross.Isend([sent, MPI.BYTE], 1 - host)]
            return requests, [partial, theirs] if host == 0 else [theirs, partial]
        if sent.nbytes * hosts <= _SMALL_BYTES:
            rows = buffer.view(partial.size * hosts, partial.dtype).reshape(hosts, -1)
            return [self._cross.Iallgather([sent, MPI.BYTE], [rows.view(np.uint8), MPI.BYTE])], list(rows)
        counts, starts = self._parts_of(partial)
        row = counts[host]
        rows = buffer.view(row // partial.itemsize * hosts, partial.dtype).reshape(hosts, -1)
        received = [rows.view(np.uint8), [row] * hosts, [row * h for h in range(hosts)], MPI.BYTE]
        return [self._cross.Ialltoallv([sent, counts, starts, MPI.BYTE], received)], list(rows)

    def _parts_of(self, array: np.ndarray) -> tuple[list[int], list[int]]:
        """Bytes and first byte of each host's part of a slice."""
        bounds = [array.size * h // self._hosts * array.itemsize for h in range(self._hosts + 1)]
        return [bounds[h + 1] - bounds[h] for h in range(self._hosts)], bounds[:-1]

    def _combine(self, work: Work, k: int) -> None:
        """Reduce what the hosts have sent, and send them the result."""
        number, result = work.first + k, work.chunks[k].result
        if number not in self._underway:
            return
        requests, rows = self._underway.pop(number)
        self._wait.complete(requests)
        self._memory.await_all(UNPACKED, self._room_for(work, k))
        if rows[0].size == result.size:
            combine(rows, work.reduction.op, result, work.reduction.scale)
            return
        counts, starts = self._parts_of(result)
        first = starts[self._cross.Get_rank()] // result.itemsize
        combine(rows, work.reduction.op, result[first:first + rows[0].size], work.reduction.scale)
        gathered = [result.view(np.uint8), counts, starts, MPI.BYTE]
        self._underway[number] = [self._cross.Iallgatherv(MPI.IN_PLACE, gathered)], []

    def _receive(self, work: Work, k: int) -> None:
        """Await what the other hosts have reduced."""
        number = work.first + k
        if number in self._underway:
            self._wait.complete(self._underway.pop(number)[0])
        self._take_own(work, k)
        self._memory.post(work.first + k, READY)

    def close(self) -> None:
        if self._cross != MPI.COMM_NULL:
            self._cross.Free()
        super().close()
