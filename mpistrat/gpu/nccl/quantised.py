"""All-reduces by NCCL in which hosts send each other 8-bit numbers. The host never waits.

NCCL cannot sum numbers with scales. So it only moves bytes, and a kernel (copy.quantise) adds up, in the manner of
ZeRO++'s qgZ (arXiv 2306.10209). A bucket is packed as float32 and cut into parts, one for each rank of the host with
the fewest ranks. Each rank of a host gets one part from the ranks of its host, adds it up in their order, and exchanges
the sum with the ranks that have this part on the other hosts, as QuantisedExchange does. Then the ranks of a host send
each other their parts.

All of it goes over the communicator of all ranks, on its stream, in the order of the buckets. So there is nothing more
to connect, to abort or to wait for than without it, and hosts may have different numbers of ranks in any order. The
ranks of a host send as many bytes as for a reduce-scatter and an all-gather.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from ...core.arithmetic import Reduction
from ...core.error_feedback import ErrorFeedback, Errors
from ...core.quantised import BLOCK
from ...core.request import ReduceOp
from ...core.topology import Topology
from ...core.tuning import HIERARCHICAL_ALLGATHER_BYTES
from ..arrays import GpuArray, GpuDevice, GpuStream
from ..backend import Reducer, await_on_host
from ..copy.plan import FusedCopies
from ..copy.quantise import BLOCK_BYTES, QuantisedSum
from .communicators import Exchange
from .data import NcclData
from .stream import NcclStream
from .types import OPERATIONS, NcclReduction, WireFormat

_FLOAT_BYTES = 4
_FLOATS_BYTES = BLOCK * _FLOAT_BYTES  # of a block


class QuantisedReduces:
    """The reductions of buckets whose Reduction is quantised.

    Args:
        nccl: NCCL between all ranks.
        topology: These, on several hosts.
        exchange: An exchange among them.
        feedback: Keeps what is rounded off.
        limit_s: As for StagedData.
    """

    def __init__(self, device: GpuDevice, nccl: NcclData, topology: Topology, exchange: Exchange,
                 feedback: ErrorFeedback, limit_s: float):
        self._device, self._nccl, self._topology, self._exchange = device, nccl, topology, exchange
        self._feedback, self._limit_s = feedback, limit_s
        self._problems: dict[str, str] = {}
        sizes, self._hosts, self._host = topology.local_sizes, topology.hosts, topology.hosts.index(topology.host)
        self._parts = min(sizes)
        # The ranks that have this rank's part, by host; none if it has no part.
        self._across = [topology.ranks_on(host)[topology.local_rank] for host in self._hosts
                        if topology.local_rank < self._parts]
        # The blocks of a part, such that a fusion buffer has room for the packed values, for the parts from a
        # host's ranks, and for what is sent to and received from the other hosts.
        rows = max(sizes) if max(sizes) > 1 else 0
        self._most_blocks = (nccl.buffer_bytes - len(self._hosts) * BLOCK_BYTES - HIERARCHICAL_ALLGATHER_BYTES) // (
            (self._parts + rows) * _FLOATS_BYTES + 2 * BLOCK_BYTES)

    def why_not(self, format_: str) -> str:
        """Why the ranks cannot reduce in this format; "" if they can. Collective when a format comes first."""
        if self._most_blocks < 1:
            return f"a fusion buffer of {self._nccl.buffer_bytes} bytes is too small"
        if format_ not in self._problems:
            own = ""
            try:
                self._device.compile_sum(format_)
            except Exception as error:  # Sent to the other ranks, which wait for this rank. All ranks then act on it.
                own = f"{type(error).__name__}: {error}"
            self._problems[format_] = "; ".join(
                f"rank {rank}: {text}" for rank, text in enumerate(self._exchange(own)) if text)
        return self._problems[format_]

    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction) -> Reducer:
        """As GpuBackend.reducer, for floats of any size. `why_not` has nothing against the format."""
        quantised, counts = reduction.quantised, [array.size for array in arrays]
        assert quantised is not None, "why_not was not called"
        count, wire = sum(counts), WireFormat(arrays[0].dtype.name, "float32")
        by_nccl = NcclReduction(OPERATIONS[ReduceOp.SUM], reduction.prescale, reduction.scale)
        step = self._most_blocks * BLOCK * self._parts
        pieces = [_Piece(counts, wire, first, min(step, count - first), self._parts)
                  for first in range(0, count, step)]

        def make_errors(count: int) -> GpuErrors:
            own = [piece.part(self._topology.local_rank) for piece in pieces] if self._across else []
            return GpuErrors(self._device, self._nccl.stream(0).reductions, count, own, self._limit_s)

        def reduce(sources: Sequence[int], targets: Sequence[int]) -> None:
            stream = self._nccl.stream(0)  # Always this one, which so uses the errors in the order of the steps.
            errors = self._feedback.of(quantised, count, make_errors)
            address = 0 if errors is None else errors.address
            for piece in pieces:
                stream.reduce_packed(piece.addresses(sources), piece.addresses(targets), piece.copies, wire, by_nccl,
                                     partial(self._reduce, stream, quantised.format, piece, address))
                address += piece.blocks * _FLOATS_BYTES if address else 0

        return reduce

    def _reduce(self, stream: NcclStream, format_: str, piece: "_Piece", errors: int, packed: int) -> None:
        """Enqueue the reduction of what is packed at an address, where the sum is then."""
        local, own, part_bytes = self._topology.local_ranks, self._topology.local_rank, piece.blocks * _FLOATS_BYTES
        parts = [(packed + part * part_bytes, part_bytes, owner) for part, owner in enumerate(local[:self._parts])]
        floats, free = packed, packed + self._parts * part_bytes
        if len(local) > 1:
            floats, free = free, free + len(local) * part_bytes
            stream.transfer(parts, [(floats + i * part_bytes, part_bytes, peer) for i, peer in enumerate(local)
                                    if self._across])
        if self._across:
            summed = QuantisedSum(format_, piece.blocks, floats, len(local), part_bytes, piece.part(own)[1],
                                  errors=errors)
            self._exchange_hosts(stream, summed, parts[own][0], free)
        if len(local) > 1:
            stream.transfer([(parts[own][0], part_bytes, peer) for i, peer in enumerate(local)
                             if i != own and self._across], [*parts[:own], *parts[own + 1:]])

    def _exchange_hosts(self, stream: NcclStream, summed: QuantisedSum, total: int, free: int) -> None:
        """Enqueue the sum over the hosts of what `summed` adds up on this one, to the address `total`.

        `free`: The address of memory for what is sent and received.
        """
        blocks, hosts, this = summed.blocks, len(self._hosts), self._host
        add, nbytes = partial(self._device.quantised_sum, stream=stream.reductions), blocks * BLOCK_BYTES
        if hosts == 2 or nbytes * hosts <= HIERARCHICAL_ALLGATHER_BYTES:
            rows = [(free + host * nbytes, nbytes, rank) for host, rank in enumerate(self._across)]
            add(summed._replace(wire=rows[this][0]))
            others = [*rows[:this], *rows[this + 1:]]
            stream.transfer([(rows[this][0], nbytes, rank) for _, _, rank in others], others)
            add(QuantisedSum(summed.format, blocks, wires=free, wire_rows=hosts, wire_step=nbytes, total=total))
            return
        bounds = [blocks * host // hosts for host in range(hosts + 1)]
        rows = [(free + first * BLOCK_BYTES, (last - first) * BLOCK_BYTES, rank)
                for rank, (first, last) in zip(self._across, itertools.pairwise(bounds), strict=True)]
        others, (first, last) = [*rows[:this], *rows[this + 1:]], bounds[this:this + 2]
        own, own_bytes, _ = rows[this]
        received, kept = free + nbytes, total + first * _FLOATS_BYTES
        add(_some(summed, 0, first)._replace(wire=free))
        add(_some(summed, first, last)._replace(total=kept, errors=0))
        add(_some(summed, last, blocks)._replace(wire=own + own_bytes))
        stream.transfer(others, [(received + i * own_bytes, own_bytes, rank) for i, (_, _, rank) in enumerate(others)])
        add(_some(summed, first, last)._replace(floats=kept, float_rows=1, wires=received, wire_rows=hosts - 1,
                                                wire_step=own_bytes, wire=own))
        stream.transfer([(own, own_bytes, rank) for _, _, rank in others], others)
        add(QuantisedSum(summed.format, blocks, wires=free, wire_rows=1, total=total))


class GpuErrors(Errors):
    """Those of a rank's parts, in the memory of its GPU.

    Args:
        stream: The only one whose work uses them.
        count: The values of the bucket.
        parts: (first value, values, values in memory with those that fill its last block) of each part.
        limit_s: Seconds after which a copy between host and GPU fails; 0: never.

    Raises:
        MemoryError: The GPU has not enough memory.
    """

    def __init__(self, device: GpuDevice, stream: GpuStream, count: int, parts: Sequence[tuple[int, int, int]],
                 limit_s: float):
        super().__init__(count)
        self._device, self._stream, self._limit_s, end = device, stream, limit_s, 0
        self._places: list[tuple[slice, slice]] = []  # in the bucket, and in the memory
        for first, filled, room in parts:
            self._places.append((slice(first, first + filled), slice(end, end + filled)))
            end += room
        self._nbytes = max(end, 1) * _FLOAT_BYTES
        memory = device.scratch(self._nbytes, stream)
        if memory is None:
            raise MemoryError
        # address: Of the first part; the others follow.
        self.address, self._memory = memory.address, memory
        self.set(None)

    def set(self, values: np.ndarray | None) -> None:
        staged = self._device.pinned(self._nbytes).view(np.float32)
        staged[:] = 0.0
        if values is not None:
            for place, at in self._places:
                staged[at] = values[place]
        self._copy(self.address, staged.ctypes.data)

    def own(self) -> np.ndarray:
        result = np.zeros(self.count, np.float32)
        with self._device.current():
            staged = self._device.pinned(self._nbytes).view(np.float32)
            self._copy(staged.ctypes.data, self.address)
        for place, at in self._places:
            result[place] = staged[at]
        return result

    def _copy(self, target: int, source: int) -> None:
        """Copy after the work so far, and wait for it."""
        self._device.copy(target, source, self._nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)


class _Piece:
    """Consecutive values of a bucket that fit into a fusion buffer, and their parts.

    Args:
        counts: The values of each tensor.
        wire: Of the tensors.
        first: The first value of the bucket.
        count: The number of values.
        parts: The number of parts.
    """

    def __init__(self, counts: Sequence[int], wire: WireFormat, first: int, count: int, parts: int):
        # blocks: Of a part. The last parts may be shorter, or empty.
        self._first, self._count, self.blocks = first, count, -(-count // (parts * BLOCK))
        ends = np.cumsum(counts)
        begin, end = (np.clip(place - ends + counts, 0, counts) for place in (first, first + count))
        self._members = [(i, int(begin[i]) * wire.memory_bytes) for i in np.flatnonzero(end > begin).tolist()]
        # Without gaps, so that the errors of values have the place that they have on the host.
        self.copies = FusedCopies([int(end[i] - begin[i]) for i, _ in self._members], wire.memory_bytes, wire.itemsize,
                                  is_dense=True)

    def addresses(self, addresses: Sequence[int]) -> list[int]:
        """The addresses of the values in tensors at these ones."""
        return [addresses[i] + offset for i, offset in self._members]

    def part(self, number: int) -> tuple[int, int, int]:
        """The part of this number, as GpuErrors takes it."""
        room = self.blocks * BLOCK
        start = min(number * room, self._count)
        return self._first + start, min(room, self._count - start), room


def _some(summed: QuantisedSum, first: int, last: int) -> QuantisedSum:
    """The same for the blocks from `first` to `last`, of floats alone."""
    start = first * _FLOATS_BYTES
    return summed._replace(blocks=last - first, floats=summed.floats + start,
                           filled=max(summed.filled - first * BLOCK, 0),
                           errors=summed.errors and summed.errors + start)
