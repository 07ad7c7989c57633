"""Recovery: after a loss of ranks, the surviving ranks reconnect in the same processes, with new rank numbers.

It needs Open MPI under `mpirun --with-ft ulfm`. All parts of the job are made again over the surviving ranks:
communicators, shared memory, engines, roles and process sets. Objects of the script are kept: models, optimizers,
traced functions, strategies, ProcessSet objects.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING

from ...core import forked
from ...core.errors import RecoveryError
from ...core.handle import require_no_driver
from ...transport.mpi import mpi_library
from .. import runtime
from ..job import Job

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_DISCARD_S = 0.2  # Time for MPI to end the requests on the old communicators.
_QUIET_S = 0.02  # Recovery begins when no further rank was lost for this long.
_NEWS_S, _NEWS_POLL_S = 0.5, 0.01  # Time for MPI to learn of a loss that another rank has noticed.


def recover(limit_s: float = 5.0) -> None:
    """Reconnect the surviving ranks after a RanksLostError. Collective over the surviving ranks; in the main thread.

    The surviving ranks are renumbered in their old order, so rank(), size() and so on change. Averages divide by the
    new size. Process sets lose the lost ranks, and a set without any surviving rank is removed. Collectives that were
    in flight are lost.

    Args:
        limit_s: The time limit in seconds. It includes the wait for ranks that still compute.

    Raises:
        RecoveryError: The limit has passed, MPI fails, or the job cannot recover. The caller must then end the process
            with os._exit, since threads may hang in MPI.
    """
    forked.require_rank()
    require_no_driver("recover()")
    former = runtime.current()
    if not former.losses.is_tolerant:
        raise RecoveryError("a job can recover only with several ranks, Open MPI, and mpirun --with-ft ulfm.")
    began = time.monotonic()
    if former.losses.interruption.error is None:
        former.losses.lose(())
    for rank, why in former.losses.irreplaceable.items():
        if any(each.rank == rank for each in former.losses.lost):
            raise RecoveryError(f"rank {rank} is lost. {why}")
    attempt = _Attempt(former, began + limit_s)
    thread = threading.Thread(target=attempt.run, name="mpistrat-recovery", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RecoveryError(f"rank {former.topology.rank} {attempt.stage} for more than {limit_s:g} s. Start the job "
                            "again; it continues from the last commit that is in a file, if any.")
    if attempt.made is None:
        raise RecoveryError(f"rank {former.topology.rank} cannot recover: {attempt.problem}") from attempt.problem
    runtime.replace(former, attempt.made)
    logger.info("rank %d of %d: recovered in %.2f s; was rank %d of %d", attempt.made.topology.rank,
                attempt.made.topology.size, time.monotonic() - began, former.topology.rank, former.topology.size)


class _Attempt:
    """One recovery. `run` is called in a separate thread, since calls of MPI have no time limits."""

    def __init__(self, former: Job, deadline: float):
        self._former, self._deadline = former, deadline
        self.stage = "ends its engines"  # The current step of this rank, for errors.
        self.made: Job | None = None  # The new Job; None before it is made.
        self.problem: Exception | None = None  # The error of `run`, if it has failed.

    def run(self) -> None:
        try:
            self.made = self._recovered()
        except Exception as error:  # Of any kind: `recover` raises it.
            logger.debug("rank %d: the recovery failed", self._former.topology.rank, exc_info=True)
            self.problem = error

    def _recovered(self) -> Job:
        from ...transport.mpi import ulfm
        base = self._former.comm
        assert base is not None  # The job is tolerant.
        # Often several ranks end together. Open MPI 5.0.11 has crashed if a rank ended during MPIX_Comm_shrink.
        known = -1
        while known < len(self._former.losses.lost) and time.monotonic() < self._deadline:
            known = len(self._former.losses.lost)
            time.sleep(_QUIET_S)
        ulfm.report_failed(base, [each.rank for each in self._former.losses.lost], to_all=False)
        ulfm.discard(self._former.revoke(self._deadline - time.monotonic()), _DISCARD_S)
        comm = base
        while True:
            self.stage = "has waited for the other ranks to agree on who is left"
            earlier, comm = comm, ulfm.survivors(comm)
            if earlier is not base:
                ulfm.discard([earlier], 0.0)
            self.stage = "has connected the ranks that are left"
            made, problem = self._connected(comm, base)
            self.stage = "has waited for the other ranks to connect"
            if ulfm.have_all(comm, problem is None) and made is not None:
                ulfm.discard([base], 0.0)
                return made
            if made is not None:
                made.losses.lose(())
                ulfm.discard(made.revoke(self._deadline - time.monotonic()), _DISCARD_S)
            if problem is not None and not self._is_lost_by_now(comm):
                raise problem
            logger.debug("rank %d: ranks were lost during the recovery, which begins again", self._former.topology.rank)

    def _connected(self, comm: "MPI.Intracomm", base: "MPI.Intracomm") -> tuple[Job | None, Exception | None]:
        """Return the new Job over `comm`, or None, and the error that has interrupted making it. Collective."""
        made = None
        try:
            former_ranks = mpi_library.ranks_in(comm, base)
            new_ranks = {former: rank for rank, former in enumerate(former_ranks)}
            # Open MPI may crash if a rank ends while a communicator is made, so make as few as possible.
            hosts = [self._former.topology.host_of[rank] for rank in former_ranks]
            made = runtime.connected(comm, binds=False, hosts=hosts)
            made.spans_hosts = self._former.spans_hosts
            made.registry.restore(self._former.registry, new_ranks)
            made.losses.irreplaceable.update((new_ranks[rank], why) for rank, why in
                                             self._former.losses.irreplaceable.items() if rank in new_ranks)
            return made, None
        except Exception as error:  # Of any kind: the other ranks must not wait for this one.
            logger.debug("rank %d: the ranks that are left are not connected", self._former.topology.rank,
                         exc_info=True)
            comm.Revoke()
            return made, error

    def _is_lost_by_now(self, comm: "MPI.Intracomm") -> bool:
        """Return whether a rank of `comm` is lost. Waits a moment, since MPI may learn of a loss late."""
        from ...transport.mpi import ulfm
        until = min(time.monotonic() + _NEWS_S, self._deadline)
        while not ulfm.failed_ranks(comm):
            if time.monotonic() > until:
                return False
            time.sleep(_NEWS_POLL_S)
        return True
