"""Backend for GPU arrays over NCCL. The host never waits.

NcclData chooses the wire format and the communicator of each collective; nccl_stream enqueues it. Used by the engine's
thread.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock

import numpy as np

from ..core.arithmetic import Reduction
from ..core.errors import EngineError
from ..core.request import ReduceOp
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import GpuBackend, Reducer
from .copy.copy_plan import ALIGNMENT, FusedCopies, fused_offsets
from .nccl_stream import NcclStream
from .nccl_types import NcclCommunicator, NcclReduction, WireFormat, nccl_reduction, wire_format


class NcclData(GpuBackend):
    """Collectives over communicators that are reserved for this object.

    NCCL sums half precision in half precision, with one rounding per rank. NCCL chooses the order of a sum, the same on
    all ranks.

    Args:
        communicators: One for each NcclStream. `close` destroys them.
        buffers: Two fusion buffers of `buffer_bytes` for each NcclStream.
        buffer_bytes: Bytes of a fusion buffer.
        version: NCCL's version code.
        is_alone: Whether no other group of ranks uses NCCL on the GPU of one of these ranks.
    """

    def __init__(self, device: GpuDevice, rank: int, size: int, communicators: Sequence[NcclCommunicator],
                 buffers: Sequence[Sequence[GpuArray]], buffer_bytes: int, version: int, is_alone: bool = True):
        # buffer: One of the fusion buffers.
        self.is_alone, self.buffer, self.buffer_bytes = is_alone, buffers[0][0], buffer_bytes
        self._device, self._lost = device, np.zeros(0, np.uint8)
        self._rank, self._size, self._version = rank, size, version
        self._streams = [NcclStream(device, *parts) for parts in zip(communicators, buffers, strict=True)]
        self._all_streams = tuple(self._streams)  # also after the communicators were destroyed
        self._turn, self._lock = 0, Lock()

    def guard_results(self) -> None:
        """From now on turn results into NaN if the communicators are revoked or aborted before they are complete."""
        self._lost = self._device.pinned(4)
        self._lost[:] = 0
        for stream in self._streams:
            stream.lost = self._lost.ctypes.data

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        format_ = wire_format(arrays[0].dtype.name, op, wire_dtype)
        if format_ is None:
            return f"NCCL has no {op.name.lower()} of {arrays[0].dtype.name}"
        # A single array needs no buffer, or is split into pieces that fit.
        return "" if len(arrays) == 1 else self._why_no_room(arrays, format_)

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
            return _nothing
        if len(counts) == 1 and not wire.is_converted and by_nccl.prescale == 1.0 and by_nccl.scale.is_identity:
            count, nbytes = counts[0], counts[0] * wire.itemsize
            return lambda sources, targets: self._next_stream().reduce_directly(sources[0], targets[0], count, wire,
                                                                                by_nccl.operation, nbytes)
        if len(counts) == 1:
            return self._reducer_of_one(counts[0], wire, by_nccl)
        fused = FusedCopies(counts, wire.memory_bytes, wire.itemsize)
        return lambda sources, targets: self._next_stream().reduce_packed(sources, targets, fused, wire, by_nccl)

    def _reducer_of_one(self, count: int, wire: WireFormat, by_nccl: NcclReduction) -> Reducer:
        """As `reducer`, for a tensor that is converted or scaled, in pieces that fit into a fusion buffer."""
        step = self.buffer_bytes // (wire.itemsize * ALIGNMENT) * ALIGNMENT
        pieces = [(start * wire.memory_bytes, FusedCopies([min(step, count - start)], wire.memory_bytes, wire.itemsize))
                  for start in range(0, count, step)]

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
            return f"{nbytes} bytes of {arrays[0].dtype.name} do not fit into a fusion buffer of {self.buffer_bytes}"
        return ""


def _nothing(sources: Sequence[int], targets: Sequence[int]) -> None:
    """Reduce arrays without elements."""
