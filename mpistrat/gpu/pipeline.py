"""Pipelines buckets through two fusion buffers and two streams.

Buckets are packed and unpacked on the first stream, and reduced on the second, with events in between. One buffer is
packed while the other one is reduced. Used by the engine's thread.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..core.arithmetic import Scale
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import Completion
from .copy.plan import ALIGNMENT, CopyJob, block_count, copy_tables, fused_offsets
from .nccl.types import NcclReduction, WireFormat, narrowest, storage

BUFFERS = 2  # More would have no effect: one bucket is packed while one other is reduced.


class Pipeline:
    """Two streams and two fusion buffers.

    Args:
        device: This rank's GPU.
        buffers: The fusion buffers.
    """

    def __init__(self, device: GpuDevice, buffers: Sequence[GpuArray]):
        self._device, self._buffers = device, buffers
        # With priority over kernels of the training step. All ranks wait for the last one to begin a collective.
        self._copies, self._reductions = device.stream(is_urgent=True), device.stream(is_urgent=True)
        self._pending: tuple[GpuEvent, Callable[[], None]] | None = None  # event of a reduction, its unpack
        self._turn = 0

    def wait_for(self, event: GpuEvent) -> None:
        """Make all work enqueued from now on start after `event`."""
        self._device.wait(self._copies, event)

    def finish(self) -> Completion:
        """See GpuBackend.finish."""
        self._unpack_pending()
        return Completion([self._device.record(self._copies)])

    def _next_buffer(self) -> int:
        """The address of the buffer to use next. The stream unpacks its former bucket before it packs the next one."""
        self._turn += 1
        return int(self._buffers[self._turn % BUFFERS].address)

    def _run(self, pack: Callable[[], None], reduce: Callable[[], None], unpack: Callable[[], None]) -> None:
        pack()
        self._device.wait(self._reductions, self._device.record(self._copies))
        reduce()
        reduced = self._device.record(self._reductions)
        # Unpack the bucket before only now, so that this bucket was packed while that one was reduced.
        self._unpack_pending()
        self._pending = reduced, unpack

    def _run_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: WireFormat,
                    reduction: NcclReduction, reduce: Callable[[int, int], None]) -> None:
        """Reduce tensors that fit into one fusion buffer by packing them into it. Does nothing for no elements.

        `reduce(address, elements)` enqueues the reduction of the packed elements, which are of the dtype `wire.dtype`.
        """
        counts = [source.size * wire.parts for source in sources]
        offsets, total = fused_offsets(counts, narrowest(wire))
        if not total:
            return
        buffer, itemsize = self._next_buffer(), np.dtype(storage(wire.dtype)).itemsize
        addresses = [buffer + offset * itemsize for offset in offsets]
        self._run(lambda: self._copy([source.address for source in sources], addresses, counts,
                                     CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale))),
                  lambda: reduce(buffer, total),
                  lambda: self._copy(addresses, [target.address for target in targets], counts,
                                     CopyJob.between(wire.dtype, wire.memory, reduction.scale)))

    def _unpack_pending(self) -> None:
        if self._pending is not None:
            (reduced, unpack), self._pending = self._pending, None
            self._device.wait(self._copies, reduced)
            unpack()

    def _copy(self, sources: Sequence[int], targets: Sequence[int], counts: Sequence[int], job: CopyJob) -> None:
        for table in copy_tables(sources, targets, counts):
            self._device.batched_copy(table, block_count(table), job, self._copies)


def split_to_fit(source: GpuArray, target: GpuArray, wire: WireFormat,
                 nbytes: int) -> Iterator[tuple[GpuArray, GpuArray]]:
    """Split a tensor and its result into pieces that fit into a buffer of `nbytes`."""
    number_bytes = np.dtype(storage(wire.dtype)).itemsize
    step = nbytes // (number_bytes * ALIGNMENT) * ALIGNMENT // wire.parts
    for start in range(0, source.size, step):
        count, first = min(step, source.size - start), start * source.dtype.itemsize
        yield (GpuArray(source.address + first, (count,), source.dtype, None),
               GpuArray(target.address + first, (count,), target.dtype, None))
