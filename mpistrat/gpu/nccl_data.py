"""Backend for GPU arrays over NCCL. All calls only enqueue work, and the host never waits. For the engine's thread.

NcclData chooses the wire format and the communicator of each collective. An NcclStream has one communicator, and
enqueues each NCCL call with the copies before and after it. Buckets are packed and unpacked on one CUDA stream, and
reduced on a second one. Events order the two streams. One fusion buffer is packed while the other one is reduced.
Collectives without copies use only the second stream.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from threading import Lock
from typing import NamedTuple

import numpy as np

from ..core.arithmetic import IDENTITY, Reduction, Scale
from ..core.errors import EngineError
from ..core.request import ReduceOp
from .arrays import GpuArray, GpuDevice, GpuEvent, GpuStream, NcclCommunicator
from .backend import GpuBackend, Reducer
from .copy_kernel import ALIGNMENT, CopyJob, FusedCopies, fused_offsets

# NCCL's numbers for dtypes and operations, from nccl.h of NCCL 2.32.
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
DTYPES = {"int8": INT8, "uint8": UINT8, "int32": INT32, "uint32": UINT32, "int64": INT64, "uint64": UINT64,
          "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64, "bfloat16": BFLOAT16}
OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
AVERAGE = 4
# The first version code with AVERAGE. NCCL divides the floating-point numbers of each rank before it sums them, so that
# a sum in half precision does not overflow.
AVERAGES_FROM = 21000
BUFFERS = 2  # More would have no effect: one bucket is packed while one other is reduced.

# Truncated sums and products of the wider integers equal those of the narrow ones.
_WIDER = {"int16": "int32", "uint16": "uint32"}
_WIDE = ("float32", "float64")
_FLOATS = ("float16", "bfloat16", *_WIDE)
_PARTS = {"complex64": "float32", "complex128": "float64"}

# -- wire formats ------------------------------------------------------------------------------------------------------


class WireFormat(NamedTuple):
    """How NCCL sends an element: 1 or 2 numbers (`parts`). `memory`: Their dtype in the tensor; `dtype`: as sent."""

    memory: str
    dtype: str
    parts: int = 1

    @property
    def is_converted(self) -> bool:
        return self.memory != self.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of one number as it is sent."""
        return _itemsize(self.dtype)

    @property
    def memory_bytes(self) -> int:
        return _itemsize(self.memory)


@cache
def _itemsize(dtype: str) -> int:
    # numpy knows bfloat16 only with ml_dtypes.
    return np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize


def wire_format(dtype: str, op: ReduceOp, wire_dtype: str = "") -> WireFormat | None:
    """Return the format in which NCCL can reduce `dtype`, or None. Only float32 and float64 use `wire_dtype`."""
    if wire_dtype and dtype in _WIDE:
        return WireFormat(dtype, wire_dtype)
    if dtype in DTYPES:
        return WireFormat(dtype, dtype)
    if dtype in _WIDER:
        return WireFormat(dtype, _WIDER[dtype])
    if dtype == "bool":
        # Minimum, maximum and product of zeros and ones are zeros and ones.
        return WireFormat("uint8", "uint8")
    if dtype in _PARTS and op is ReduceOp.SUM:
        return WireFormat(_PARTS[dtype], _PARTS[dtype], 2)
    return None


class NcclReduction(NamedTuple):
    """A reduction by NCCL: multiply by `prescale`, reduce by NCCL's `operation`, and apply `scale` to the result."""

    operation: int
    prescale: float
    scale: Scale


def nccl_reduction(reduction: Reduction, wire: WireFormat, size: int, version: int) -> NcclReduction:
    """Return how NCCL does `reduction` among `size` ranks. `version`: NCCL's version code.

    An average of floats over all ranks without other factors is ncclAvg. All other averages are a scaled sum.
    """
    scale = reduction.scale
    if (reduction.op is ReduceOp.SUM and 1 < size == scale.divisor and (reduction.prescale, scale.factor) == (1.0, 1.0)
            and wire.dtype in _FLOATS and version >= AVERAGES_FROM):
        return NcclReduction(AVERAGE, 1.0, IDENTITY)
    return NcclReduction(OPERATIONS[reduction.op], reduction.prescale, scale)


# -- one communicator --------------------------------------------------------------------------------------------------


