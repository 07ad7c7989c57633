"""Buckets on their way through fusion buffers: what is packed, reduced and unpacked when, on two streams.

Bucket after bucket is packed and unpacked on the first stream, and reduced on the second, with events in between. Of
two fusion buffers one is packed while the other is reduced.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.arithmetic import Reduction, Scale
from .arrays import GpuArray
from .backend import Completion
from .copy.plan import ALIGNMENT, CopyJob, block_count, copy_table, fused_offsets
from .nccl.types import WireFormat, narrowest, storage

BUFFERS = 2


class Pipeline:
    """Two streams and two fusion buffers.

    Args:
        device: This rank's GPU.
        buffers: The fusion buffers.
    """

    def __init__(self, device: Any, buffers: Sequence[GpuArray]):
        self._device, self._buffers = device, buffers
        self._copies, self._reductions = device.stream(), device.stream()
        self._late: tuple[Any, Callable[[], None]] | None = None
        self._kept: list[Any] = []
        self._turn = 0

    def wait_for(self, event: Any) -> None:
        """Begin what follows after `event`."""
        self._device.wait(self._copies, event)

    def finish(self) -> Completion:
        """See GpuBackend.finish."""
        self._deliver()
        kept, self._kept = self._kept, []
        return Completion([self._device.record(self._copies)], kept)

    def _next_buffer(self) -> int:
        """The address of the buffer that is free: what it held two turns ago is unpacked before it is written to."""
        self._turn += 1
        return int(self._buffers[self._turn % BUFFERS].address)

    def _run(self, prepare: Callable[[], None], reduce: Callable[[], None], deliver: Callable[[], None]) -> None:
        prepare()
        self._device.wait(self._reductions, self._device.record(self._copies))
        reduce()
        reduced = self._device.record(self._reductions)
        # Only now, so that the copies of the bucket before did not keep this one from being packed meanwhile.
        self._deliver()
        self._late = reduced, deliver

    def _run_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: WireFormat,
                    reduction: Reduction,
                    reduce: Callable[[int, int], None]) -> None:
        """Reduce tensors that fit into a fusion buffer together by way of one; nothing is done for none of elements.

        `reduce(address, elements)` enqueues the reduction of what is packed in the buffer, elements of the wire's
        dtype.
        """
        counts = [source.size * wire.parts for source in sources]
        offsets, total = fused_offsets(counts, narrowest(wire))
        if not total:
            return
        buffer, itemsize = self._next_buffer(), np.dtype(storage(wire.dtype)).itemsize
        places = [buffer + offset * itemsize for offset in offsets]
        self._run(lambda: self._copy([source.address for source in sources], places, counts,
                                     CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale))),
                  lambda: reduce(buffer, total),
                  lambda: self._copy(places, [target.address for target in targets], counts,
                                     CopyJob.between(wire.dtype, wire.memory, reduction.scale)))

    def _deliver(self) -> None:
        if self._late is not None:
            (reduced, deliver), self._late = self._late, None
            self._device.wait(self._copies, reduced)
            deliver()

    def _copy(self, sources: Sequence[int], targets: Sequence[int], counts: Sequence[int], job: CopyJob) -> None:
        table = copy_table(sources, targets, counts)
        if len(table):
            self._kept.append(self._device.batched_copy(table, block_count(table), job, self._copies))


def pieces(source: GpuArray, target: GpuArray, wire: WireFormat, nbytes: int) -> Iterator[tuple[GpuArray, GpuArray]]:
    """A tensor and its result, cut so that each piece fits into a buffer of `nbytes`."""
    number_bytes = np.dtype(storage(wire.dtype)).itemsize
    step = nbytes // (number_bytes * ALIGNMENT) * ALIGNMENT // wire.parts
    for start in range(0, source.size, step):
        count, first = min(step, source.size - start), start * source.dtype.itemsize
        yield (GpuArray(source.address + first, (count,), source.dtype),
               GpuArray(target.address + first, (count,), target.dtype))
