"""MPI on addresses of a GPU's memory, for libraries that take those; see mpi_setup.takes_gpu_memory.

MPI reads and writes such memory by itself, whatever streams do meanwhile: it must be at rest before a call, and is when
the call returns.
"""

from collections.abc import Sequence
from itertools import accumulate

from mpi4py import MPI

from .mpi import LARGE_BYTES
from .peer_wait import PeerWait, peer_wait_without_end


class DeviceMpi:
    """Collectives on bytes, over an intra-communicator that nobody else uses. Every method is collective.

    Args:
        comm: The communicator.
        wait: For its ranks; None: without a limit.

    Attributes:
        rank: This rank.
        size: How many ranks there are.
    """

    def __init__(self, comm: MPI.Comm, wait: PeerWait | None = None):
        self._comm, self._wait = comm, wait or peer_wait_without_end()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send each rank r the next `sent[r]` bytes at `source`, and put what comes to `target` in the same order."""
        exchange = self._comm.Ialltoallv([_memory(source, sum(sent)), sent, _starts(sent), MPI.BYTE],
                                         [_memory(target, sum(received)), received, _starts(received), MPI.BYTE])
        self._wait.complete([exchange], sum(sent) + sum(received))

    def gather(self, target: int, counts: Sequence[int]) -> None:
        """Complete `target` on all ranks: `counts[r]` bytes of each rank r, whose own part is in its place already."""
        total, starts = sum(counts), _starts(counts)
        if total <= LARGE_BYTES:
            gathered = [_memory(target, total), counts, starts, MPI.BYTE]
            self._wait.complete([self._comm.Iallgatherv(MPI.IN_PLACE, gathered)], total)
            return
        for root, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.broadcast(target + start, count, root)

    def broadcast(self, address: int, nbytes: int, root_rank: int) -> None:
        """Overwrite the bytes with root_rank's."""
        for start in range(0, nbytes, LARGE_BYTES):
            part = min(LARGE_BYTES, nbytes - start)
            self._wait.complete([self._comm.Ibcast([_memory(address + start, part), MPI.BYTE], root=root_rank)], part)

    def close(self) -> None:
        """Free the communicator. May be called twice."""
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()


def _memory(address: int, nbytes: int) -> MPI.buffer:
    return MPI.buffer.fromaddress(address, nbytes)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
