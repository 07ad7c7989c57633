"""Backend over MPI: MpiData with a reduction of its own in a fixed order, MpiControl with doorbells among local ranks.

Nothing here is called before init() has a communicator; importing this module imports mpi4py.MPI, which loads the MPI
library and initialises it.
"""

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ...core.arithmetic import Reduction, Scale, combine
from ...core.interfaces import DataPlane
from ...core.memory import FusionBuffer
from ...core.packing import join, split
from ...core.request import ReduceOp
from .peer_wait import PeerWait, peer_wait_without_end

# One exchange of whole arrays is quicker than a scatter and a gather up to about this many bytes in all.
SMALL_BYTES = 32 * 1024
# Pieces of a large array stay in cache between being received, combined and sent. Alone on the machine 1 MiB is as good
# (26 ms for 102 MB on 2 ranks, 32 ms in one piece), but each piece is a wait for the others, dear on a busy machine.
CHUNK_BYTES = 4 * 1024 * 1024
# MPI counts are C ints; above this, what is gathered is broadcast by one rank after the other.
LARGE_BYTES = 2**30
# What is gathered or broadcast goes in pieces of so many bytes from all ranks together, and the limit of a wait is for
# one of them: what takes long on a slow network is not taken for a network that is down.
PIECE_BYTES = 64 * 1024 * 1024


class MpiData(DataPlane):
    """Collectives over an intra-communicator that nobody else uses.

    An all-reduce is an exchange of slices (MPI_Alltoallv), a sum of this rank's slice in the order of the ranks, and an
    MPI_Allgatherv of the sums: 2 (n-1)/n of the bytes cross the wire, as in a ring, but every element is summed in
    rank order whatever the size of the array and its place in it, which MPI_Allreduce does not promise. On one host it
    is also quicker than Open MPI's own.

    The calls are those that do not block, so that each wait has an end. That takes 2 to 3 us more each on 2 ranks of a
    host, of 7 for 1 KB and of 25 for 64 KB, and nothing more from 1 MB on.

    Args:
        comm: The communicator.
        wait: For its ranks; None: without a limit.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, wait: PeerWait | None = None):
        self._comm, self._wait = comm, wait or peer_wait_without_end()
        self._size, self._rank = comm.Get_size(), comm.Get_rank()
        self._parts, self._packed = FusionBuffer(), FusionBuffer()

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        if len(sources) == 1 and reduction.prescale == 1.0:
            # A single tensor needs no fusion buffer: it goes from its own memory to that of the result.
            self._allreduce(sources[0].reshape(-1), targets[0].reshape(-1), reduction.op, reduction.scale)
            return
        packed = self._packed.view(sum(source.size for source in sources), sources[0].dtype)
        join(sources, packed, reduction.prescale)
        self._allreduce(packed, packed, reduction.op, reduction.scale)
        split(packed, targets)

    def _allreduce(self, source: np.ndarray, target: np.ndarray, op: ReduceOp, scale: Scale) -> None:
        size, dtype = self._size, source.dtype
        if source.nbytes * size <= SMALL_BYTES:
            parts = self._parts.view(source.size * size, dtype).reshape(size, -1)
            self._complete(self._comm.Iallgather([source.view(np.uint8), MPI.BYTE], [parts.view(np.uint8), MPI.BYTE]),
                           parts.nbytes)
            combine(parts, op, target, scale)
            return
        # At least one element per rank and piece; a piece is CHUNK_BYTES or a little less.
        step = max(CHUNK_BYTES // dtype.itemsize, size)
        for start in range(0, source.size, step):
            piece = slice(start, min(start + step, source.size))
            self._allreduce_piece(source[piece], target[piece], op, scale)

    def _allreduce_piece(self, source: np.ndarray, target: np.ndarray, op: ReduceOp, scale: Scale) -> None:
        size, rank, itemsize = self._size, self._rank, source.itemsize
        bounds = [source.size * r // size for r in range(size + 1)]
        counts = [(bounds[r + 1] - bounds[r]) * itemsize for r in range(size)]
        starts = [bound * itemsize for bound in bounds[:-1]]
        mine = target[bounds[rank]:bounds[rank + 1]]
        parts = self._parts.view(mine.size * size, source.dtype).reshape(size, -1)
        row = counts[rank]
        exchange = self._comm.Ialltoallv(
            [source.view(np.uint8), counts, starts, MPI.BYTE],
            [parts.view(np.uint8), [row] * size, [row * r for r in range(size)], MPI.BYTE])
        self._complete(exchange, source.nbytes)
        combine(parts, op, mine, scale)
        self._complete(self._comm.Iallgatherv(MPI.IN_PLACE, [target.view(np.uint8), counts, starts, MPI.BYTE]),
                       target.nbytes)

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        sizes = [count * source.itemsize for count in counts]
        out = target.view(np.uint8)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        if out.nbytes <= LARGE_BYTES:
            own, step = source.view(np.uint8), PIECE_BYTES // self._size
            for start in range(0, max(sizes), step):
                pieces = [min(max(size - start, 0), step) for size in sizes]
                places = [min(first + start, out.nbytes) for first in starts[:-1].tolist()]
                gathered = self._comm.Iallgatherv([own[start:start + step], MPI.BYTE], [out, pieces, places, MPI.BYTE])
                self._complete(gathered, sum(pieces))
            return
        for rank in range(self._size):
            part = out[starts[rank]:starts[rank + 1]]
            if rank == self._rank:
                np.copyto(part, source.view(np.uint8))
            self.broadcast(part, rank)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        data = array.view(np.uint8)
        for start in range(0, data.nbytes, PIECE_BYTES):
            part = data[start:start + PIECE_BYTES]
            self._complete(self._comm.Ibcast([part, MPI.BYTE], root=root_rank), part.nbytes)

    def _complete(self, request: MPI.Request, nbytes: int) -> None:
        self._wait.complete([request], nbytes)

    def close(self) -> None:
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()