class NcclStream:
    """A communicator of all ranks, with two CUDA streams and two fusion buffers. No other object uses them."""

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
        """Enqueue the last unpacking. Return events that follow all work enqueued since `wait_for`."""
        self._unpack_pending()
        return [self._device.record(stream) for stream in self._begun]

    def last_events(self) -> list[GpuEvent]:
        """Return events that follow all enqueued work. Unlike `finish`, this enqueues no unpacking."""
        return [self._device.record(stream) for stream in (self._reductions, self._copies)]

    def reduce_directly(self, source: int, target: int, count: int, wire: WireFormat, operation: int,
                        nbytes: int) -> None:
        """All-reduce `count` numbers (`nbytes` bytes) from address `source` to `target`. Uses no fusion buffer."""
        self._begin(self._reductions)
        self.communicator.allReduce(source, target, count, DTYPES[wire.dtype], operation, self._reductions.ptr)
        self._guard(target, nbytes)

    def reduce_packed(self, sources: Sequence[int], targets: Sequence[int], copies: FusedCopies, wire: WireFormat,
                      reduction: NcclReduction) -> None:
        """All-reduce the tensors at these addresses in a fusion buffer, into which all of them must fit."""
        buffer = self._next_buffer()

        self._run(lambda: self._pack(copies.to_buffer(sources, buffer), wire, reduction),
                  lambda: self.communicator.allReduce(buffer, buffer, copies.total, DTYPES[wire.dtype],
                                                      reduction.operation, self._reductions.ptr),
                  lambda: self._unpack(copies.from_buffer(buffer, targets), wire, reduction))

    def gather(self, rank: int, source: int, target: int, sizes: Sequence[int]) -> None:
        """Concatenate the bytes of all ranks at the address `target`, in rank order. Rank r has `sizes[r]` bytes."""
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
        """Copy the `sources` of rank `root_rank` to the `targets` of all ranks, in one NCCL group."""
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
        """Reduce `source`, and write the part of this rank to `target`. The part of rank r has `counts[r]` elements."""
        parts = [count * wire.parts for count in counts]
        if not any(parts):
            return
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

        if is_direct and reduction.scale.is_identity:
            self._begin(self._reductions)
            enqueue()
            self._guard(target.address, target.nbytes)
        else:
            self._run(pack, enqueue, lambda: self._unpack(
                copies(parts[rank]).from_buffer(output_address, [target.address]), wire, reduction))

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send `sent[r]` bytes to each rank r, and receive `received[r]`. At both addresses they are in rank order."""
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
        """Return the address of the fusion buffer to pack next, the one that was not packed last."""
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
        job = CopyJob(wire.memory, wire.dtype, reduction.prescale)
        for table, blocks in launches:
            self._device.batched_copy(table, blocks, job, self._copies)

    def _unpack(self, launches: Sequence[tuple[np.ndarray, int]], wire: WireFormat, reduction: NcclReduction) -> None:
        job = CopyJob(wire.dtype, wire.memory, reduction.scale.factor, reduction.scale.divisor)
        for table, blocks in launches:
            self._device.batched_copy(table, blocks, job, self._copies, self.lost)

    def _guard(self, target: int, nbytes: int) -> None:
        if self.lost and nbytes:
            self._device.guard(target, nbytes, self.lost, self._reductions)


# -- the backend -------------------------------------------------------------------------------------------------------


class NcclData(GpuBackend):
    """Collectives by NCCL. No other object may use the communicators and the buffers.

    NCCL sums half precision in half precision, with one rounding per rank. NCCL chooses the order of a sum, the same on
    all ranks.

    Args:
        communicators: One for each NcclStream. `close` destroys them.
        buffers: Two fusion buffers of `buffer_bytes` for each NcclStream.
        buffer_bytes: The size of a fusion buffer in bytes.
        version: NCCL's version code.
        is_alone: Whether no other process set uses NCCL on the GPU of any of these ranks.
    """

    def __init__(self, device: GpuDevice, rank: int, size: int, communicators: Sequence[NcclCommunicator],
                 buffers: Sequence[Sequence[GpuArray]], buffer_bytes: int, version: int, is_alone: bool = True):
        self.is_alone, self.buffer, self.buffer_bytes = is_alone, buffers[0][0], buffer_bytes
        self._device, self._lost = device, np.zeros(0, np.uint8)
        self._rank, self._size, self._version = rank, size, version
        self._streams = [NcclStream(device, *parts) for parts in zip(communicators, buffers, strict=True)]
        self._all_streams = tuple(self._streams)  # also after the communicators were destroyed
        self._turn, self._lock = 0, Lock()

    def guard_results(self) -> None:
        """From now on, fill results with NaN if a revoke or an abort comes before the results are complete."""
        self._lost = self._device.pinned(4)
        self._lost[:] = 0
        for stream in self._streams:
            stream.lost = self._lost.ctypes.data

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        wire = wire_format(arrays[0].dtype.name, op, wire_dtype)
        if wire is None:
            return f"NCCL has no {op.name.lower()} of {arrays[0].dtype.name}"
        # A single array needs no buffer, or is split into pieces that fit.
        return "" if len(arrays) == 1 else self._why_no_room(arrays, wire)

    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        wire = wire_format(source.dtype.name, reduction.op)
        if wire is None:
            return f"NCCL has no {reduction.op.name.lower()} of {source.dtype.name}"
        return "" if reduction.prescale == 1.0 and not wire.is_converted else self._why_no_room([source], wire)

    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        for stream in self._streams:
            stream.wait_for(events)

    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction, wire_dtype: str = "") -> Reducer:
        wire = wire_format(arrays[0].dtype.name, reduction.op, wire_dtype)
        assert wire is not None, "why_not was not called"
        by_nccl = nccl_reduction(reduction, wire, self._size, self._version)
        counts = [array.size * wire.parts for array in arrays]
        if not any(counts):
            return lambda sources, targets: None
        if len(counts) == 1 and not wire.is_converted and by_nccl.prescale == 1.0 and by_nccl.scale.is_identity:
            count, nbytes = counts[0], counts[0] * wire.itemsize
            return lambda sources, targets: self._next_stream().reduce_directly(sources[0], targets[0], count, wire,
                                                                                by_nccl.operation, nbytes)
        if len(counts) > 1:
            fused = FusedCopies(counts, wire.memory_bytes, wire.itemsize)
            return lambda sources, targets: self._next_stream().reduce_packed(sources, targets, fused, wire, by_nccl)
        # One tensor that is converted or scaled is reduced in pieces that fit into a fusion buffer.
        step = self.buffer_bytes // (wire.itemsize * ALIGNMENT) * ALIGNMENT
        pieces = [(start * wire.memory_bytes,
                   FusedCopies([min(step, counts[0] - start)], wire.memory_bytes, wire.itemsize))
                  for start in range(0, counts[0], step)]

        def reduce(sources: Sequence[int], targets: Sequence[int]) -> None:
            for first, copies in pieces:
                self._next_stream().reduce_packed([sources[0] + first], [targets[0] + first], copies, wire, by_nccl)

        return reduce

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        sizes = [count * source.dtype.itemsize for count in counts]
        self._next_stream().gather(self._rank, source.address, target.address, sizes)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._next_stream().broadcast(sources, targets, root_rank)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        wire = wire_format(source.dtype.name, reduction.op)
        assert wire is not None, "why_not_scatter was not called"
        self._next_stream().reduce_scatter(self._rank, source, target, counts, wire,
                                           nccl_reduction(reduction, wire, self._size, self._version))

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        itemsize = source.dtype.itemsize
        self._next_stream().exchange(source.address, target.address, [count * itemsize for count in sent],
                                     [count * itemsize for count in received])

    def finish(self) -> list[GpuEvent]:
        return [end for stream in self._streams for end in stream.finish()]

    def last_events(self) -> list[GpuEvent]:
        return [event for stream in self._all_streams for event in stream.last_events()]

    def check(self) -> None:
        for stream in self._streams:
            stream.communicator.check_async_error()

    def revoke(self) -> bool:
        self._lost[:] = 1
        revoked = [stream.communicator.revoke() for stream in self._streams]
        return all(revoked)

    def abandon(self) -> None:
        self._lost[:] = 1  # Before NCCL's kernels end.
        with ExitStack() as aborts:  # calls all of them, even if one raises
            for stream in reversed(self._taken()):
                aborts.callback(stream.communicator.abort)

    def close(self) -> None:
        for stream in self._taken():
            stream.communicator.destroy()
            stream.buffers.clear()
            self.__dict__.pop("buffer", None)

    def _taken(self) -> list[NcclStream]:
        # The watchdog's thread and the engine's may both abort. One of them gets the communicators.
        with self._lock:
            streams, self._streams = self._streams, []
        return streams

    def _next_stream(self) -> NcclStream:
        self._turn += 1
        if not self._streams:
            raise EngineError("NCCL's communicators were aborted, because a rank has left the job.")
        return self._streams[self._turn % len(self._streams)]

    def _why_no_room(self, arrays: Sequence[GpuArray], wire: WireFormat) -> str:
        _, elements = fused_offsets([array.size * wire.parts for array in arrays],
                                    min(wire.memory_bytes, wire.itemsize))
        nbytes = elements * wire.itemsize
        if nbytes > self.buffer_bytes:
            return f"{nbytes} bytes of {arrays[0].dtype.name} exceed the {self.buffer_bytes} bytes of a fusion buffer"
        return ""
