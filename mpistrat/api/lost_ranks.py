"""Losses: notices ranks that have died, or whose host is lost, and reacts to the loss.

If the MPI library can continue without the lost ranks, all engines of this rank end with RanksLostError, and
`elastic.run` reconnects the surviving ranks (recovery.py). Otherwise mpirun, or this rank after a moment, ends the job.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.errors import LostRank, RanksLostError
from ..core.interruption import Interruption
from ..core.topology import Topology
from ..process import abort
from ..process.error_text import ErrorText
from ..process.peers import End, Invitation, Neighbours, Peers, elsewhere, local_addresses
from ..process.procfs import Process
from ..transport.mpi import mpi_library

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_STOPPED_S = 5.0  # The time after which a process that is stopped is reported.
_CONNECT_LIMIT_S = 30.0  # The limit for a connection to rank 0's host, over all its addresses.
_LAUNCHER_S = 2.0  # The time for mpirun to end the job. It does so 0.4 s after a rank has ended, and prints the cause.


class Losses:
    """Watches the other ranks from its construction until `stop` is called.

    Args:
        comm: The communicator of the ranks; None for one rank.
        processes: The processes of the other ranks of this host, by rank.
        stopped_limit_s: Seconds after which a rank whose process is stopped is killed; 0: never.
    """

    def __init__(self, topology: Topology, comm: "MPI.Comm | None" = None,
                 processes: Mapping[int, Process] | None = None, stopped_limit_s: float = 0.0):
        self._topology, self._comm, self.processes = topology, comm, processes or {}
        self._stopped_limit_s = stopped_limit_s
        self.is_tolerant = False  # Whether the job can survive the loss of a rank.
        if comm is not None:
            from ..transport.mpi import ulfm
            self.is_tolerant = topology.size > 1 and ulfm.is_fault_tolerant()
        self.interruption = Interruption(self.is_tolerant)  # Ends the waits of this rank.
        self.irreplaceable: dict[int, str] = {}  # Ranks without which no other rank can go on, and the reasons.
        # Called in any thread, after ranks were added to the interruption.
        self.when_lost: Callable[[RanksLostError], None] = lambda _: None
        self._stopped = threading.Event()
        self._hosts: Peers | None = None
        self._neighbours: Neighbours | None = None
        if topology.size > 1:
            others = [rank for rank in range(topology.size) if rank != topology.rank]
            self._neighbours = Neighbours(self.processes, others, self._have_died,
                                          self._failed_ranks if self.is_tolerant else None, self._beside(),
                                          self._note_stopped)

    def _beside(self) -> int | None:
        """Return the rank that this rank watches: the next rank of its host, in a circle. None if it is not known."""
        here = self._topology.local_ranks
        following = here[(here.index(self._topology.rank) + 1) % len(here)]
        return following if following in self.processes else None

    def _note_stopped(self, rank: int, seconds: float) -> None:
        """Report that a rank of this host has been stopped for `seconds`, or runs again (0.0). May kill the rank."""
        pid, host = self.processes[rank].pid, self._topology.host_of[rank]
        if not seconds:
            logger.info("rank %d on %s (process %d) goes on after it was stopped", rank, host, pid)
        elif self._stopped_limit_s and seconds >= self._stopped_limit_s:
            logger.warning("mpistrat: rank %d on %s (process %d) is killed: it has been stopped for %g s "
                           "(MPISTRAT_STOPPED_LIMIT_S).", rank, host, pid, seconds)
            with contextlib.suppress(ProcessLookupError):  # The process has just ended.
                os.kill(pid, signal.SIGKILL)
        elif seconds == _STOPPED_S:
            logger.warning("mpistrat: rank %d on %s (process %d) has been stopped for %g s, by a signal (SIGSTOP) or a "
                           "debugger. The other ranks wait for it. To let it go on: kill -CONT %d", rank, host, pid,
                           seconds, pid)

    def _failed_ranks(self) -> list[int]:
        """Return the ranks that have failed as far as MPI knows, ranks of other hosts included."""
        from ..transport.mpi import ulfm
        assert self._comm is not None
        failed = ulfm.failed_ranks(self._comm)
        if not failed and self.interruption.error is None and self._comm.Is_revoked():
            self.lose(())  # Another rank knows which ranks are lost, and recovers.
        return failed

    @property
    def lost(self) -> tuple[LostRank, ...]:
        """The ranks that are known to be lost."""
        return () if self.interruption.error is None else self.interruption.error.lost

    def watch_hosts(self, probe_s: float, limit_s: float) -> None:
        """Watch for hosts that do not answer for `limit_s`. Collective.

        The first rank of each host connects to rank 0. If it cannot, it only logs the error.
        """
        topology, invitation = self._topology, None
        firsts = {topology.ranks_on(host)[0]: host for host in topology.hosts}
        if self._comm is None or len(firsts) == 1 or not limit_s:
            return
        if topology.rank in firsts:
            self._hosts = Peers(topology.rank, (probe_s, limit_s))
            # Ignore the end of a process here: mpirun, or the ranks of its host, know why it has ended.
            self._hosts.watch(lambda first, end: self._lose_host(first, limit_s) if end is End.HOST_LOST else None)
        if topology.rank == 0 and self._hosts is not None:
            try:
                invitation = self._hosts.listen([rank for rank in firsts if rank], local_addresses())
            except OSError as error:
                logger.warning("rank 0: there is no port to watch the other hosts: %s", error)
        invitation = self._comm.bcast(invitation)
        if topology.rank and self._hosts is not None and invitation is not None:
            there = replace(invitation, addresses=[*elsewhere(invitation.addresses), topology.hosts[0]])
            threading.Thread(target=self._connect, args=(self._hosts, there), name="mpistrat-hosts",
                             daemon=True).start()

    def _connect(self, hosts: Peers, invitation: Invitation) -> None:
        """Connect to rank 0. Runs in a separate thread, since an address may not answer for seconds."""
        try:
            hosts.connect(invitation, 0, _CONNECT_LIMIT_S)
        except OSError as error:
            logger.debug("rank %d: the loss of the first rank's host will not be noticed, since it is not reached: %s",
                         self._topology.rank, error)

    def _lose_host(self, first: int, limit_s: float) -> None:
        host = self._topology.host_of[first]
        lost = [LostRank(rank, host, f"its host is lost: no answer for {limit_s:g} s")
                for rank in self._topology.ranks_on(host)]
        if self.is_tolerant and first:
            self.lose(lost)
            self._report_failed([each.rank for each in lost])
        elif self.is_tolerant:
            # Otherwise both sides of a cut link would continue, each as a separate job.
            rank = mpi_library.load_mpi().COMM_WORLD.Get_rank()
            abort.end_alone(rank, self._topology.host, ErrorText("", _text(lost)), 1)
        elif not self._stopped.is_set():
            self._end_now(lost)

    def stop(self) -> None:
        """Stop watching, because the other ranks may end from now on. May be called twice."""
        self._stopped.set()
        self.when_lost = lambda _: None
        for watch in (self._neighbours, self._hosts):
            if watch is not None:
                watch.stop()

    def _have_died(self, ranks: Sequence[int]) -> None:
        lost = []
        for rank in ranks:
            process = self.processes.get(rank)
            how = "MPI reports its death" if process is None else f"process {process.pid} has died"
            lost.append(LostRank(rank, self._topology.host_of[rank], how))
        if self.is_tolerant:
            self.lose(lost)
            self._report_failed([rank for rank in ranks if rank in self.processes])
        else:
            threading.Thread(target=self._end_job, args=(lost,), name="mpistrat-loss", daemon=True).start()

    def _report_failed(self, ranks: Sequence[int]) -> None:
        from ..transport.mpi import ulfm
        assert self._comm is not None
        ulfm.report_failed(self._comm, ranks, to_all=True)

    def lose(self, lost: Sequence[LostRank]) -> None:
        """End all engines of this rank with RanksLostError, because these ranks are lost. Local; returns at once.

        Waiting and later collectives of this rank raise this error. Other ranks notice the loss by themselves. Any
        thread may call `lose`, and more than once: ranks that are lost later are added to the error.
        """
        logger.debug("rank %d: lost %s", self._topology.rank, "; ".join(map(str, lost)))
        abort.leave_without_finalize()
        self.when_lost(self.interruption.add(lost))

    def _end_job(self, lost: Sequence[LostRank]) -> None:
        abort.tell_last()
        if not self._stopped.wait(_LAUNCHER_S):
            self._end_now(lost)

    def _end_now(self, lost: Sequence[LostRank]) -> None:
        mpi = mpi_library.load_mpi()
        abort.end_job(mpi, mpi.COMM_WORLD.Get_rank(), self._topology.host, ErrorText("", _text(lost)))


def _text(lost: Sequence[LostRank]) -> str:
    return f"lost {'; '.join(map(str, lost))}, without which this rank cannot go on"
