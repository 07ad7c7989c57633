"""Backend for GPU arrays over NCCL. The host never waits.

NcclData chooses the wire format and the communicator of each collective; nccl.stream enqueues it. Used by the engine's
thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from threading import Lock

from ...core.arithmetic import Reduction
from ...core.errors import EngineError
from ...core.request import ReduceOp
from ..arrays import GpuArray, GpuDevice, GpuEvent
from ..backend import GpuBackend
from ..copy.plan import ALIGNMENT, fused_offsets
from .stream import NcclStream
from .types import NcclCommunicator, WireFormat, nccl_reduction, wire_format


class NcclData(GpuBackend):
    """Collectives over communicators that are reserved for this object.

    NCCL sums half precision in half precision, with one rounding per rank. It chooses the order of a sum, the same on
    all ranks.

    Args:
        device: This rank's GPU.
        rank: This rank in the communicators.
        size: The number of their ranks.
        communicators: One for each NcclStream. `close` destroys them.
        buffers: Two fusion buffers of `buffer_bytes` for each NcclStream.
        buffer_bytes: Bytes of a fusion buffer.
        version: NCCL's version code.
    """

    def __init__(self, device: GpuDevice, rank: int, size: int, communicators: Sequence[NcclCommunicator],
                 buffers: Sequence[Sequence[GpuArray]], buffer_bytes: int, version: int):
        self._rank, self._size, self._buffer_bytes, self._version = rank, size, buffer_bytes, version
        self._streams = [NcclStream(device, *parts) for parts in zip(communicators, buffers, strict=True)]
        self._turn, self._lock = 0, Lock()

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

    def wait_for(self, events: Iterable[GpuEvent]) -> None:
        for event in events:
            for stream in self._streams:
                stream.wait_for(event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], reduction: Reduction,
                  wire_dtype: str = "") -> None:
        format_ = wire_format(sources[0].dtype.name, reduction.op, wire_dtype)
        assert format_ is not None, "why_not was not called"
        by_nccl = nccl_reduction(reduction, format_, self._size, self._version)
        if len(sources) > 1:
            self._next_stream().reduce_packed(sources, targets, format_, by_nccl)
        elif not format_.is_converted:
            self._next_stream().reduce_directly(sources[0], targets[0], format_, by_nccl)
        else:
            for source, target in _split_to_fit(sources[0], targets[0], format_, self._buffer_bytes):
                self._next_stream().reduce_packed([source], [target], format_, by_nccl)

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
        return [stream.finish() for stream in self._streams]

    def check(self) -> None:
        for stream in self._streams:
            stream.communicator.check_async_error()

    def revoke(self) -> bool:
        revoked = [stream.communicator.revoke() for stream in self._streams]
        return all(revoked)

    def abandon(self) -> None:
        with ExitStack() as aborts:  # calls all of them, even if one raises
            for stream in reversed(self._taken()):
                aborts.callback(stream.communicator.abort)

    def close(self) -> None:
        for stream in self._taken():
            stream.communicator.destroy()

    def _taken(self) -> list[NcclStream]:
        # The watchdog's thread and the engine's may both abort. One of them gets the communicators.
        with self._lock:
            streams, self._streams = self._streams, []
        return streams

    def _next_stream(self) -> NcclStream:
        if not self._streams:
            raise EngineError("NCCL's communicators were aborted, for a rank has left.")
        self._turn += 1
        return self._streams[self._turn % len(self._streams)]

    def _why_no_room(self, arrays: Sequence[GpuArray], wire: WireFormat) -> str:
        _, elements = fused_offsets([array.size * wire.parts for array in arrays], wire.narrowest_bytes)
        nbytes = elements * wire.itemsize
        if nbytes > self._buffer_bytes:
            return f"{nbytes} bytes of {arrays[0].dtype.name} do not fit into a fusion buffer of {self._buffer_bytes}"
        return ""


def _split_to_fit(source: GpuArray, target: GpuArray, wire: WireFormat,
                  nbytes: int) -> Iterator[tuple[GpuArray, GpuArray]]:
    """Split a tensor and its result into pieces that fit into a buffer of `nbytes`."""
    step = nbytes // (wire.itemsize * ALIGNMENT) * ALIGNMENT // wire.parts
    for start in range(0, source.size, step):
        count, first = min(step, source.size - start), start * source.dtype.itemsize
        yield (GpuArray(source.address + first, (count,), source.dtype, None),
               GpuArray(target.address + first, (count,), target.dtype, None))
