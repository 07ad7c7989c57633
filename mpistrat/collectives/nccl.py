"""Collectives on GPU arrays by NCCL: buckets are packed, reduced and unpacked on streams of their own.

Nothing here waits on the host. A lane has a communicator and two streams: bucket after bucket is packed and unpacked on
the first, and reduced on the second, with events in between. Of its two fusion buffers one is packed while the other is
reduced.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..gpu.arrays import GpuArray
from ..gpu.copy_plan import CopyJob, block_count, copy_table, fused_offsets
from ..gpu.nccl_types import DTYPES, OPERATIONS, UINT8, Wire, wire_of
from ..gpu.plane import Completion, GpuPlane
from ..messages import ReduceOp
from ..scale import Scale

_BUFFERS = 2


class NcclData(GpuPlane):
    """Collectives over communicators that nobody else uses.

    Halves are summed in halves, as NCCL has it: there is one rounding per rank. The order of a sum is NCCL's, the same
    on all ranks.

    Args:
        device: This rank's GPU.
        rank: This rank in the communicators.
        communicators: One for each lane, with the methods of cupy's NcclCommunicator.
        buffers: For each lane two fusion buffers of `buffer_bytes` each.
    """

    name = "nccl"

    def __init__(self, device: Any, rank: int, communicators: Sequence[Any], buffers: Sequence[Sequence[Any]],
                 buffer_bytes: int):
        self._rank, self._buffer_bytes = rank, buffer_bytes
        self._lanes = [Lane(device, *parts) for parts in zip(communicators, buffers, strict=True)]
        self._turn = 0

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp) -> str:
        wire = wire_of(arrays[0].dtype.name, op)
        if wire is None:
            return f"NCCL has no {op.name.lower()} of {arrays[0].dtype.name}"
        if self._is_direct(arrays, wire):
            return ""
        _, elements = fused_offsets([array.size * wire.parts for array in arrays], _narrowest(wire))
        nbytes = elements * np.dtype(_storage(wire.dtype)).itemsize
        if nbytes > self._buffer_bytes:
            return f"{nbytes} bytes of {arrays[0].dtype.name} do not fit into a fusion buffer of {self._buffer_bytes}"
        return ""

    def wait_for(self, events: Iterable[Any]) -> None:
        for event in events:
            for lane in self._lanes:
                lane.wait_for(event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], op: ReduceOp, prescale: float,
                  scale: Scale) -> None:
        wire = wire_of(sources[0].dtype.name, op)
        assert wire is not None, "why_not was not asked"
        if self._is_direct(sources, wire):
            self._next_lane().reduce_directly(sources[0], targets[0], wire, OPERATIONS[op], prescale, scale)
        else:
            self._next_lane().reduce_packed(sources, targets, wire, OPERATIONS[op], prescale, scale)

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        sizes = [count * source.dtype.itemsize for count in counts]
        self._next_lane().gather(self._rank, source.address, target.address, sizes)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._next_lane().broadcast(sources, targets, root_rank)

    def finish(self) -> Completion:
        completions = [lane.finish() for lane in self._lanes]
        return Completion([e for c in completions for e in c.events], [k for c in completions for k in c.kept])

    def check(self) -> None:
        for lane in self._lanes:
            lane.communicator.check_async_error()

    def abandon(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.communicator.abort()

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.communicator.destroy()

    def _next_lane(self) -> "Lane":
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)]

    @staticmethod
    def _is_direct(arrays: Sequence[GpuArray], wire: Wire) -> bool:
        """Whether there is nothing to pack: a single tensor is reduced from its memory to that of the result."""
        return len(arrays) == 1 and not wire.is_converted


class Lane:
    """A communicator with its streams and fusion buffers."""

    def __init__(self, device: Any, communicator: Any, buffers: Sequence[Any]):
        self.communicator = communicator
        self._device, self._buffers = device, buffers
        self._copies, self._reductions = device.stream(), device.stream()
        self._late: tuple[Any, Callable[[], None]] | None = None
        self._kept: list[Any] = []
        self._turn = 0

    def wait_for(self, event: Any) -> None:
        """Begin what follows after `event`."""
        self._device.wait(self._copies, event)

    def reduce_directly(self, source: GpuArray, target: GpuArray, wire: Wire, operation: int, prescale: float,
                        scale: Scale) -> None:
        """Reduce one tensor whose memory NCCL can work on."""
        count = source.size * wire.parts
        came_from = source.address if prescale == 1.0 else target.address

        def prepare() -> None:
            if prescale != 1.0:
                self._copy([source.address], [target.address], [count],
                           CopyJob.between(wire.memory, wire.memory, Scale(prescale)))

        def deliver() -> None:
            if not scale.is_identity:
                self._copy([target.address], [target.address], [count],
                           CopyJob.between(wire.memory, wire.memory, scale))

        if count:
            self._run(prepare, lambda: self.communicator.allReduce(
                came_from, target.address, count, DTYPES[wire.dtype], operation, self._reductions.ptr), deliver)

    def reduce_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: Wire, operation: int,
                      prescale: float, scale: Scale) -> None:
        """Reduce tensors by way of a fusion buffer."""
        self._turn += 1
        buffer = self._buffers[self._turn % _BUFFERS].address
        counts = [source.size * wire.parts for source in sources]
        offsets, total = fused_offsets(counts, _narrowest(wire))
        itemsize = np.dtype(_storage(wire.dtype)).itemsize
        places = [buffer + offset * itemsize for offset in offsets]
        if total:
            self._run(
                lambda: self._copy([source.address for source in sources], places, counts,
                                   CopyJob.between(wire.memory, wire.dtype, Scale(prescale))),
                lambda: self.communicator.allReduce(buffer, buffer, total, DTYPES[wire.dtype], operation,
                                                    self._reductions.ptr),
                lambda: self._copy(places, [target.address for target in targets], counts,
                                   CopyJob.between(wire.dtype, wire.memory, scale)))

    def gather(self, rank: int, source: int, target: int, sizes: Sequence[int]) -> None:
        """Concatenate `sizes[r]` bytes of each rank r at `target`."""
        def together() -> None:
            if len(set(sizes)) == 1:
                self.communicator.allGather(source, target, sizes[0], UINT8, self._reductions.ptr)
                return
            with self._device.nccl_group():
                start = target
                for root, size in enumerate(sizes):
                    if size:
                        self.communicator.broadcast(source if root == rank else start, start, size, UINT8, root,
                                                    self._reductions.ptr)
                    start += size

        if any(sizes):
            self._run(_nothing, together, _nothing)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write the root's `sources` to `targets`, as one operation of NCCL."""
        def together() -> None:
            with self._device.nccl_group():
                for source, target in zip(sources, targets, strict=True):
                    if source.nbytes:
                        self.communicator.broadcast(source.address, target.address, source.nbytes, UINT8, root_rank,
                                                    self._reductions.ptr)

        self._run(_nothing, together, _nothing)

    def finish(self) -> Completion:
        """See GpuPlane.finish."""
        self._deliver()
        kept, self._kept = self._kept, []
        return Completion([self._device.record(self._copies)], kept)

    def _run(self, prepare: Callable[[], None], reduce: Callable[[], None], deliver: Callable[[], None]) -> None:
        prepare()
        self._device.wait(self._reductions, self._device.record(self._copies))
        reduce()
        reduced = self._device.record(self._reductions)
        # Only now, so that the copies of the bucket before did not keep this one from being packed meanwhile.
        self._deliver()
        self._late = reduced, deliver

    def _deliver(self) -> None:
        if self._late is not None:
            (reduced, deliver), self._late = self._late, None
            self._device.wait(self._copies, reduced)
            deliver()

    def _copy(self, sources: Sequence[int], targets: Sequence[int], counts: Sequence[int], job: CopyJob) -> None:
        table = copy_table(sources, targets, counts)
        if len(table):
            self._kept.append(self._device.batched_copy(table, block_count(table), job, self._copies))


def _nothing() -> None:
    """For a collective without copies before or after it."""


def _storage(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype


def _narrowest(wire: Wire) -> int:
    """The bytes of a number where it is narrower, which decides how many of them make an aligned lump."""
    return min(np.dtype(_storage(name)).itemsize for name in (wire.memory, wire.dtype))
