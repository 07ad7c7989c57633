"""One NCCL communicator with its pipeline: the NCCL calls of each collective, and the copies before and after them.

Buckets are packed and unpacked on one stream, and reduced on another, with events in between. One fusion buffer is
packed while the other one is reduced. What needs no copies is only on the second stream. NcclData (data.py) deals the
buckets out to several NcclStreams. All calls only enqueue work. Used by the engine's thread.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ...core.arithmetic import Scale
from ..arrays import GpuArray, GpuDevice, GpuEvent, GpuStream
from ..copy.plan import CopyJob, FusedCopies, KeptCopies
from .types import DTYPES, UINT8, NcclCommunicator, NcclReduction, WireFormat

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
        self._begun: list[GpuStream] = []  # those that wait for these events
        self._turn = self._lost = 0

    def guard_results(self, lost: int) -> None:
        """Turn all results into NaN from now on, once there is a number at the address `lost`, in pinned memory."""
        self._lost = lost

    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        """Make all work enqueued from now on start after these events."""
        self._awaited, self._begun = events, []

    def finish(self) -> list[GpuEvent]:
        """Return events after all work enqueued since `wait_for`."""
        self._unpack_pending()
        return [self._device.record(stream) for stream in self._begun]

    def last_events(self) -> list[GpuEvent]:
        """Return events after all work. What has not been unpacked never is."""
        return [self._device.record(stream) for stream in (self._reductions, self._copies)]

    def reduce_directly(self, source: int, target: int, copies: KeptCopies, count: int, wire: WireFormat,
                        reduction: NcclReduction) -> None:
        """Reduce one tensor without a fusion buffer. NCCL reads and writes the tensors' own memory.

        Args:
            source, target: Addresses.
            copies: Of an array of `count` elements.
            count: Numbers in the tensor, more than 0.
        """
        is_scaled_before, is_scaled_after = reduction.prescale != 1.0, not reduction.scale.is_identity

        def reduce() -> None:
            self.communicator.allReduce(target if is_scaled_before else source, target, count, DTYPES[wire.dtype],
                                        reduction.operation, self._reductions.ptr)

        if not (is_scaled_before or is_scaled_after):
            self._run_directly(reduce, copies, [target], wire.memory_bytes)
            return

        def pack() -> None:
            if is_scaled_before:
                self._copy(copies.between([source], [target]),
                           CopyJob.between(wire.memory, wire.memory, Scale(reduction.prescale)))

        def unpack() -> None:
            if is_scaled_after:
                self._copy(copies.between([target], [target]),
                           CopyJob.between(wire.memory, wire.memory, reduction.scale))
            self._guard(copies.to([target]), wire.memory_bytes, self._copies)

        self._run(pack, reduce, unpack)

    def reduce_packed(self, sources: Sequence[int], targets: Sequence[int], copies: FusedCopies, wire: WireFormat,
                      reduction: NcclReduction) -> None:
        """Reduce tensors at these addresses, which fit into one fusion buffer, by packing them into it."""
        buffer = self._next_buffer()

        def unpack() -> None:
            launches = copies.from_buffer(buffer, targets)
            self._copy(launches, CopyJob.between(wire.dtype, wire.memory, reduction.scale))
            self._guard(launches, wire.memory_bytes, self._copies)

        def reduce() -> None:
            self.communicator.allReduce(buffer, buffer, copies.total, DTYPES[wire.dtype], reduction.operation,
                                        self._reductions.ptr)

        self._run(lambda: self._copy(copies.to_buffer(sources, buffer),
                                     CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale))),
                  reduce, unpack)

    def gather(self, rank: int, source: int, target: int, sizes: Sequence[int]) -> None:
        """Concatenate the ranks' bytes at `target`. Rank r has `sizes[r]` bytes."""
        def enqueue() -> None:
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
            self._run_directly(enqueue, KeptCopies([sum(sizes)]), [target])

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write the root's `sources` to `targets`, as one NCCL operation."""
        def enqueue() -> None:
            with self._device.nccl_group():
                for source, target in zip(sources, targets, strict=True):
                    if source.nbytes:
                        self.communicator.broadcast(source.address, target.address, source.nbytes, UINT8, root_rank,
                                                    self._reductions.ptr)

        self._run_directly(enqueue, KeptCopies([target.nbytes for target in targets]),
                           [target.address for target in targets])

    def reduce_scatter(self, rank: int, source: GpuArray, target: GpuArray, counts: Sequence[int], wire: WireFormat,
                       reduction: NcclReduction) -> None:
        """Reduce `source` and keep this rank's part. Rank r's part has `counts[r]` elements."""
        parts = [count * wire.parts for count in counts]
        is_direct = reduction.prescale == 1.0 and not wire.is_converted
        input_address, itemsize = source.address if is_direct else self._next_buffer(), wire.itemsize
        output_address = target.address if is_direct else input_address + sum(parts[:rank]) * itemsize

        def pack() -> None:
            if not is_direct:
                self._copy(KeptCopies([sum(parts)]).between([source.address], [input_address]),
                           CopyJob.between(wire.memory, wire.dtype, Scale(reduction.prescale)))

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

        def unpack() -> None:
            launches = KeptCopies([parts[rank]]).between([output_address], [target.address])
            if not is_direct or not reduction.scale.is_identity:
                self._copy(launches, CopyJob.between(wire.dtype, wire.memory, reduction.scale))
            self._guard(launches, wire.memory_bytes, self._copies)

        if any(parts):
            self._run(pack, enqueue, unpack)

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send rank r the next `sent[r]` bytes at `source`, and receive `received[r]` bytes from it at `target`."""
        def enqueue() -> None:
            sending, receiving = source, target
            with self._device.nccl_group():
                for peer, (to_peer, from_peer) in enumerate(zip(sent, received, strict=True)):
                    if to_peer:
                        self.communicator.send(sending, to_peer, UINT8, peer, self._reductions.ptr)
                    if from_peer:
                        self.communicator.recv(receiving, from_peer, UINT8, peer, self._reductions.ptr)
                    sending, receiving = sending + to_peer, receiving + from_peer

        if any(sent) or any(received):
            self._run_directly(enqueue, KeptCopies([sum(received)]), [target])

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

    def _run_directly(self, reduce: Callable[[], None], results: KeptCopies, targets: Sequence[int],
                      itemsize: int = 1) -> None:
        """Run what needs no copies. `results` are those at the addresses `targets`, of elements of `itemsize` bytes."""
        self._begin(self._reductions)
        reduce()
        self._guard(results.to(targets), itemsize, self._reductions)

    def _run(self, pack: Callable[[], None], reduce: Callable[[], None], unpack: Callable[[], None]) -> None:
        self._begin(self._copies)
        pack()
        self._device.wait(self._reductions, self._device.record(self._copies))
        reduce()
        reduced = self._device.record(self._reductions)
        # Unpack the bucket before only now, so that this bucket was packed while that one was reduced.
        self._unpack_pending()
        self._pending = reduced, unpack

    def _unpack_pending(self) -> None:
        if self._pending is not None:
            (reduced, unpack), self._pending = self._pending, None
            self._device.wait(self._copies, reduced)
            unpack()

    def _copy(self, launches: Sequence[tuple[np.ndarray, int]], job: CopyJob) -> None:
        for table, blocks in launches:
            self._device.batched_copy(table, blocks, job, self._copies)

    def _guard(self, launches: Sequence[tuple[np.ndarray, int]], itemsize: int, stream: GpuStream) -> None:
        """Guard the targets of copies, whose elements have `itemsize` bytes."""
        if self._lost:
            for table, _ in launches:
                self._device.guard(table, itemsize, self._lost, stream)
