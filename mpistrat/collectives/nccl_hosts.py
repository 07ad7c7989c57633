"""All-reduces on GPU arrays where the network does not reach GPUs: NCCL within a host, MPI between hosts.

The ranks of a host reduce a bucket so that each has a slice of the sum; each reduces its slice with those who have the
same one on the other hosts, by way of pinned memory; and the ranks of a host gather the slices. While a bucket is
between hosts the GPU packs and reduces the next one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..gpu.arrays import GpuArray
from ..gpu.copy_plan import ALIGNMENT, fused_offsets
from ..gpu.nccl_types import DTYPES, OPERATIONS, Wire, narrowest
from ..gpu.plane import GpuPlane, await_on_host
from ..messages import ReduceOp
from ..scale import IDENTITY, Scale
from .base import DataPlane
from .nccl import NcclData
from .nccl_lane import Lane


class HostsLane(Lane):
    """A communicator of NCCL within the host, and the way to the other hosts.

    Args:
        device: This rank's GPU.
        communicator: Among the ranks of this host.
        buffers: Two fusion buffers.
        local_rank: This rank in the communicator.
        local_size: How many ranks each host has.
        across: Reduces among the ranks with this local_rank.
        buffer_bytes: How much of each may be used for tensors; there are 32 bytes more for each rank of a host.
        limit_s: How long the GPU may take for its part; 0: for ever.
    """

    def __init__(self, device: Any, communicator: Any, buffers: Sequence[Any], local_rank: int, local_size: int,
                 across: DataPlane, buffer_bytes: int, limit_s: float):
        super().__init__(device, communicator, buffers)
        self._local_rank, self._local_size, self._across = local_rank, local_size, across
        self._limit_s = limit_s
        self._slices = [device.pinned(buffer_bytes // local_size + 2 * ALIGNMENT) for _ in buffers]

    def reduce_packed(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: Wire, op: ReduceOp,
                      prescale: float, scale: Scale) -> None:
        """Reduce tensors that fit into a buffer together."""
        dtype, number, stream = _in_numpy(wire.dtype), DTYPES[wire.dtype], self._reductions.ptr

        def scatter(buffer: int, total: int) -> Callable[[], None]:
            # What is beyond the tensors is reduced too, whatever it is, so that slices are alike.
            count = fused_offsets([-(-total // self._local_size)], narrowest(wire))[1]
            on_host = self._slices[self._turn % len(self._slices)][:count * dtype.itemsize]
            mine = buffer + self._local_rank * on_host.nbytes
            self.communicator.reduceScatter(buffer, mine, count, number, OPERATIONS[op], stream)
            self._device.copy(on_host.ctypes.data, mine, on_host.nbytes, self._reductions)
            arrived = self._device.record(self._reductions)

            def gather() -> None:
                await_on_host(arrived, self._limit_s)
                self._across.allreduce([on_host.view(dtype)], [on_host.view(dtype)], op, 1.0, IDENTITY)
                self._device.copy(mine, on_host.ctypes.data, on_host.nbytes, self._reductions)
                self.communicator.allGather(mine, buffer, count, number, stream)
                self._device.wait(self._copies, self._device.record(self._reductions))

            return gather

        self._run_packed(sources, targets, wire, prescale, scale, scatter)


def _in_numpy(name: str) -> np.dtype:
    if name == "bfloat16":
        # Not at the top: who has no tensor and no compression of that dtype need not have the package.
        from ml_dtypes import bfloat16
        return np.dtype(bfloat16)
    return np.dtype(name)


class NcclHosts(NcclData):
    """All-reduces over the lanes; everything else, which no step of a training needs, goes by `staged`.

    Args:
        device: This rank's GPU.
        rank: This rank.
        lanes: HostsLanes of `buffer_bytes`.
        buffer_bytes: As theirs.
        staged: Among the same ranks as this plane.
    """

    name = "hierarchical"

    def __init__(self, device: Any, rank: int, lanes: Sequence[HostsLane], buffer_bytes: int, staged: GpuPlane):
        super().__init__(device, rank, [], [], buffer_bytes)
        self._lanes: list[Lane] = list(lanes)
        self._staged = staged

    @property
    def description(self) -> str:
        return "reduced by NCCL within hosts and by MPI between them"

    def why_not_scatter(self, source: GpuArray, op: ReduceOp, prescale: float) -> str:
        return self._staged.why_not_scatter(source, op, prescale)

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        self._staged.allgather(source, target, counts)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._staged.broadcast(sources, targets, root_rank)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], op: ReduceOp, prescale: float,
                      scale: Scale) -> None:
        self._staged.reducescatter(source, target, counts, op, prescale, scale)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int]) -> None:
        self._staged.alltoall(source, target, sent, received)

    def barrier(self) -> None:
        self._staged.barrier()

    def _is_direct(self, wire: Wire) -> bool:
        return False
