"""Backend over MPI: MpiData with a reduction of its own in a fixed order, MpiControl with doorbells among local ranks.

Nothing here is called before init() has a communicator; importing this module imports mpi4py.MPI, which loads the MPI
library and initialises it.
"""

import os
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ..fusion import FusionBuffer
from ..messages import ReduceOp
from ..scale import Scale
from ..stream import join, split
from .base import ControlPlane, DataPlane, Mail
from .peer_wait import PeerWait, peer_wait_without_end
from .reduction import combine

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

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], op: ReduceOp, prescale: float,
                  scale: Scale) -> None:
        if len(sources) == 1 and prescale == 1.0:
            # A single tensor needs no fusion buffer: it goes from its own memory to that of the result.
            self._allreduce(sources[0].reshape(-1), targets[0].reshape(-1), op, scale)
            return
        packed = self._packed.view(sum(source.size for source in sources), sources[0].dtype)
        join(sources, packed, prescale)
        self._allreduce(packed, packed, op, scale)
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


class MpiControl(ControlPlane):
    """Messages to ranks of this host by mail, to other hosts over MPI point to point.

    With all its peers on this host a rank sleeps until a message comes. A rank with peers on other hosts must poll MPI
    for them: first without a pause, giving way to others at each look (for a millisecond where a caller waits, and 50
    microseconds in the background), and then at growing intervals up to 3 ms.

    Args:
        comm: Nobody else uses it.
        mail: The mailbox of this rank.
        local_ranks: The ranks on this host.
        peers: The ranks that will ever send to this one.
        polls: Whether MPI must be polled for something else, too, of which the mail knows.
        wait: For any rank; None: without a limit.
    """

    _TAG = 1
    _SPIN_S = 50e-6
    _CALLERS_SPIN_S = 1e-3  # a pause and a poll cost more than a message between hosts takes
    _SHORTEST_S = 50e-6
    _LONGEST_S = 3e-3

    def __init__(self, comm: MPI.Comm, mail: Mail, local_ranks: Sequence[int], peers: Sequence[int],
                 polls: bool = False, wait: PeerWait | None = None):
        self._comm, self._mail, self._wait = comm, mail, wait or peer_wait_without_end()
        self._local = frozenset(local_ranks)
        self._polls = polls or any(peer not in self._local for peer in peers)
        self._status = MPI.Status()
        self._sending: list[tuple[int, MPI.Request, bytes]] = []  # to which rank, and what

    def send(self, rank: int, message: bytes) -> None:
        if rank in self._local:
            self._mail.send(rank, message)
        else:
            self._sending.append((rank, self._comm.Isend([message, MPI.BYTE], dest=rank, tag=self._TAG), message))

    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        # Messages between hosts, too: MPI asks the receiver of a large one first, and sends it only while this rank is
        # in a call of MPI. In the collective that follows, this rank may wait in shared memory alone.
        if self._missing(ranks):
            self._wait.until(lambda: self._is_flushed(ranks), lambda: self._missing(ranks), limit_s=limit_s)

    def _is_flushed(self, ranks: Sequence[int]) -> bool:
        self._mail.flush()
        self._comm.Iprobe()  # A receiver that is still in an earlier collective may need MPI to move on here too.
        self._forget_sent()
        return not self._missing(ranks)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` to which something is still on its way."""
        underway = {rank for rank, _, _ in self._sending}
        return [rank for rank in ranks if rank in underway or self._mail.is_sending_to([rank])]

    def _forget_sent(self) -> None:
        self._sending = [sending for sending in self._sending if not sending[1].Test()]

    def poll(self) -> list[tuple[int, bytes]]:
        if self._mail.is_sending:
            self._mail.flush()
        messages = self._mail.receive()
        if self._polls:
            if self._sending:
                self._forget_sent()
            while self._comm.Iprobe(tag=self._TAG, status=self._status):
                message = bytearray(self._status.Get_count(MPI.BYTE))
                source = self._status.Get_source()
                self._comm.Recv([message, MPI.BYTE], source=source, tag=self._TAG)
                messages.append((source, bytes(message)))
        return messages

    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        if not self._polls:
            self._mail.wait(min(timeout_s, self._LONGEST_S) if self._mail.is_sending else timeout_s, spin_s)
            return
        spin_s = (self._CALLERS_SPIN_S if spin_s else self._SPIN_S) - quiet_s
        if spin_s > 0:
            # What waits for room in the mail is for the caller to send on.
            until = time.monotonic() + (0.0 if self._mail.is_sending else min(spin_s, timeout_s))
            while True:
                os.sched_yield()
                # Far less than a round of the engine: what a rank does while it looks, another on its processor waits
                # for.
                if self._mail.has_come() or self._comm.Iprobe(tag=self._TAG) or time.monotonic() >= until:
                    return
        # A pause in proportion to the wait so far makes no wait much longer than it must be.
        self._mail.wait(min(timeout_s, max(quiet_s / 8, self._SHORTEST_S), self._LONGEST_S))

    def wake(self) -> None:
        self._mail.wake()

    def close(self) -> None:
        if self._comm == MPI.COMM_NULL:
            return
        self.flush(tuple(self._local))
        self._wait.complete([request for _, request, _ in self._sending])
        self._sending.clear()
        self._mail.close()
        self._comm.Free()
