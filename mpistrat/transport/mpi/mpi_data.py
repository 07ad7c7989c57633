"""Data plane over MPI, which sums in the order of the ranks.

Importing this module imports mpi4py.MPI, which loads and initialises the MPI library. So only init() imports this
module, after the choice of a communicator. Used by the engine's thread.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import Reduction, Scale, combine, pack, unpack
from ...core.interfaces import DataPlane
from ...core.memory import FusionBuffer
from ...core.request import ReduceOp
from ...core.tuning import MPI_ALLGATHER_BYTES, MPI_CHUNK_BYTES, MPI_PIECE_BYTES
from .requests import PeerWait

# MPI's counts and displacements are C ints. Above this, an allgather is a broadcast by each rank in turn, and an
# all-to-all consists of messages between two ranks each.
LARGE_BYTES = 2**30


class MpiData(DataPlane):
    """Collectives over the intra-communicator `comm`, which is reserved for this object and freed by `close`.

    An all-reduce exchanges slices (MPI_Alltoallv), sums this rank's slice in the order of the ranks, and gathers the
    sums (MPI_Allgatherv). Each of n ranks sends 2 (n-1)/n of the bytes, as in a ring. Unlike in MPI_Allreduce, every
    element is summed in rank order, whatever its index and the size of the array. On one host this is also faster than
    Open MPI's MPI_Allreduce.

    All MPI calls are nonblocking, so that each wait can have a limit. Between 2 ranks of a host, this adds 2 to 3 us to
    a call, which then takes 7 us for 1 KB and 25 us for 64 KB. From 1 MB on, it adds nothing.

    `wait` waits for the ranks of `comm`.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, wait: PeerWait):
        self._comm, self._wait = comm, wait
        self._size, self._rank = comm.Get_size(), comm.Get_rank()
        self._parts, self._packed = FusionBuffer(), FusionBuffer()

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        if len(sources) == 1 and reduction.prescale == 1.0:
            # A single tensor needs no fusion buffer: MPI reads and writes the tensors themselves.
            self._allreduce(sources[0].reshape(-1), targets[0].reshape(-1), reduction.op, reduction.scale)
            return
        packed = self._packed.view(sum(source.size for source in sources), sources[0].dtype)
        pack(sources, packed, reduction.prescale)
        self._allreduce(packed, packed, reduction.op, reduction.scale)
        unpack(packed, targets)

    def _allreduce(self, source: np.ndarray, target: np.ndarray, op: ReduceOp, scale: Scale) -> None:
        size, dtype = self._size, source.dtype
        if source.nbytes * size <= MPI_ALLGATHER_BYTES:
            parts = self._parts.view(source.size * size, dtype).reshape(size, -1)
            sent, received = [source.view(np.uint8), MPI.BYTE], [parts.view(np.uint8), MPI.BYTE]
            self._wait.complete([self._comm.Iallgather(sent, received)], parts.nbytes)
            combine(parts, op, target, scale)
            return
        # At least one element per rank and piece; a piece is MPI_CHUNK_BYTES or a little less.
        step = max(MPI_CHUNK_BYTES // dtype.itemsize, size)
        for start in range(0, source.size, step):
            piece = slice(start, min(start + step, source.size))
            self._allreduce_piece(source[piece], target[piece], op, scale)

    def _allreduce_piece(self, source: np.ndarray, target: np.ndarray, op: ReduceOp, scale: Scale) -> None:
        size, rank, itemsize = self._size, self._rank, source.itemsize
        bounds = [source.size * r // size for r in range(size + 1)]
        counts = [(bounds[r + 1] - bounds[r]) * itemsize for r in range(size)]
        starts = [bound * itemsize for bound in bounds[:-1]]
        own = target[bounds[rank]:bounds[rank + 1]]
        parts = self._parts.view(own.size * size, source.dtype).reshape(size, -1)
        row = counts[rank]
        exchange = self._comm.Ialltoallv(
            [source.view(np.uint8), counts, starts, MPI.BYTE],
            [parts.view(np.uint8), [row] * size, [row * r for r in range(size)], MPI.BYTE])
        self._wait.complete([exchange], source.nbytes)
        combine(parts, op, own, scale)
        gathered = self._comm.Iallgatherv(MPI.IN_PLACE, [target.view(np.uint8), counts, starts, MPI.BYTE])
        self._wait.complete([gathered], target.nbytes)

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        sizes = [count * source.itemsize for count in counts]
        out = target.view(np.uint8)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        if out.nbytes <= LARGE_BYTES:
            own, step = source.view(np.uint8), MPI_PIECE_BYTES // self._size
            for start in range(0, max(sizes), step):
                pieces = [min(max(size - start, 0), step) for size in sizes]
                places = [min(first + start, out.nbytes) for first in starts[:-1].tolist()]
                gathered = self._comm.Iallgatherv([own[start:start + step], MPI.BYTE], [out, pieces, places, MPI.BYTE])
                self._wait.complete([gathered], sum(pieces))
            return
        for rank in range(self._size):
            part = out[starts[rank]:starts[rank + 1]]
            if rank == self._rank:
                np.copyto(part, source.view(np.uint8))
            self.broadcast(part, rank)

    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        out, own, itemsize = target.view(np.uint8), source.view(np.uint8), source.itemsize
        to, from_ = [count * itemsize for count in sent], [count * itemsize for count in received]
        largest_bytes, step = largest * itemsize, max(MPI_PIECE_BYTES // self._size, 1)
        # The largest part anywhere decides how many pieces there are, and how they are sent: all ranks do the same.
        for start in range(0, largest_bytes, step):
            sends, receives = _pieces(to, start, step), _pieces(from_, start, step)
            if largest_bytes * self._size <= LARGE_BYTES:
                requests = [self._comm.Ialltoallv([own, *sends, MPI.BYTE], [out, *receives, MPI.BYTE])]
            else:
                requests = [self._comm.Irecv([out[place:place + count], MPI.BYTE], source=rank)
                            for rank, (count, place) in enumerate(zip(*receives, strict=True)) if count]
                requests += [self._comm.Isend([own[place:place + count], MPI.BYTE], dest=rank)
                             for rank, (count, place) in enumerate(zip(*sends, strict=True)) if count]
            self._wait.complete(requests, step)

    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        if reduction.prescale != 1.0:
            packed = self._packed.view(source.size, source.dtype)
            pack([source], packed, reduction.prescale)
            source = packed
        parts = self._parts.view(target.size * self._size, source.dtype).reshape(self._size, -1)
        self.alltoall(source, parts.reshape(-1), counts, [target.size] * self._size, max(counts))
        combine(parts, reduction.op, target, reduction.scale)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        data = array.view(np.uint8)
        for start in range(0, data.nbytes, MPI_PIECE_BYTES):
            part = data[start:start + MPI_PIECE_BYTES]
            self._wait.complete([self._comm.Ibcast([part, MPI.BYTE], root=root_rank)], part.nbytes)

    def revoke(self) -> list[Any]:
        return [self._comm, *self._wait.unfinished]

    def close(self) -> None:
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()


def _pieces(sizes: Sequence[int], start: int, step: int) -> tuple[list[int], list[int]]:
    """Return (sizes, offsets) of one piece of each part: at most `step` bytes, from byte `start` of the part on."""
    ends = itertools.accumulate(sizes)
    return ([min(max(size - start, 0), step) for size in sizes],
            [end - size + min(start, size) for end, size in zip(ends, sizes)])
