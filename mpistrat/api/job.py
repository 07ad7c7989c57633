"""Job: the objects of one rank from init() to shutdown(): settings, the group of all ranks, and process sets.

runtime.py makes and closes the Job, and gives it to the other modules. Any thread may read the Job. Only one thread may
close it at a time. Losses, a part of the Job, watches the other ranks.
"""

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import LostRank, RanksLostError, RecoveryError, ShutdownError, StallError
from ..core.interruption import Interruption
from ..core.settings import Settings
from ..core.topology import Topology, describe_wait
from ..elastic.elastic_job import job_of
from ..process import abort
from ..process.error_text import ErrorText
from ..process.peers import End, Invitation, Neighbours, Peers, elsewhere, local_addresses
from ..process.procfs import Process
from ..trace.tracer import Tracer
from ..transport.mpi import mpi_library
from .group import Group
from .process_sets import Registry

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_timelines = itertools.count()  # The number of timelines that this process has begun because of MPISTRAT_TIMELINE.
_LEAVE_S = 1.0  # The longest time that a rank that leaves waits for its engines.
_STOPPED_S = 5.0  # The time after which a process that is stopped is reported.
_CONNECT_LIMIT_S = 30.0  # The limit for a connection to rank 0's host, over all its addresses.
_LAUNCHER_S = 2.0  # The time for mpirun to end the job. It does so 0.4 s after a rank has ended, and prints the cause.


