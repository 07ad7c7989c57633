"""Reports ranks of this host whose process has ended in the middle of the job, or was stopped.

mpirun mostly ends the job within half a second then. Sometimes it does not see the end: a shell around the rank lives
on, or the job is to go on without the rank. And the other ranks, which wait in shared memory, see nothing.

The kernel reports the end of a process by a descriptor (pidfd, from Linux 5.3 on). Without these the processes are
looked up now and then. A process that is stopped, or busy, has not ended. One that is stopped is looked for in /proc,
by one other rank. Ranks in containers with processes of their own are not watched: a process of that number has another
start time here.
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

_LOOK_S = 0.05  # between two looks at what the launcher reports of ranks that are not watched here
_STOP_LOOK_S = 1.0  # between two looks whether a process is stopped; each costs 0.02 ms


class Neighbours:
    """Calls `when_ended` with ranks whose processes have ended, each rank once, until `stop` is called.

    Args:
        processes: The process of each other rank of this host.
        others: All other ranks, also those of other hosts.
        when_ended: Called in a thread of this object. It must not call `stop`.
        reported: Returns the ranks of which something else knows that they have ended. It is called 20 times a second,
            if there are ranks whose processes cannot be watched; None: there is nothing else.
        beside: One of `processes`, of which this rank tells that it is stopped; None: of none.
        when_stopped: Called with this rank every second while it is stopped, with the seconds since then during which
            this process has run: a batch system may stop all of them. Called with 0.0 when it goes on.
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
        """Stop watching; `when_ended` is not called afterwards. May be called twice. Not from `when_ended`."""
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
        """Tell whether the process beside this one is stopped, or goes on."""
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
