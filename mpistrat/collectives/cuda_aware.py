"""Collectives on GPU arrays by an MPI library that takes memory of GPUs, where NCCL cannot serve.

A bucket is packed on the GPU; the ranks exchange slices of it, each combines its own on the GPU in the order of the
ranks, and they gather the results. As for CPU tensors (`mpi.MpiData`) that makes every element the same bits on all
ranks, summed in the same order whatever it is fused with. MPI_Allreduce promises neither, knows no bfloat16, and Open
MPI does its arithmetic on the host, after a copy of the whole buffer.

MPI knows nothing of streams: the host asks for an event until the GPU is done with what MPI is to read. While MPI works
at a bucket the GPU packs the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ..dtypes import HALVES
from ..gpu.arrays import GpuArray
from ..gpu.copy_plan import fused_offsets
from ..gpu.nccl_types import Wire, narrowest, wire_of
from ..gpu.pipeline import BUFFERS, Pipeline, pieces
from ..gpu.plane import Completion, GpuPlane, await_on_host
from ..messages import ReduceOp
from ..scale import Scale

# What the ranks exchange at once is counted in C ints.
_LARGEST_BYTES = 2**30
_WIDEST = 8  # bytes of a number


class Exchanges(Protocol):
    """What this needs of `device_mpi.DeviceMpi`."""

    rank: int
    size: int

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None: ...

    def gather(self, target: int, counts: Sequence[int]) -> None: ...

    def broadcast(self, address: int, nbytes: int, root_rank: int) -> None: ...


class CudaAwareData(GpuPlane):
    """Collectives over `mpi`; what no step of a training needs goes by `staged`.

    Tensors travel as they are, halves in float32, in which they are combined and scaled, and rounded once.

    Args:
        device: This rank's GPU.
        mpi: Among all ranks; nobody else uses it.
        buffers: Two fusion buffers, and one for what other ranks send, of `buffer_bytes` each.
        buffer_bytes: At least 256, and 8 more for each rank.
        limit_s: How long the GPU may take for its part; 0: for ever.
        staged: Among the same ranks.
    """

    name = "mpi"

    def __init__(self, device: Any, mpi: Exchanges, buffers: Sequence[GpuArray], buffer_bytes: int, limit_s: float,
                 staged: GpuPlane):
        *fusion, received = buffers
        self._pipeline = _MpiPipeline(device, mpi, fusion, received, limit_s)
        # Every rank's slice is as long as the longest one in the buffer for what is received.
        self._room = min(buffer_bytes, _LARGEST_BYTES) - mpi.size * _WIDEST
        self._staged = staged

    @property
    def description(self) -> str:
        return "reduced on the GPU, over an MPI library that takes its memory"

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire: str = "") -> str:
        how = _wire_of(arrays[0].dtype.name, op)
        return "" if how is not None else f"there is no {op.name.lower()} of {arrays[0].dtype.name} on the GPU"

    def why_not_scatter(self, source: GpuArray, op: ReduceOp, prescale: float) -> str:
        return self._staged.why_not_scatter(source, op, prescale)

    def wait_for(self, events: Iterable[Any]) -> None:
        for event in events:
            self._pipeline.wait_for(event)

    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], op: ReduceOp, prescale: float,
                  scale: Scale, wire: str = "") -> None:
        how = _wire_of(sources[0].dtype.name, op)
        assert how is not None, "why_not was not asked"
        for load in self._loads(sources, targets, how):
            self._pipeline.reduce([source for source, _ in load], [target for _, target in load], how, op, prescale,
                                  scale)

    def _loads(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray],
               how: Wire) -> Iterator[list[tuple[GpuArray, GpuArray]]]:
        """The tensors with their results, those cut up that are too large, in lists of which each fits into a buffer.

        A bucket has room for its tensors as they are, but halves take up twice as much.
        """
        load: list[tuple[GpuArray, GpuArray]] = []
        room = self._room
        for source, target in zip(sources, targets, strict=True):
            for piece in pieces(source, target, how, self._room):
                elements = fused_offsets([piece[0].size * how.parts], narrowest(how))[1]
                nbytes = elements * np.dtype(how.dtype).itemsize
                if nbytes > room:
                    yield load
                    load, room = [], self._room
                load.append(piece)
                room -= nbytes
        if load:
            yield load

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        self._pipeline.gather(source, target, counts)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        self._pipeline.broadcast(sources, targets, root_rank)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], op: ReduceOp, prescale: float,
                      scale: Scale) -> None:
        with self._by_staged() as staged:
            staged.reducescatter(source, target, counts, op, prescale, scale)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int]) -> None:
        with self._by_staged() as staged:
            staged.alltoall(source, target, sent, received)

    def barrier(self) -> None:
        with self._by_staged() as staged:
            staged.barrier()

    @contextmanager
    def _by_staged(self) -> Iterator[GpuPlane]:
        """What is done within it comes after what was enqueued here, and before what follows."""
        self._staged.wait_for([self._pipeline.mark()])
        yield self._staged
        self.wait_for(self._staged.finish().events)

    def finish(self) -> Completion:
        return self._pipeline.finish()

    def check(self) -> None:
        """What goes wrong on this path is raised where it does."""

    def abandon(self) -> None:
        """MPI has no way to give up a collective."""

    def close(self) -> None:
        """The communicator is its maker's."""


