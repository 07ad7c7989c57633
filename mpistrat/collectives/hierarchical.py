"""Backend for hosts of several ranks: shared memory within a host and MPI between hosts, at the same time."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import EngineError
from ..fusion import FusionBuffer
from ..scale import IDENTITY
from ..topology import Topology
from .base import DataPlane
from .host_memory import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from .reduction import combine
from .shared_memory import SharedMemoryData, Stage, Work

# One exchange of whole slices is quicker than a scatter and a gather up to about this many bytes from all hosts.
_SMALL_BYTES = 32 * 1024
# Slices smaller than this would cost more messages than the wire gains by having several senders.
_SLICE_BYTES = 16 * 1024
_YIELD_S = 2e-3
_SLEEP_S = 50e-6


def counterparts(comm: MPI.Comm, topology: Topology) -> MPI.Comm:
    """The ranks that have this rank's local_rank, in the order of their hosts. Collective over `comm`.

    COMM_NULL if not all hosts have such a rank; the others send on its behalf.
    """
    is_sender = topology.local_rank < min(topology.local_sizes)
    return comm.Split(topology.local_rank if is_sender else MPI.UNDEFINED, topology.hosts.index(topology.host))


class HierarchicalData(SharedMemoryData):
    """Collectives among hosts of ranks.

    A chunk is packed into shared memory by all ranks of a host; each of the first ranks reduces a slice of it, and
    all-reduces that slice with its counterparts on the other hosts, all of them at the same time; all ranks unpack the
    slices. The slice between the hosts is exchanged as in MpiData: 2 (H-1)/H of the host's bytes cross the wire, for H
    hosts. Chunks are at different stages at the same time, so that the wire and the memory are busy together.

    An element is summed over the ranks of each host in their order, and then over the hosts in theirs. Half precision
    is summed in float32 both times, and rounded for the wire.

    Args:
        memory: As for SharedMemoryData.
        chunk: Likewise; the same on all hosts.
        others: Likewise.
        cross: As `counterparts` gives it; nobody else uses it.
        senders: How many ranks every host has at least.
        limit_s: How long a wait for another host may take; 0: for ever.
    """

    name = "hierarchical"
    slots = 8

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane, cross: MPI.Comm, senders: int,
                 limit_s: float):
        super().__init__(memory, chunk, others)
        self._cross, self._senders, self._limit_s = cross, senders, limit_s
        self._hosts = cross.Get_size() if cross != MPI.COMM_NULL else 0
        self._partial = [FusionBuffer() for _ in range(self.slots)]
        self._rows = [FusionBuffer() for _ in range(self.slots)]
        self._underway: dict[int, tuple[MPI.Request, Any]] = {}

    def _is_direct(self, nbytes: int) -> bool:
        return False

    def _stages_of(self, work: Work) -> Sequence[Stage]:
        return self._pack, self._send, self._combine, self._publish, self._unpack

    def _slice(self, work: Work, k: int) -> slice | None:
        """The elements of chunk `k` that this rank reduces; None if it has no part in that."""
        size = work.size_of(k)
        senders = max(1, min(self._senders, size * work.itemsize // _SLICE_BYTES))
        if self._index >= senders:
            return None
        return slice(size * self._index // senders, size * (self._index + 1) // senders)

    def _send(self, work: Work, k: int) -> None:
        """Reduce this rank's slice over the host, and send each other host its part of that."""
        number, mine = work.first + k, self._slice(work, k)
        if mine is not None:
            self._memory.await_all(PACKED, number + 1)
            parts = [part[mine] for part in work.slot_of(k)[:-1]]
            slot = k % self.slots
            partial = self._partial[slot].view(parts[0].size, parts[0].dtype)
            combine(parts, work.op, partial, IDENTITY)
            self._underway[k] = self._exchange(partial, self._rows[slot])
        self._memory.post(number + 1, CONSUMED)

    def _exchange(self, partial: np.ndarray, buffer: FusionBuffer) -> tuple[MPI.Request, np.ndarray]:
        hosts, sent = self._hosts, partial.view(np.uint8)
        if sent.nbytes * hosts <= _SMALL_BYTES:
            rows = buffer.view(partial.size * hosts, partial.dtype).reshape(hosts, -1)
            return self._cross.Iallgather([sent, MPI.BYTE], [rows.view(np.uint8), MPI.BYTE]), rows
        counts, starts = self._parts_of(partial)
        row = counts[self._cross.Get_rank()]
        rows = buffer.view(row // partial.itemsize * hosts, partial.dtype).reshape(hosts, -1)
        received = [rows.view(np.uint8), [row] * hosts, [row * h for h in range(hosts)], MPI.BYTE]
        return self._cross.Ialltoallv([sent, counts, starts, MPI.BYTE], received), rows

    def _parts_of(self, array: np.ndarray) -> tuple[list[int], list[int]]:
        """Bytes and first byte of each host's part of a slice."""
        bounds = [array.size * h // self._hosts * array.itemsize for h in range(self._hosts + 1)]
        return [bounds[h + 1] - bounds[h] for h in range(self._hosts)], bounds[:-1]

    def _combine(self, work: Work, k: int) -> None:
        """Reduce what the hosts have sent, and send them the result."""
        if k not in self._underway:
            return
        request, rows = self._underway.pop(k)
        self._await(request)
        self._memory.await_all(UNPACKED, work.place_is_free_at(k))
        result = work.slot_of(k)[-1][self._slice(work, k)]
        if rows.shape[1] == result.size:
            combine(list(rows), work.op, result, work.scale)
            return
        counts, starts = self._parts_of(result)
        host = self._cross.Get_rank()
        first = starts[host] // result.itemsize
        combine(list(rows), work.op, result[first:first + rows.shape[1]], work.scale)
        gathered = [result.view(np.uint8), counts, starts, MPI.BYTE]
        self._underway[k] = self._cross.Iallgatherv(MPI.IN_PLACE, gathered), None

    def _publish(self, work: Work, k: int) -> None:
        """Let the host's ranks see the result."""
        if k in self._underway:
            self._await(self._underway.pop(k)[0])
        self._memory.post(work.first + k + 1, READY)

    def _await(self, request: MPI.Request) -> None:
        began = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - began
            if 0 < self._limit_s < waited_s:
                raise EngineError(f"another host has not come to a collective for {waited_s:.0f} s after all ranks had "
                                  "agreed on it.")
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)

    def close(self) -> None:
        if self._cross != MPI.COMM_NULL:
            self._cross.Free()
        super().close()
