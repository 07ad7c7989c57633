"""One communicator of NCCL with its pipeline: which of NCCL's calls a collective is, between which copies."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.arithmetic import Reduction, Scale
from ...core.request import ReduceOp
from ..arrays import GpuArray
from ..copy.plan import CopyJob
from ..pipeline import Pipeline
from .types import DTYPES, OPERATIONS, UINT8, WireFormat, storage


class NcclStream(Pipeline):
    """A communicator, and a pipeline that nobody else uses."""

    def __init__(self, device: Any, communicator: Any, buffers: Sequence[GpuArray]):
        super().__init__(device, buffers)
        self.communicator = communicator

    def reduce_directly(self, source: GpuArray, target: GpuArray, wire: WireFormat, reduction: Reduction) -> None:
        """Reduce one tensor whose memory NCCL can work on."""
        count = source.size * wire.parts
        came_from = source.address if reduction.prescale == 1.0 else target.address

        def prepare() -> None:
            if reduction.prescale != 1.0:
                self._copy([source.address], [target.address], [count],
                           CopyJob.between(wire.memory, wire.memory, Scale(reduction.prescale)))

        def deliver() -> None:
            if not reduction.scale.is_identity:
                self._copy([target.address], [target.address], [count],
                           CopyJob.between(wire.memory, wire.memory, reduction.scale))

        if count:
            self._run(prepare, lambda: self.communicator.allReduce(
                came_from, target.address, count, DTYPES[wire.dtype], OPERATIONS[reduction.op],
                self._reductions.ptr), deliver)

    def reduce_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: WireFormat,
                      reduction: Reduction) -> None:
        """Reduce tensors by way of a fusion buffer."""
        self._run_packed(sources, targets, wire, reduction, lambda buffer, total: self.communicator.allReduce(
            buffer, buffer, total, DTYPES[wire.dtype], OPERATIONS[reduction.op], self._reductions.ptr))

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

    def reduce_scatter(self, rank: int, source: GpuArray, target: GpuArray, counts: Sequence[int], wire: WireFormat,
                       reduction: Reduction) -> None:
        """Reduce `source` and keep the part of this rank; rank r's has `counts[r]` elements."""
        parts = [count * wire.parts for count in counts]
        is_direct = reduction.prescale == 1.0 and not wire.is_converted
        came_from = source.address if is_direct else self._next_buffer()
        itemsize = np.dtype(storage(wire.dtype)).itemsize
        goes_to = target.address if is_direct else came_from + sum(parts[:rank]) * itemsize

        def prepare() -> None:
            if not is_direct:
                self._copy([source.address], [came_from], [sum(parts)],
                           CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale)))

        def together() -> None:
            number, operation, stream = DTYPES[wire.dtype], OPERATIONS[reduction.op], self._reductions.ptr
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
            if not is_direct or not reduction.scale.is_identity:
                self._copy([goes_to], [target.address], [parts[rank]],
                           CopyJob.between(wire.dtype, wire.memory, reduction.scale))

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


def _nothing() -> None:
    """For a collective without copies before or after it."""
