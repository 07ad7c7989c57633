"""Data plane of several hosts: shared memory within hosts and MPI between them, at the same time.

Used by the engine's thread.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...core import tuning
from ...core.arithmetic import IDENTITY, Reduction, Scale, combine
from ...core.error_feedback import ErrorFeedback, Errors
from ...core.interfaces import DataPlane, Prepared
from ...core.memory import FusionBuffer
from ...core.quantised import BLOCK, Codec, wire_bytes
from ...core.topology import Topology
from ..mpi.requests import PeerWait, exchange
from ..shm.segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from ..shm.shm_data import ReduceScatter
from ..shm.two_shot import Chunk, Chunked, Stage, TwoShotData, TwoShotReduce
from .hosts_agreement import Piggyback

_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)


def cross_comm(comm: MPI.Comm, topology: Topology) -> MPI.Comm:
    """Return the communicator of the ranks with this rank's local_rank, ordered by host. Collective over `comm`.

    Returns COMM_NULL if a host has no rank with this local_rank. Ranks with a smaller local_rank then send the data.
    """
    is_sender = topology.local_rank < min(topology.local_sizes)
    return comm.Split(topology.local_rank if is_sender else MPI.UNDEFINED, topology.hosts.index(topology.host))


class QuantisedExchange:
    """All-reduces of slices as 8-bit numbers, one after the other. `comm` has one rank of each host.

    If there are two hosts, or the slice is small, the hosts send each other the whole slice. Each host sums the 8-bit
    numbers of all hosts, its own included, in float32 and in host order. Otherwise each host sums one part of the slice
    in float32: its own values, which are not rounded, and the 8-bit numbers of the others. It sends the sum as 8-bit
    numbers, and itself uses these, too. Therefore all hosts have the same bits.

    A host keeps the rounding errors of what it sends. The errors that all hosts keep add up to the difference between
    the sum of all results so far and the exact sum.

    `comm` is COMM_NULL on a rank that sends nothing. Objects of the same thread may share `codec`.
    """

    def __init__(self, comm: MPI.Comm, codec: Codec):
        self._comm, self._codec = comm, codec
        self._hosts, self._host = (comm.Get_size(), comm.Get_rank()) if comm != MPI.COMM_NULL else (0, 0)
        self._sent, self._received, self._total = FusionBuffer(), FusionBuffer(), FusionBuffer()

    def send(self, values: np.ndarray, errors: np.ndarray | None) -> list[MPI.Request]:
        """Start to send this host's `values` as 8-bit numbers. For `errors` see Codec.encode.

        The caller completes the returned requests, and then calls `combine`. Until then it must not change the arrays.
        """
        self._values, self._errors, count = values, errors, values.size
        nbytes = wire_bytes(count)
        self._is_whole = self._hosts == 2 or nbytes * self._hosts <= tuning.MPI_ALLGATHER_BYTES
        if self._is_whole:
            sent = self._sent.view(nbytes, _BYTE)
            self._codec.encode(values, errors, sent)
            self._rows = list(self._received.view(nbytes * self._hosts, _BYTE).reshape(self._hosts, nbytes))
            self._rows[self._host] = sent
            return exchange(self._comm, [sent] * self._hosts, self._rows)
        blocks = -(-count // BLOCK)
        bounds = [min(blocks * h // self._hosts * BLOCK, count) for h in range(self._hosts + 1)]
        self._bounds = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._sizes = [wire_bytes(part.stop - part.start) for part in self._bounds]
        self._starts = [sum(self._sizes[:h]) for h in range(self._hosts)]
        sent = self._sent.view(sum(self._sizes), _BYTE)
        for h, part in enumerate(self._bounds):
            if h != self._host:
                self._codec.encode(values[part], None if errors is None else errors[part], self._part_of(sent, h))
        own = self._sizes[self._host]
        self._rows = list(self._received.view(own * self._hosts, _BYTE).reshape(self._hosts, own))
        return exchange(self._comm, [self._part_of(sent, h) for h in range(self._hosts)], self._rows)

    def combine(self, result: np.ndarray, scale: Scale) -> list[MPI.Request]:
        """Sum the received values. Returns requests, which exchange the sums and must be complete before `finish`."""
        if self._is_whole:
            total = self._sum_of(result)
            for h, row in enumerate(self._rows):
                self._codec.decode(row, total, adds=h > 0)
            scale.apply(total, result)
            return []
        own = self._bounds[self._host]
        total = self._total.view(own.stop - own.start, _FLOAT)
        np.copyto(total, self._values[own], casting="same_kind")
        for h, row in enumerate(self._rows):
            if h != self._host:
                self._codec.decode(row, total, adds=True)
        self._gathered = self._sent.view(sum(self._sizes), _BYTE)
        errors = None if self._errors is None else self._errors[own]
        parts = [self._part_of(self._gathered, h) for h in range(self._hosts)]
        self._codec.encode(total, errors, parts[self._host])
        return exchange(self._comm, [parts[self._host]] * self._hosts, parts)

    def finish(self, result: np.ndarray, scale: Scale) -> None:
        """Write the scaled sum to `result`, unless `combine` has already written it."""
        if self._is_whole:
            return
        total = self._sum_of(result)
        for h, part in enumerate(self._bounds):
            self._codec.decode(self._part_of(self._gathered, h), total[part])
        scale.apply(total, result)

    def _sum_of(self, result: np.ndarray) -> np.ndarray:
        """Return the float32 array for the sum: `result` if it is float32, else a buffer."""
        return result if result.dtype == _FLOAT else self._total.view(result.size, _FLOAT)

    def _part_of(self, wire: np.ndarray, host: int) -> np.ndarray:
        return wire[self._starts[host]:self._starts[host] + self._sizes[host]]


class HierarchicalData(TwoShotData):
    """Collectives among the ranks of several hosts.

    All ranks of a host pack a chunk into shared memory. The first ranks of the host, at most `senders`, each reduce
    one slice, and all-reduce it over their own `cross`, in parallel. Then all ranks unpack all slices. A slice is
    exchanged as in MpiData, except that two hosts exchange whole slices. Between H hosts, each sends 2 (H-1)/H of its
    bytes. Several chunks are in flight at different stages, so that network and memory work in parallel. A rank that
    is the only one of its host sends from its tensors and reduces into its targets, if a slice belongs to one tensor.

    A quantised reduction (Reduction.quantised) exchanges 8-bit numbers by a QuantisedExchange. If every host has one
    rank, a reduce-scatter runs in chunks as well.

    An element is summed over the ranks of each host in rank order, and then over the hosts in host order. Half
    precision is summed in float32 both times, and a host's sum is rounded before it is sent.

    Args:
        memory, others: See TwoShotData.
        chunk: Bytes of a chunk; the same on all hosts.
        cross: The result of `cross_comm`, reserved for this object. `close` frees `cross`.
        senders: The number of ranks on the host with the fewest ranks.
        wait: Waits for the ranks of `cross`.
        feedback: The error feedback of quantised reductions; None (on all ranks): rounding errors are lost.
        piggyback: Sends small all-reduces together with votes; None: votes are sent without data.
    """

    name = "hierarchical"
    slots = tuning.HIERARCHICAL_CHUNKS_UNDER_WAY
    chunk_bytes = tuning.HIERARCHICAL_CHUNK_BYTES
    one_shot_bytes = -1  # never

    def __init__(self, memory: HostMemory, chunk: int, others: DataPlane, cross: MPI.Comm, senders: int, wait: PeerWait,
                 feedback: ErrorFeedback | None, piggyback: Piggyback | None = None):
        super().__init__(memory, [chunk], others)
        self._piggyback = piggyback
        self._cross, self._senders, self._wait = cross, senders, wait
        self._hosts = cross.Get_size() if cross != MPI.COMM_NULL else 0
        self._partial = [FusionBuffer() for _ in range(self.slots)]
        self._rows = [FusionBuffer() for _ in range(self.slots)]
        self._scattered = FusionBuffer()
        self._underway: dict[int, tuple[list[MPI.Request], list[np.ndarray]]] = {}
        self._feedback, codec = feedback, Codec()
        self._errors: Errors | None = None  # of the reduction in flight
        self._exchanges = [QuantisedExchange(cross, codec) for _ in range(self.slots)]

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        elements = sum([source.size for source in sources])
        if (self._piggyback is None or elements * sources[0].itemsize > self._piggyback.slot_bytes
                or reduction.quantised is not None):
            return super().prepare(sources, targets, reduction)
        return self._piggyback.pack(self, sources, targets, reduction, elements)

    def run(self, work: Chunked, stages: Sequence[Stage]) -> None:
        if isinstance(work, TwoShotReduce) and work.reduction.quantised is not None and self._feedback is not None:
            count = sum([source.size for source in work.inputs])
            self._errors = self._feedback.of(work.reduction.quantised, count)
        super().run(work, stages)

    @property
    def stages(self) -> Sequence[Stage]:
        return self._pack, self._send, self._combine, self._receive, self._unpack

    def _reducers(self, nbytes: int) -> int:
        return max(1, min(self._senders, nbytes // tuning.HIERARCHICAL_SLICE_BYTES))

    def _send(self, work: TwoShotReduce, k: int) -> None:
        """Reduce this rank's slice of chunk k over the ranks of the host, and start to send it to the other hosts."""
        chunk, number = work.chunks[k], work.first + k
        if chunk.own is not None:
            self.memory.await_all(number, PACKED)
            slot = number % self.slots
            partial = self._part_of_host(work, chunk, self._partial[slot])
            quantised, errors = work.reduction.quantised, self._errors
            if quantised is None:
                self._underway[number] = self._exchange(partial, self._rows[slot])
            else:
                first = k * (work.chunk_bytes // partial.itemsize) + chunk.own.start
                part = None if errors is None else errors.part(first, partial.size)
                self._underway[number] = self._exchanges[slot].send(partial, part), []
        self.memory.post(number, CONSUMED)

    def _part_of_host(self, work: TwoShotReduce, chunk: Chunk, buffer: FusionBuffer) -> np.ndarray:
        """Return this rank's slice, reduced over its host. On a host with one rank, the slice is a view if possible."""
        if self._count == 1 and not chunk.reads:
            return chunk.parts[0]
        if self._count == 1 and len(chunk.reads) == 1:
            return work.inputs[chunk.reads[0].array][chunk.reads[0].part]
        partial = buffer.view(chunk.result.size, chunk.result.dtype)
        self._reduce_slice(work, chunk, partial, IDENTITY)
        return partial

    def _result_of(self, work: TwoShotReduce, chunk: Chunk) -> np.ndarray:
        """Return the memory for this rank's final slice: shared memory, or a target if the host has one rank."""
        if self._count == 1 and len(chunk.own_copies) == 1:
            return work.outputs[chunk.own_copies[0].array][chunk.own_copies[0].part]
        return chunk.result

    def _exchange(self, partial: np.ndarray, buffer: FusionBuffer) -> tuple[list[MPI.Request], list[np.ndarray]]:
        """Start to exchange `partial`, this host's values, with the other hosts. `buffer` is for received values.

        Returns the requests, and for each host the array with the host's values once the requests are complete: values
        of the whole slice, or of the part that this host reduces.
        """
        hosts, host = self._hosts, self._cross.Get_rank()
        if hosts == 2:
            # Both hosts reduce the whole slice. That sends no more bytes, and saves the second exchange.
            theirs = buffer.view(partial.size, partial.dtype)
            rows = [partial, theirs] if host == 0 else [theirs, partial]
            return exchange(self._cross, [partial, partial], rows), rows
        if partial.nbytes * hosts <= tuning.MPI_ALLGATHER_BYTES:
            table = buffer.view(partial.size * hosts, partial.dtype).reshape(hosts, -1)
            sent, received = partial.view(np.uint8), table.view(np.uint8)
            return [self._cross.Iallgather([sent, MPI.BYTE], [received, MPI.BYTE])], list(table)
        parts = self._parts_of(partial)
        rows = list(buffer.view(parts[host].size * hosts, partial.dtype).reshape(hosts, -1))
        rows[host] = parts[host]
        return exchange(self._cross, parts, rows), rows

    def _parts_of(self, array: np.ndarray) -> list[np.ndarray]:
        bounds = [array.size * h // self._hosts for h in range(self._hosts + 1)]
        return [array[start:stop] for start, stop in itertools.pairwise(bounds)]

    def _combine(self, work: TwoShotReduce, k: int) -> None:
        """Reduce the values of all hosts. If this host has reduced only a part, start to send it to the other hosts."""
        number = work.first + k
        if number not in self._underway:
            return
        result = self._result_of(work, work.chunks[k])
        requests, rows = self._underway.pop(number)
        self._wait.complete(requests)
        self.memory.await_all(self._room_for(work, k), UNPACKED)
        if work.reduction.quantised is not None:
            requests = self._exchanges[number % self.slots].combine(result, work.reduction.scale)
            self._underway[number] = requests, []
            return
        if rows[0].size == result.size:
            combine(rows, work.reduction.op, result, work.reduction.scale)
            return
        parts = self._parts_of(result)
        own = parts[self._cross.Get_rank()]
        combine(rows, work.reduction.op, own, work.reduction.scale)
        self._underway[number] = exchange(self._cross, [own] * self._hosts, parts), []

    def _receive(self, work: TwoShotReduce, k: int) -> None:
        """Wait for the parts that the other hosts have reduced, and copy the slice to this rank's targets."""
        number, chunk = work.first + k, work.chunks[k]
        result = self._result_of(work, chunk)
        if number in self._underway:
            self._wait.complete(self._underway.pop(number)[0])
            if work.reduction.quantised is not None:
                self._exchanges[number % self.slots].finish(result, work.reduction.scale)
        if result is chunk.result:
            work.copy_out(chunk.own_copies)
        self.memory.post(work.first + k, READY)

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        if len(counts) != self._hosts:  # Some host has several ranks.
            super().reducescatter(source, target, counts, reduction)
            return
        elements = tuning.SHM_SCATTERS_UNDER_WAY * self._chunks[0] // source.itemsize
        memories = self._scattered.view(elements * self._hosts, source.dtype).reshape(self._hosts, -1)
        work = ReduceScatter(memories, self._cross.Get_rank(), self.last_chunk + 1, source, target, counts, reduction)
        self.run(work, (self._scatter, self._reduce_part))

    def _scatter(self, work: ReduceScatter, k: int) -> None:
        self._underway[work.first + k] = exchange(self._cross, work.sent(k), work.received(k)), []

    def _reduce_part(self, work: ReduceScatter, k: int) -> None:
        self._wait.complete(self._underway.pop(work.first + k)[0])
        work.reduce(k)

    def revoke(self) -> list[Any]:
        requests = [request for of_chunk, _ in self._underway.values() for request in of_chunk]
        return [self._cross, *requests, *self._wait.unfinished, *super().revoke()]

    def close(self) -> None:
        if self._cross != MPI.COMM_NULL:
            self._cross.Free()
        super().close()
