"""Finds the launcher of a rank, ends the rank after its launcher, and refuses init() in child processes of a rank.

The launcher is the nearest ancestor process whose environment does not have this rank's identity
(`launch_env.identity`). It is mpirun, or mpirun's daemon on this host (prted, hydra_pmi_proxy); under Slurm it is
slurmstepd. Shells, debuggers and profilers between the launcher and Python have the rank's environment, so they are
not taken for the launcher.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import NoReturn

from ..core.errors import NotInitializedError
from ..core.forked import RANK_PROCESS
from ..core.tuning import LAUNCHER_POLL_S
from . import procfs
from .launch_env import RUN_NAME, identity
from .procfs import Process

logger = logging.getLogger(__name__)

ABORTED = signal.SIGURG  # sent to `mpistrat run` when a rank ends the job; the default action of SIGURG is to ignore it
_STARTED = ("this process was started by a rank (process {rank}), and is not a rank: only process {rank} can call "
            "init(). If multiprocessing started this process, it imported the script again. Then put the code that "
            "only the rank must run under: if __name__ == '__main__':")


class LauncherWatch:
    """A thread that ends this process after `launcher` has ended. It checks once per second, until `stop` is called.

    Normally the launcher (mpirun or srun) ends last. If the launcher is killed (kill -9, out of memory), the ranks may
    continue: some hang in MPI, others train, but their results are lost. The MPI library detects the end of the
    launcher in only some of its calls.
    """

    def __init__(self, launcher: Process):
        self._launcher = launcher
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat-launcher-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. May be called twice."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # Polling (30 us per check) instead of a process descriptor (pidfd), which older kernels of clusters lack.
        while not self._stopped.wait(LAUNCHER_POLL_S):
            if not self._launcher.is_alive():
                end_now(f"the process that launched it ({self._launcher.pid}) has ended", 1)


def end_now(why: str, code: int) -> NoReturn:
    """End this process and its child processes. Makes no call that can block: no flush, no lock, no MPI."""
    text = f"[mpistrat] this rank (process {os.getpid()}) ends, because {why}\n"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # There is no stderr, or it has no reader.
        # stderr may be a full pipe without a reader, so the write must not block.
        os.set_blocking(sys.__stderr__.fileno(), False)  # type: ignore[union-attr]
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore[union-attr]
    for process in workers_of(os.getpid(), os.getpgrp(), procfs.running()):
        with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
            os.kill(process.pid, signal.SIGKILL)
    os._exit(code)


def workers_of(pid: int, group: int, found: Iterable[Process]) -> list[Process]:
    """Return the descendants of `pid` in `found` that are in process group `group`. A launcher would kill them, too."""
    return [process for process in procfs.descendants(pid, found) if process.group == group]


def launcher_here(environ: Mapping[str, str]) -> Process | None:
    """Return the launcher of this process, or None if /proc does not show one. `environ`: This process' environment."""
    if not identity(environ):
        return None
    launcher = start_of_rank(environ)[1]
    logger.debug("process %d: the launcher is process %s", os.getpid(), None if launcher is None else launcher.pid)
    return launcher


def start_of_rank(environ: Mapping[str, str]) -> tuple[int, Process | None]:
    """Return the pid of the process that the launcher has started for this rank, and the process of the launcher.

    The started process is this process, or a shell or wrapper around this process. The launcher is None if /proc does
    not show it. `environ`: This process' environment.
    """
    first = os.getpid()
    for process in procfs.ancestors(first):
        # The environment cannot be read if the process belongs to another user, as the processes of Slurm do.
        if identity(procfs.environment_of(process.pid) or {}) != identity(environ):
            return first, process
        first = process.pid
    return first, None


def require_own_place(environ: Mapping[str, str]) -> None:
    """Raise NotInitializedError if this process is a child process of a rank: MPI would mistake it for the rank.

    This happens with multiprocessing's "spawn" start method: the new process imports the script, which calls init()
    again. A process that mpirun started is accepted, even if a rank started that mpirun, because mpirun gives each
    process a new identity. Without a launcher every process is accepted.
    """
    number = environ.get(RANK_PROCESS, "")
    own = identity(environ)
    if own and number.isdigit() and int(number) != os.getpid():
        is_descendant = any(process.pid == int(number) for process in procfs.ancestors(os.getpid()))
        if is_descendant and identity(procfs.environment_of(int(number)) or {}) == own:
            raise NotInitializedError(_STARTED.format(rank=number))


def notify_abort(environ: Mapping[str, str]) -> None:
    """Send the signal ABORTED to `mpistrat run`, if it has started the launcher of this rank on this host.

    MPI_Abort reaches mpirun, but mpirun may then wait for hosts that it cannot reach. The signal makes `mpistrat run`
    end mpirun after a time limit. If a rank has started this mpirun, the `mpistrat run` of that rank gets no signal.
    """
    launcher = launcher_here(environ)
    number = environ.get(RUN_NAME, "").partition("-")[0]
    if launcher is None or not number.isdigit():
        return
    is_started_by_rank = bool(identity(procfs.environment_of(launcher.pid) or {}))
    if not is_started_by_rank and any(process.pid == int(number) for process in procfs.ancestors(launcher.pid)):
        with contextlib.suppress(OSError):  # `mpistrat run` has just ended.
            os.kill(int(number), ABORTED)