class _MpiPipeline(Pipeline):
    """A pipeline whose buckets are reduced by exchanges over MPI."""

    def __init__(self, device: Any, mpi: Exchanges, buffers: Sequence[GpuArray], received: GpuArray, limit_s: float):
        assert len(buffers) == BUFFERS
        super().__init__(device, buffers)
        self._mpi, self._received, self._limit_s = mpi, received, limit_s

    def reduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], wire: Wire, op: ReduceOp,
               prescale: float, scale: Scale) -> None:
        """Reduce tensors that fit into a buffer together."""
        def reduce(buffer: int, total: int) -> Callable[[], None]:
            packed = self._device.record(self._reductions)

            def exchange() -> None:
                await_on_host(packed, self._limit_s)
                self._combine(buffer, total, np.dtype(wire.dtype), op)

            return exchange

        self._run_packed(sources, targets, wire, prescale, scale, reduce)

    def _combine(self, buffer: int, total: int, dtype: np.dtype, op: ReduceOp) -> None:
        """Reduce `total` elements at `buffer` over all ranks, in place. Waits until it is done."""
        size, rank, itemsize = self._mpi.size, self._mpi.rank, dtype.itemsize
        bounds = [total * r // size for r in range(size + 1)]
        slices = [(bounds[r + 1] - bounds[r]) * itemsize for r in range(size)]
        self._mpi.exchange(buffer, self._received.address, slices, [slices[rank]] * size)
        self._device.combine(self._received.address, size, slices[rank] // itemsize, dtype, op,
                             buffer + bounds[rank] * itemsize, self._reductions)
        await_on_host(self._device.record(self._reductions), self._limit_s)
        self._mpi.gather(buffer, slices)

    def gather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        """Concatenate `counts[r]` elements of each rank r in `target`."""
        sizes = [count * source.dtype.itemsize for count in counts]
        self._device.copy(target.address + sum(sizes[:self._mpi.rank]), source.address, source.nbytes, self._copies)
        await_on_host(self.mark(), self._limit_s)
        self._mpi.gather(target.address, sizes)

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write the root's `sources` to `targets`."""
        for source, target in zip(sources, targets, strict=True):
            if self._mpi.rank == root_rank:
                self._device.copy(target.address, source.address, source.nbytes, self._copies)
        await_on_host(self.mark(), self._limit_s)
        for target in targets:
            self._mpi.broadcast(target.address, target.nbytes, root_rank)


def _wire_of(dtype: str, op: ReduceOp) -> Wire | None:
    """How tensors are combined here, which NCCL's choice is close to."""
    if dtype in HALVES:
        return Wire(dtype, "float32")
    return Wire(dtype, dtype) if dtype in ("int16", "uint16") else wire_of(dtype, op)
