"""Collectives on GPU arrays by NCCL, on streams of their own; nothing here waits on the host.

What a dtype travels as is decided here, and which communicator's turn it is; `nccl_lane` enqueues it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..gpu.arrays import GpuArray
from ..gpu.copy_plan import fused_offsets
from ..gpu.nccl_types import Wire, narrowest, storage, wire_of
from ..gpu.pipeline import pieces
from ..gpu.plane import Completion, GpuPlane
from ..messages import ReduceOp
from ..scale import Scale
from .nccl_lane import Lane


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
    ends_on_abandon = True

    def __init__(self, device: Any, rank: int, communicators: Sequence[Any], buffers: Sequence[Sequence[Any]],
                 buffer_bytes: int):
        self._rank, self._buffer_bytes = rank, buffer_bytes
        self._lanes = [Lane(device, *parts) for parts in zip(communicators, buffers, strict=True)]
        self._turn = 0

    @property
    def description(self) -> str:
        return "reduced by NCCL"

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire: str = "") -> str:
        how = wire_of(arrays[0].dtype.name, op, wire)
        if how is None:
            return f"NCCL has no {op.name.lower()} of {arrays[0].dtype.name}"
        # A single one goes without a buffer, or is cut into pieces that fit.
        return "" if len(arrays) == 1 else self._why_no_room(arrays, how)

    def why_not_scatter(self, source: GpuArray, op: ReduceOp, prescale: float) -> str:
        wire = wire_of(source.dtype.name, op)
        if wire is None:
            return f"NCCL has no {op.name.lower()} of {source.dtype.name}"
        return "" if prescale == 1.0 and not wire.is_converted else self._why_no_room([source], wire)

    def wait_for(self, events: Iterable[Any]) -> None:
        for event in events:
            for lane in self._lanes:
                lane.wait_for(event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], op: ReduceOp, prescale: float,
                  scale: Scale, wire: str = "") -> None:
        how = wire_of(sources[0].dtype.name, op, wire)
        assert how is not None, "why_not was not asked"
        if len(sources) > 1:
            self._next_lane().reduce_packed(sources, targets, how, op, prescale, scale)
        elif self._is_direct(how):
            self._next_lane().reduce_directly(sources[0], targets[0], how, op, prescale, scale)
        else:
            for source, target in pieces(sources[0], targets[0], how, self._buffer_bytes):
                self._next_lane().reduce_packed([source], [target], how, op, prescale, scale)

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        sizes = [count * source.dtype.itemsize for count in counts]
        self._next_lane().gather(self._rank, source.address, target.address, sizes)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._next_lane().broadcast(sources, targets, root_rank)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], op: ReduceOp, prescale: float,
                      scale: Scale) -> None:
        wire = wire_of(source.dtype.name, op)
        assert wire is not None, "why_not_scatter was not asked"
        self._next_lane().reduce_scatter(self._rank, source, target, counts, wire, op, prescale, scale)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int]) -> None:
        itemsize = source.dtype.itemsize
        self._next_lane().exchange(source.address, target.address, [count * itemsize for count in sent],
                                   [count * itemsize for count in received])

    def barrier(self) -> None:
        for lane in self._lanes:
            lane.meet()

    def finish(self) -> Completion:
        completions = [lane.finish() for lane in self._lanes]
        return Completion([e for c in completions for e in c.events], [k for c in completions for k in c.kept])

    def check(self) -> None:
        for lane in self._lanes:
            lane.communicator.check_async_error()

    def abandon(self) -> None:
        while self._lanes:
            try:
                self._lanes.pop().communicator.abort()
            except Exception:
                self.abandon()  # One that cannot be aborted keeps no other from it.
                raise

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.communicator.destroy()

    def _next_lane(self) -> Lane:
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)]

    def _why_no_room(self, arrays: Sequence[GpuArray], wire: Wire) -> str:
        _, elements = fused_offsets([array.size * wire.parts for array in arrays], narrowest(wire))
        nbytes = elements * np.dtype(storage(wire.dtype)).itemsize
        if nbytes > self._buffer_bytes:
            return f"{nbytes} bytes of {arrays[0].dtype.name} do not fit into a fusion buffer of {self._buffer_bytes}"
        return ""

    def _is_direct(self, wire: Wire) -> bool:
        """Whether a single tensor is reduced from its memory to that of the result, with nothing to pack."""
        return not wire.is_converted