class Losses:
    """Watches for ranks that die or whose host is lost, and then ends the engines or the job. `stop` ends the watch.

    If the MPI library can continue without the lost ranks, all engines of this rank end with RanksLostError, and
    `elastic.run` reconnects the surviving ranks. Otherwise mpirun, or this rank after a moment, ends the job.

    Args:
        comm: The communicator of the ranks; None for one rank.
        processes: The processes of the other ranks of this host, by rank.
        stopped_limit_s: A process that has been stopped (SIGSTOP) for this many seconds is killed; 0: never.
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
            here = topology.local_ranks
            beside = here[(topology.local_rank + 1) % len(here)]  # Each rank watches the next rank of its host.
            self._neighbours = Neighbours(self.processes, others, self._have_died,
                                          self._failed_ranks if self.is_tolerant else None,
                                          beside if beside in self.processes else None, self._note_stopped)

    def _note_stopped(self, rank: int, seconds: float) -> None:
        """Log that a rank of this host has been stopped for `seconds` (0.0: it runs again). May kill the process."""
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
        """Return the ranks that MPI knows to have failed. If another rank recovers from a loss, end the engines."""
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
        """Start to probe the hosts every `probe_s`. A host that gives no answer for `limit_s` is lost. Collective.

        The first rank of each host connects to rank 0. If the connection fails, the rank only logs the error.
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
                logger.warning("rank 0 cannot open a port to watch the other hosts, so the loss of a host may stay "
                               "unnoticed: %s", error)
        invitation = self._comm.bcast(invitation)
        if topology.rank and self._hosts is not None and invitation is not None:
            there = replace(invitation, addresses=[*elsewhere(invitation.addresses), topology.hosts[0]])
            threading.Thread(target=self._connect, args=(self._hosts, there), name="mpistrat-hosts",
                             daemon=True).start()

    def _connect(self, hosts: Peers, invitation: Invitation) -> None:
        """Connect to rank 0. Runs in a separate thread, because it may wait many seconds for an address to answer."""
        try:
            hosts.connect(invitation, 0, _CONNECT_LIMIT_S)
        except OSError as error:
            logger.debug("rank %d: the loss of rank 0's host will not be noticed, because rank 0 cannot be reached: %s",
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
        """Stop watching. Call it before other ranks end normally. A second call does nothing."""
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
        """End all engines of this rank with RanksLostError, because the ranks in `lost` are lost. Local; does not wait.

        Outstanding and later collectives of this rank raise the error. Other ranks notice the loss by themselves. Any
        thread may call `lose`. A further call adds its ranks to the error.
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
    return f"this rank has lost {'; '.join(map(str, lost))}, without which it cannot go on"


class Job:
    """The objects of one rank that exist from init() to shutdown()."""

    def __init__(self, settings: Settings, world: Group, losses: Losses, tracer: Tracer | None):
        # world: All ranks of the job, with the engine that executes their collectives.
        # losses: Watches for ranks that end in the middle of the job.
        # tracer: Reports the operations of the engines; None: MPISTRAT_RECORDER=0.
        self.settings, self.world, self.losses, self.tracer = settings, world, losses, tracer
        self.topology, self.comm, self.engine = world.topology, world.comm, world.engine
        self.data_name = world.data_name  # The name of the backend that reduces CPU tensors of all ranks.
        # Whether the job began on several hosts. A loss of ranks does not change it, since traced functions rely on it.
        self.spans_hosts = len(self.topology.hosts) > 1
        self.registry = Registry(world, settings, losses.interruption)
        if tracer is not None:
            tracer.start(lambda: {number: group.traced for number, group in list(self.registry.groups.items())},
                         world.engine.controller.control.wake)
            if settings.timeline not in ("none", "DYNAMIC"):
                tracer.start_timeline(_next_file(settings.timeline), settings.timeline_mark_cycles,
                                      settings.timeline_window)
            elif self.topology.rank == 0:
                for is_set, setting in ((settings.timeline_window, f"STEPS={settings.timeline_steps}"),
                                        (settings.timeline_mark_cycles, "MARK_CYCLES=1")):
                    if is_set:
                        logger.warning("mpistrat: MPISTRAT_TIMELINE_%s has no effect, because MPISTRAT_TIMELINE names "
                                       "no file.", setting)
        elif settings.timeline != "none" and self.topology.rank == 0:
            logger.warning("mpistrat: there is no timeline, because MPISTRAT_RECORDER=0.")
        losses.when_lost = self._interrupt
        self._in_cluster = False

    def close(self) -> None:
        """Stop the engines, wait until all ranks have called close(), and free all resources. Collective.

        If a rank has not called close() within the stall limit, the job is aborted when this script ends. MPI_Finalize
        is then not called, because it would wait for that rank without a limit.
        """
        began = time.monotonic()
        log_step(self.topology.rank, "shutdown begins")
        groups = self._groups()
        self.registry.unbind()
        self._stop_tracer(closes=False)  # Its last messages are sent before the end is announced.
        had_ended = self.engine.controller.life.ended.is_set()
        # The announcements come first: a rank that waits for this one in any set fails now.
        for group in groups:
            group.engine.announce_end()
        for group in groups:
            group.engine.end(partial(log_step, self.topology.rank,
                                     "has shut down, and has waited %.0f s for the other ranks to do so"))
        self.losses.stop()  # All ranks have announced their end, or there was an error, so they may end now.
        # Only the error of all ranks' group decides on the wait: ranks outside a process set do not know its error.
        error = self.world.error
        if self.tracer is not None:
            self.tracer.close()
            if error is not None:
                self.tracer.tell_last()
            elif self.topology.rank == 0 and self.settings.log_level != "error" and (line := self.tracer.line):
                with contextlib.suppress(OSError, ValueError):  # There is no stderr, or no reader.
                    print(line, file=sys.stderr, flush=True)
        is_well = error is None or isinstance(error, StallError)
        if self.comm is not None and is_well and not self._in_cluster and not self._wait_for_all_ranks(self.comm):
            return
        if self.comm is not None and isinstance(error, ShutdownError) and not had_ended:
            abort.end_job_for_sys_exit(str(error))  # The other ranks wait for this one, which has left.
        log_step(self.topology.rank, "shut down in %.2f s, %s", time.monotonic() - began,
             "because all ranks have called shutdown" if error is None else f"after an error: {error}")
        if error is not None:
            return  # Freeing communicators is collective, and other ranks may not take part after an error.
        for group in reversed(groups):
            if group.error is None:
                group.free()

    def join_cluster(self) -> None:
        """Make `close` not wait for the other ranks, because the ranks have formed a cluster (cluster.py).

        In a cluster the other ranks close after the chief has ended. So a chief that waited for them in `close` would
        deadlock. Local; all ranks must call it.
        """
        self._in_cluster = True
        self.losses.stop()  # In a cluster, the connections to the chief show how ranks end.

    def _wait_for_all_ranks(self, comm: "MPI.Comm") -> bool:
        """Wait until all ranks have called `close`. Returns False if ranks are lost, or after the stall limit."""
        from ..transport.mpi.requests import never_free
        limit_s = self.settings.limit_s
        try:
            if mpi_library.wait_for_all(comm, limit_s, self.losses.interruption.check):
                return True
        except Exception:  # Of MPI, or RanksLostError.
            if not self.losses.is_tolerant:
                raise
            self.losses.lose(())
            comm.Revoke()  # So that no other rank waits for this one.
            never_free(self)
            return False
        never_free(self)  # MPI still has requests that use its memory.
        others = [rank for rank in range(self.topology.size) if rank != self.topology.rank]
        abort.end_job_at_exit(f"shutdown: {describe_wait(self.topology, others, limit_s)}")
        return False

    def _interrupt(self, error: RanksLostError) -> None:
        for group in self._groups():
            group.engine.interrupt(error)

    def await_gpu(self) -> None:
        """Wait for the GPU: it may still execute collectives whose handles are complete. Local. Raises EngineError."""
        for group in self._groups():
            group.await_gpu()

    def leave(self) -> None:
        """End the engines, because this rank has failed. The other ranks treat it as lost, and continue. Local."""
        log_step(self.topology.rank, "leaves the other ranks")
        self._stop_tracer()
        self.losses.stop()
        self.losses.lose(())
        for group in self._groups():
            group.engine.await_interrupted(_LEAVE_S)

    def revoke(self, limit_s: float) -> list[Any]:
        """End the engines after a loss of ranks, and give up all resources except the Job's own communicator. Local.

        Returns the MPI communicators and MPI requests that the caller must discard. Raises RecoveryError: An engine has
        not ended within `limit_s`.
        """
        self._stop_tracer()
        self.losses.stop()
        assert self.losses.interruption.error is not None
        self.losses.interruption.error.__traceback__ = None  # Its frames refer to memory that is to be freed.
        revoked: list[Any] = []
        for group in self._groups():
            if not group.engine.await_interrupted(limit_s):
                raise RecoveryError(f"the engine of rank {self.topology.rank} does not end after the loss of ranks.")
            revoked += group.revoke()
        return [each for each in revoked if each is not self.comm]

    def abandon(self, reason: str) -> None:
        """End the engines of this rank, because other ranks have died. Local. `reason` names the dead ranks."""
        log_step(self.topology.rank, "ends without the other ranks: %s", reason)
        self._stop_tracer()
        self.losses.stop()
        if self.comm is not None:
            mpi_library.finalize_without_barrier(mpi_library.load_mpi())
        for group in self._groups():
            group.engine.abandon(reason)

    def disable_after_fork(self, error: Exception) -> None:
        """Make collectives raise `error`. Called in a process that was forked from this rank."""
        for group in self._groups():
            group.engine.controller.queue.disable_after_fork(error)

    def _groups(self) -> list[Group]:
        """Return the groups of this rank, ascending by id, so that all ranks close them in the same order."""
        return [group for _, group in sorted(self.registry.groups.items())]

    def _stop_tracer(self, closes: bool = True) -> None:
        if self.tracer is not None:
            self.tracer.stop()
            if closes:
                self.tracer.close()


def _next_file(path: str) -> str:
    """Return the path of the timeline file: `path`, or with a number added if this job has used `path` before."""
    job = job_of(os.environ)
    if next(_timelines) == 0 and (job is None or job.generation == 1):
        return path
    start, ending = os.path.splitext(path)
    paths = (f"{start}.{number}{ending}" for number in itertools.count(1))
    return next(each for each in paths if not os.path.exists(each))


def log_step(rank: int, message: str, *values: object) -> None:
    """Log a step of init() or shutdown(): INFO on rank 0, DEBUG on all other ranks."""
    logger.log(logging.DEBUG if rank else logging.INFO, "rank %d: " + message, rank, *values)
