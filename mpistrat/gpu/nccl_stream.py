"""One NCCL communicator with its pipeline: the NCCL calls of each collective, and the copies before and after them.

Buckets are packed and unpacked on one stream, and reduced on another, with events in between. One fusion buffer is
packed while the other one is reduced. Collectives without copies use only the second stream. NcclData (nccl_data.py)
distributes the buckets over several NcclStreams. All calls only enqueue work. Used by the engine's thread.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..core.arithmetic import Scale
from .arrays import GpuArray, GpuDevice, GpuEvent, GpuStream
from .copy.copy_plan import CopyJob, FusedCopies
from .nccl_types import DTYPES, UINT8, NcclCommunicator, NcclReduction, WireFormat

BUFFERS = 2  # More would have no effect: one bucket is packed while one other is reduced.


class NcclStream:
    """A communicator, two streams and two fusion buffers, reserved for this object.

    `communicator`: Of all ranks.
    """

    def __init__(self, device: GpuDevice, communicator: NcclCommunicator, buffers: Sequence[GpuArray]):
        self._device, self.communicator, self.buffers = device, communicator, list(buffers)
        # With priority over kernels of the training step. All ranks wait for the last one to begin a collective.
        self._copies, self._reductions = device.stream(is_urgent=True), device.stream(is_urgent=True)
        self._pending: tuple[GpuEvent, Callable[[], None]] | None = None  # event of a reduction, its unpack
        self._awaited: Sequence[GpuEvent] = ()
        self._begun: list[GpuStream] = []  # the streams that wait for these events
        self._turn = 0
        # The address of a number in pinned memory: results become NaN once it is not 0. Address 0: no number.
        self.lost = 0

    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        """Make all work enqueued from now on start after these events."""
        self._awaited, self._begun = events, []

    def finish(self) -> list[GpuEvent]:
        """Return events after all work enqueued since `wait_for`."""
        self._unpack_pending()
        return [self._device.record(stream) for stream in self._begun]

    def last_events(self) -> list[GpuEvent]:
        """Return events after all work. A bucket that has not been unpacked never will be."""
        return [self._device.record(stream) for stream in (self._reductions, self._copies)]

    def reduce_directly(self, source: int, target: int, count: int, wire: WireFormat, operation: int,
                        nbytes: int) -> None:
        """Reduce `count` numbers, of `nbytes` bytes, without a fusion buffer: NCCL uses the memory of the tensor."""
        self._begin(self._reductions)
        self.communicator.allReduce(source, target, count, DTYPES[wire.dtype], operation, self._reductions.ptr)
        self._guard(target, nbytes)

    def reduce_packed(self, sources: Sequence[int], targets: Sequence[int], copies: FusedCopies, wire: WireFormat,
                      reduction: NcclReduction) -> None:
        """Reduce tensors at these addresses, which fit into one fusion buffer, by packing them into it."""
        buffer = self._next_buffer()

        def reduce() -> None:
            self.communicator.allReduce(buffer, buffer, copies.total, DTYPES[wire.dtype], reduction.operation,
                                        self._reductions.ptr)

        self._run(lambda: self._pack(copies.to_buffer(sources, buffer), wire, reduction),
                  reduce, lambda: self._unpack(copies.from_buffer(buffer, targets), wire, reduction))

    def gather(self, rank: int, source: int, target: int, sizes: Sequence[int]) -> None:
        """Concatenate the ranks' bytes at `target`. Rank r has `sizes[r]` bytes."""
        if not any(sizes):
            return
        self._begin(self._reductions)
        if len(set(sizes)) == 1:
            self.communicator.allGather(source, target, sizes[0], UINT8, self._reductions.ptr)
        else:
            with self._device.nccl_group():
                start = target
                for root, size in enumerate(sizes):
                    if size:
                        self.communicator.broadcast(source if root == rank else start, start, size, UINT8, root,
                                                    self._reductions.ptr)
                    start += size
        self._guard(target, sum(sizes))

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write the root's `sources` to `targets`, as one NCCL operation."""
        self._begin(self._reductions)
        filled = [(source, target) for source, target in zip(sources, targets, strict=True) if source.nbytes]
        with self._device.nccl_group():
            for source, target in filled:
                self.communicator.broadcast(source.address, target.address, source.nbytes, UINT8, root_rank,
                                            self._reductions.ptr)
        for _, target in filled:
            self._guard(target.address, target.nbytes)

    def reduce_scatter(self, rank: int, source: GpuArray, target: GpuArray, counts: Sequence[int], wire: WireFormat,
                       reduction: NcclReduction) -> None:
        """Reduce `source` and keep this rank's part. Rank r's part has `counts[r]` elements."""
        parts = [count * wire.parts for count in counts]
        is_direct = reduction.prescale == 1.0 and not wire.is_converted
        input_address, itemsize = source.address if is_direct else self._next_buffer(), wire.itemsize
        output_address = target.address if is_direct else input_address + sum(parts[:rank]) * itemsize

        def copies(count: int) -> FusedCopies:
            return FusedCopies([count], wire.memory_bytes, itemsize)

        def pack() -> None:
            if not is_direct:
                self._pack(copies(sum(parts)).to_buffer([source.address], input_address), wire, reduction)

        def enqueue() -> None:
            number, operation, stream = DTYPES[wire.dtype], reduction.operation, self._reductions.ptr
            if len(set(parts)) == 1:
                self.communicator.reduceScatter(input_address, output_address, parts[0], number, operation, stream)
                return
            with self._device.nccl_group():
                start = input_address
                for root, count in enumerate(parts):
                    if count:
                        output = output_address if root == rank else start
                        self.communicator.reduce(start, output, count, number, operation, root, stream)
                    start += count * itemsize

        if not any(parts):
            return
        if is_direct and reduction.scale.is_identity:
            self._begin(self._reductions)
            enqueue()
            self._guard(target.address, target.nbytes)
        else:
            self._run(pack, enqueue, lambda: self._unpack(
                copies(parts[rank]).from_buffer(output_address, [target.address]), wire, reduction))

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send rank r the next `sent[r]` bytes at `source`, and receive `received[r]` bytes from it at `target`."""
        if not (any(sent) or any(received)):
            return
        self._begin(self._reductions)
        sending, receiving = source, target
        with self._device.nccl_group():
            for peer, (to_peer, from_peer) in enumerate(zip(sent, received, strict=True)):
                if to_peer:
                    self.communicator.send(sending, to_peer, UINT8, peer, self._reductions.ptr)
                if from_peer:
                    self.communicator.recv(receiving, from_peer, UINT8, peer, self._reductions.ptr)
                sending, receiving = sending + to_peer, receiving + from_peer
        self._guard(target, sum(received))

    # -- the pipeline -------------------------------------------------------------------------------------------------

    def _next_buffer(self) -> int:
        """The address of the buffer to use next. The stream unpacks its former bucket before it packs the next one."""
        self._turn += 1
        return int(self.buffers[self._turn % BUFFERS].address)

    def _begin(self, stream: GpuStream) -> None:
        if stream not in self._begun:
            self._begun.append(stream)
            for event in self._awaited:
                self._device.wait(stream, event)

    def _run(self, pack: Callable[[], None], reduce: Callable[[], None], unpack: Callable[[], None]) -> None:
        self._begin(self._copies)
        pack()
        self._device.wait(self._reductions, self._device.record(self._copies))
        reduce()
        reduced = self._device.record(self._reductions)
        # Unpack the previous bucket only now, so that this bucket was packed while the previous one was reduced.
        self._unpack_pending()
        self._pending = reduced, unpack

    def _unpack_pending(self) -> None:
        if self._pending is not None:
            (reduced, unpack), self._pending = self._pending, None
            self._device.wait(self._copies, reduced)
            unpack()

    def _pack(self, launches: Sequence[tuple[np.ndarray, int]], wire: WireFormat, reduction: NcclReduction) -> None:
        job = CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale))
        for table, blocks in launches:
            self._device.batched_copy(table, blocks, job, self._copies)

    def _unpack(self, launches: Sequence[tuple[np.ndarray, int]], wire: WireFormat, reduction: NcclReduction) -> None:
        job = CopyJob.between(wire.dtype, wire.memory, reduction.scale)
        for table, blocks in launches:
            self._device.batched_copy(table, blocks, job, self._copies, self.lost)

    def _guard(self, target: int, nbytes: int) -> None:
        if self.lost and nbytes:
            self._device.guard(target, nbytes, self.lost, self._reductions)
