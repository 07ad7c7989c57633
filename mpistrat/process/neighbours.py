"""Reports ranks of this host whose process has ended in the middle of the job, or was stopped.

If a rank ends, mpirun usually ends the job within half a second. Sometimes mpirun does not: a shell around the rank
lives on, or the job is to go on without the rank. The other ranks, which wait in shared memory, do not notice the end.

The kernel reports the end of a process by a descriptor (pidfd, from Linux 5.3 on). Without pidfd the processes are
polled. A process that is stopped, or busy, has not ended. One other rank polls /proc for whether a process is stopped.
Ranks in containers with a separate pid namespace are not watched: in this container their pid belongs to a process with
another start time.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping

from ..core.tuning import LAUNCHER_POLL_S
from .procfs import Process

logger = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two checks of the launcher's reports on ranks that are not watched by process
_STOP_LOOK_S = 1.0  # between two checks whether a process is stopped; a check costs 0.02 ms


class Neighbours:
    """Calls `when_ended` with ranks whose processes have ended, once for each rank, until `stop` is called.

    Args:
        processes: The process of each other rank of this host.
        others: All other ranks, including ranks of other hosts.
        when_ended: Called in a thread of this object. It must not call `stop`.
        reported: Returns the ranks that have ended according to another source, such as MPI. Called 20 times a second
            if some ranks' processes cannot be watched; None: there is no other source.
        beside: The rank in `processes` that this rank checks for being stopped; None: no rank.
        when_stopped: Called with `beside` in each second in which its process is stopped, and the seconds since then in
            which this process ran (a batch system may stop all). Called with 0.0 when the stopped process continues.
    """

    def __init__(self, processes: Mapping[int, Process], others: Collection[int],
                 when_ended: Callable[[list[int]], None], reported: Callable[[], Collection[int]] | None = None,
                 beside: int | None = None, when_stopped: Callable[[int, float], None] = lambda *_: None):
        self._when_ended = when_ended
        self._beside = None if beside is None else (beside, processes[beside])
        self._when_stopped = when_stopped
        self._stopped_looks = 0
        self._known: set[int] = set()
        self._poller = select.poll()
        self._descriptors: dict[int, int] = {}  # pidfd: rank
        self._processes: dict[int, Process] = {}  # of ranks without a pidfd
        for rank, process in processes.items():
            self._add(rank, process)
        is_blind = len(self._descriptors) + len(self._processes) < len(others)
        self._reported = reported if is_blind else None
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._poller.register(self._stopped, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="mpistrat-neighbours", daemon=True)
        self._thread.start()

    def _add(self, rank: int, process: Process) -> None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:  # An older kernel, a container that forbids it, or no process of that number.
            if process.is_alive():
                self._processes[rank] = process
            return
        if process.is_alive():
            self._descriptors[descriptor] = rank
            self._poller.register(descriptor, select.POLLIN)
        else:
            os.close(descriptor)  # Of another process, in another container.

    def stop(self) -> None:
        """Stop watching; `when_ended` is not called afterwards. May be called twice, but not in `when_ended`."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            self._thread.join()
            for descriptor in (self._stopped, *self._descriptors):
                os.close(descriptor)
            self._descriptors.clear()

    def _run(self) -> None:
        wait_s = [_LOOK_S] * (self._reported is not None) + [LAUNCHER_POLL_S] * bool(self._processes)
        wait_s += [_STOP_LOOK_S] * (self._beside is not None)
        look_at = time.monotonic() + _STOP_LOOK_S
        while True:
            ready = [descriptor for descriptor, _ in self._poller.poll(min(wait_s) * 1000 if wait_s else None)]
            if self._stopped in ready:
                return
            ended = {self._descriptors[descriptor] for descriptor in ready}
            ended |= {rank for rank, process in self._processes.items() if not process.is_alive()}
            ended |= set(self._reported() if self._reported is not None else ())
            for descriptor in ready:
                self._poller.unregister(descriptor)
            new = sorted(ended - self._known)
            if new:
                self._known |= ended
                self._when_ended(new)
            if time.monotonic() >= look_at:
                self._look_beside()
                look_at = time.monotonic() + _STOP_LOOK_S

    def _look_beside(self) -> None:
        """Call `when_stopped` if the process of the rank `beside` is stopped, or continues."""
        if self._beside is None:
            return
        rank, process = self._beside
        if process.is_stopped():
            self._stopped_looks += 1
            self._when_stopped(rank, self._stopped_looks * _STOP_LOOK_S)
        elif self._stopped_looks:
            self._stopped_looks = 0
            if rank not in self._known:
                self._when_stopped(rank, 0.0)
