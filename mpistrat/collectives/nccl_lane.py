"""One communicator of NCCL with its streams and fusion buffers: what is enqueued, where, and after what.

Bucket after bucket is packed and unpacked on the first stream, and reduced on the second, with events in between. Of
two fusion buffers one is packed while the other is reduced.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..gpu.arrays import GpuArray
from ..gpu.copy_plan import ALIGNMENT, CopyJob, block_count, copy_table, fused_offsets
from ..gpu.nccl_types import DTYPES, OPERATIONS, UINT8, Wire, narrowest, storage
from ..gpu.plane import Completion
from ..messages import ReduceOp
from ..scale import Scale

_BUFFERS = 2


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

    def reduce_directly(self, source: GpuArray, target: GpuArray, wire: Wire, op: ReduceOp, prescale: float,
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
                came_from, target.address, count, DTYPES[wire.dtype], OPERATIONS[op], self._reductions.ptr), deliver)

    def reduce_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: Wire, op: ReduceOp,
                      prescale: float, scale: Scale) -> None:
        """Reduce tensors by way of a fusion buffer."""
        buffer = self._next_buffer()
        counts = [source.size * wire.parts for source in sources]
        offsets, total = fused_offsets(counts, narrowest(wire))
        itemsize = np.dtype(storage(wire.dtype)).itemsize
        places = [buffer + offset * itemsize for offset in offsets]
        if total:
            self._run(
                lambda: self._copy([source.address for source in sources], places, counts,
                                   CopyJob.between(wire.memory, wire.dtype, Scale(prescale))),
                lambda: self.communicator.allReduce(buffer, buffer, total, DTYPES[wire.dtype], OPERATIONS[op],
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

    def reduce_scatter(self, rank: int, source: GpuArray, target: GpuArray, counts: Sequence[int], wire: Wire,
                       op: ReduceOp, prescale: float, scale: Scale) -> None:
        """Reduce `source` and keep the part of this rank; rank r's has `counts[r]` elements."""
        parts = [count * wire.parts for count in counts]
        is_direct = prescale == 1.0 and not wire.is_converted
        came_from = source.address if is_direct else self._next_buffer()
        itemsize = np.dtype(storage(wire.dtype)).itemsize
        goes_to = target.address if is_direct else came_from + sum(parts[:rank]) * itemsize

        def prepare() -> None:
            if not is_direct:
                self._copy([source.address], [came_from], [sum(parts)],
                           CopyJob.between(wire.memory, wire.dtype, Scale(prescale)))

        def together() -> None:
            number, operation, stream = DTYPES[wire.dtype], OPERATIONS[op], self._reductions.ptr
            if len(set(parts)) == 1:
                self.communicator.reduceScatter(came_from, goes_to, parts[0], number, operation, stream)
                return
            with self._device.nccl_group():
                start = came_from
                for root, count in enumerate(parts):
                    if count:
                        self.communicator.reduce(start, goes_to if root == rank else start, count, number, operation,
                                                 root, stream)
                    start += count * itemsize

        def deliver() -> None:
            if not is_direct or not scale.is_identity:
                self._copy([goes_to], [target.address], [parts[rank]],
                           CopyJob.between(wire.dtype, wire.memory, scale))

        if any(parts):
            self._run(prepare, together, deliver)

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send `sent[r]` bytes, one after the other at `source`, to each rank r; `received[r]` come from it."""
        def together() -> None:
            out, into = source, target
            with self._device.nccl_group():
                for peer, (there, back) in enumerate(zip(sent, received, strict=True)):
                    if there:
                        self.communicator.send(out, there, UINT8, peer, self._reductions.ptr)
                    if back:
                        self.communicator.recv(into, back, UINT8, peer, self._reductions.ptr)
                    out, into = out + there, into + back

        if any(sent) or any(received):
            self._run(_nothing, together, _nothing)

    def meet(self) -> None:
        """Go on when all ranks have come here: NCCL has no barrier, so a byte is reduced."""
        buffer = self._next_buffer()
        self._run(_nothing, lambda: self.communicator.allReduce(
            buffer, buffer, 1, UINT8, OPERATIONS[ReduceOp.MAX], self._reductions.ptr), _nothing)

    def finish(self) -> Completion:
        """See GpuPlane.finish."""
        self._deliver()
        kept, self._kept = self._kept, []
        return Completion([self._device.record(self._copies)], kept)

    def _next_buffer(self) -> int:
        """The address of the buffer that is free: what it held two turns ago is unpacked before it is written to."""
        self._turn += 1
        return int(self._buffers[self._turn % _BUFFERS].address)

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


def pieces(source: GpuArray, target: GpuArray, wire: Wire, nbytes: int) -> Iterator[tuple[GpuArray, GpuArray]]:
    """A tensor and its result, cut so that each piece fits into a buffer of `nbytes`."""
    number_bytes = np.dtype(storage(wire.dtype)).itemsize
    step = nbytes // (number_bytes * ALIGNMENT) * ALIGNMENT // wire.parts
    for start in range(0, source.size, step):
        count, first = min(step, source.size - start), start * source.dtype.itemsize
        yield (GpuArray(source.address + first, (count,), source.dtype),
               GpuArray(target.address + first, (count,), target.dtype))


def _nothing() -> None:
    """For a collective without copies before or after it."""
