"""Losses: what a rank knows of ranks that have ended in the middle of the job, and what follows from it.

If the MPI library can go on without them, all engines of this rank end with RanksLostError, and the script may call
`recover`. Otherwise mpirun ends the job. If it has not done so after a moment, this rank does.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.errors import LostRank, RanksLostError
from ..core.interruption import Interruption
from ..core.topology import Topology
from ..process import abort
from ..process.error_text import ErrorText
from ..process.neighbours import Neighbours
from ..process.procfs import Process
from ..transport.mpi import library

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_LAUNCHER_S = 2.0  # mpirun ends the job 0.4 s after a rank has ended, and then prints what has ended it.


class Losses:
    """Watches the other ranks from its construction until `stop` is called.

    Args:
        topology: All ranks of the job.
        comm: These ranks; None for one rank.
        processes: Those of the other ranks of this host, by rank.

    Attributes:
        interruption: Ends the waits of this rank.
        is_tolerant: Whether the job outlives the loss of a rank.
        when_lost: Called after the interruption was set, in any thread.
    """

    def __init__(self, topology: Topology, comm: "MPI.Comm | None" = None,
                 processes: Mapping[int, Process] | None = None):
        self._topology, self._comm, self._processes = topology, comm, processes or {}
        self.is_tolerant = False
        if comm is not None:
            from ..transport.mpi import ulfm
            self.is_tolerant = topology.size > 1 and ulfm.is_fault_tolerant()
        self.interruption = Interruption(self.is_tolerant)
        self.when_lost: Callable[[RanksLostError], None] = lambda _: None
        self._stopped = threading.Event()
        self._neighbours: Neighbours | None = None
        if topology.size > 1:
            others = [rank for rank in range(topology.size) if rank != topology.rank]
            self._neighbours = Neighbours(self._processes, others, self._have_ended,
                                          self._failed_ranks if self.is_tolerant else None)

    def _failed_ranks(self) -> list[int]:
        """The ranks of which MPI reports that they have failed, such as those of other hosts."""
        from ..transport.mpi import ulfm
        assert self._comm is not None
        failed = ulfm.failed_ranks(self._comm)
        if not failed and self.interruption.error is None and self._comm.Is_revoked():
            self.lose(())  # Another rank knows which, and recovers.
        return failed

    def stop(self) -> None:
        """Watch no more: the other ranks may end. May be called twice."""
        self._stopped.set()
        self.when_lost = lambda _: None
        if self._neighbours is not None:
            self._neighbours.stop()

    def _have_ended(self, ranks: Sequence[int]) -> None:
        lost = [LostRank(rank, self._topology.host_of[rank], self._how(rank)) for rank in ranks]
        if self.is_tolerant:
            from ..transport.mpi import ulfm
            assert self._comm is not None
            self.lose(lost)
            ulfm.report_failed(self._comm, [rank for rank in ranks if rank in self._processes], to_all=True)
        else:
            threading.Thread(target=self._end_job, args=(lost,), name="mpistrat-loss", daemon=True).start()

    def _how(self, rank: int) -> str:
        process = self._processes.get(rank)
        return "MPI reports its end" if process is None else f"process {process.pid} has ended"

    def lose(self, lost: Sequence[LostRank]) -> None:
        """End all engines of this rank: ranks are lost. Local; returns at once. Any thread may call it."""
        logger.debug("rank %d: lost %s", self._topology.rank, "; ".join(map(str, lost)))
        abort.leave_without_finalize()
        self.when_lost(self.interruption.add(lost))

    def _end_job(self, lost: Sequence[LostRank]) -> None:
        if not self._stopped.wait(_LAUNCHER_S):
            mpi = library.load_mpi()
            abort.end_job(mpi, mpi.COMM_WORLD.Get_rank(), self._topology.host, ErrorText(
                "", f"{'; '.join(map(str, lost))}: the job cannot go on, and its launcher has not ended it"))
