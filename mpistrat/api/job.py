"""Job: what one rank has of a job from init() to shutdown(): settings, the group of all ranks, and process sets.

runtime.py makes and closes the Job, and gives it to the other modules. Any thread may read it; one thread at a time
closes it.
"""

import contextlib
import itertools
import logging
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.errors import RanksLostError, RecoveryError, ShutdownError, StallError
from ..core.settings import Settings
from ..core.stalls import describe_wait
from ..core.topology import Topology
from ..elastic.elastic_job import job_of
from ..engine.engine import Engine
from ..process import abort
from ..trace.tracer import Tracer
from ..transport.mpi import mpi_library
from .group import Group
from .lost_ranks import Losses
from .process_sets import Registry

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_timelines = itertools.count()  # The number of timelines that this process has begun because of MPISTRAT_TIMELINE.
_LEAVE_S = 1.0  # The longest time that a rank that leaves waits for its engines.


class Job:
    """The objects of one rank that exist from init() to shutdown()."""

    def __init__(self, settings: Settings, world: Group, losses: Losses, tracer: Tracer | None):
        # world: All ranks of the job, with the engine that executes their collectives.
        # losses: Watches for ranks that end in the middle of the job.
        # tracer: Reports the operations of the engines; None: MPISTRAT_RECORDER=0.
        self.settings, self.world, self.losses, self.tracer = settings, world, losses, tracer
        # Whether the job began on several hosts. A loss of ranks does not change it, since traced functions rely on it.
        self.spans_hosts = len(world.topology.hosts) > 1
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

    @property
    def topology(self) -> Topology:
        """The ranks and hosts of the job."""
        return self.world.topology

    @property
    def comm(self) -> "MPI.Intracomm | None":
        """The communicator of all ranks; None for one rank without MPI."""
        return self.world.comm

    @property
    def data_name(self) -> str:
        """The name of the backend that reduces CPU tensors of all ranks."""
        return self.world.data_name

    @property
    def engine(self) -> Engine:
        """The engine of all ranks."""
        return self.world.engine

    def close(self) -> None:
        """Wait until all ranks have called close(), stop the engines and free all resources. Collective.

        The wait for ranks that cannot be reached ends after the stall limit. MPI_Finalize, which would wait without a
        limit, is then not called, and the job is aborted when this script ends.
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
        """Make `close` return without waiting for the other ranks to close. Collective.

        In a cluster with parameter servers a rank announces its end when it starts to wait for the chief, and closes
        after the chief has ended. A chief that waited for these ranks in `close` would deadlock.
        """
        self._in_cluster = True
        self.losses.stop()  # In a cluster, the connections to the chief show how ranks end.

    def _wait_for_all_ranks(self, comm: "MPI.Comm") -> bool:
        """Wait until all ranks have called `close`. Returns False if ranks are lost, or after the stall limit."""
        from ..transport.mpi.peer_wait import never_free
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
        """Wait until the GPU has done the collectives that are complete on this rank. Local. Raises EngineError."""
        for group in self._groups():
            group.await_gpu()

    def leave(self) -> None:
        """End on this rank only. The other ranks then treat this rank as lost. Local."""
        log_step(self.topology.rank, "leaves the other ranks")
        self._stop_tracer()
        self.losses.stop()
        self.losses.lose(())
        for group in self._groups():
            group.engine.await_interrupted(_LEAVE_S)

    def revoke(self, limit_s: float) -> list[Any]:
        """End the engines and give up all resources but `comm`, after the loss of ranks. Local.

        Returns:
            The communicators and requests of MPI, for the caller to discard.

        Raises:
            RecoveryError: An engine has not ended within the limit.
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
        """End on this rank only, because other ranks have died. Local. `reason` names them."""
        log_step(self.topology.rank, "ends without the other ranks: %s", reason)
        self._stop_tracer()
        self.losses.stop()
        if self.comm is not None:
            mpi_library.finalize_without_barrier(mpi_library.load_mpi())
        for group in self._groups():
            group.engine.abandon(reason)

    def disable_after_fork(self, error: Exception) -> None:
        """Make collectives raise `error`. Called in a forked process."""
        for group in self._groups():
            group.engine.disable_after_fork(error)

    def _groups(self) -> list[Group]:
        """Return the groups of this rank, ascending by id, so that all ranks close them in the same order."""
        return [group for _, group in sorted(self.registry.groups.items())]

    def _stop_tracer(self, closes: bool = True) -> None:
        if self.tracer is not None:
            self.tracer.stop()
            if closes:
                self.tracer.close()


def _next_file(path: str) -> str:
    """Return the path for a timeline: `path`, or one with a number if an earlier part of this job has used `path`."""
    job = job_of(os.environ)
    if next(_timelines) == 0 and (job is None or job.generation == 1):
        return path
    start, ending = os.path.splitext(path)
    paths = (f"{start}.{number}{ending}" for number in itertools.count(1))
    return next(each for each in paths if not os.path.exists(each))


def log_step(rank: int, message: str, *values: object) -> None:
    """Log a step of init() or shutdown(): INFO on rank 0, DEBUG on the others."""
    logger.log(logging.DEBUG if rank else logging.INFO, "rank %d: " + message, rank, *values)
