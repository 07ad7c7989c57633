"""The watch over the launcher: a rank whose launcher has ended, ends.

mpirun or srun ends last, and ends the ranks when it is told to end. When it is killed (kill -9, out of memory), or its
host is taken from the job, its ranks may live on: some hang in MPI, some train on with their results going nowhere.
MPI's library notices only in some of its calls.

The launcher is the nearest ancestor of a rank that is not of that rank itself: one without its rank in its environment,
or with another. mpirun is it on its own host, on others its daemon (prted, hydra_pmi_proxy), under Slurm slurmstepd.
Shells, debuggers and profilers between the launcher and Python have the environment of the rank and are passed over.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping

from ..core.tuning import LAUNCHER_POLL_S
from . import processes
from .launch_env import RUN_NAME, identity
from .processes import Process

logger = logging.getLogger(__name__)

ABORTED = signal.SIGURG  # what tells `mpistrat run` that a rank ends the job; elsewhere it does nothing


class LauncherWatch:
    """Ends this process, by a thread of its own, when the launcher has ended; until `stop`.

    Args:
        launcher: As from `launcher_here`.
    """

    def __init__(self, launcher: Process):
        self._launcher = launcher
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat-launcher-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer. May be called twice."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # Not by a descriptor of the process (pidfd), which older kernels of clusters lack.
        while not self._stopped.wait(LAUNCHER_POLL_S):
            if not self._launcher.is_alive():
                end_without_launcher(self._launcher)


def end_without_launcher(launcher: Process) -> None:
    """End this process and what it has started. Nothing that may block: no flush, no lock, no MPI."""
    text = (f"[mpistrat] this rank (process {os.getpid()}) ends, because the process that launched it "
            f"({launcher.pid}) has ended\n")
    try:
        # Its reader has mostly ended, too; but it may be a file, or a pipe that is full.
        os.set_blocking(sys.__stderr__.fileno(), False)  # type: ignore[union-attr]
        os.write(sys.__stderr__.fileno(), text.encode())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        pass  # There is nobody left to tell.
    for process in workers_of(os.getpid(), os.getpgrp(), processes.everything()):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except OSError:
            pass  # It has ended, or is another user's.
    os._exit(1)


def workers_of(pid: int, group: int, found: Iterable[Process]) -> list[Process]:
    """What a rank has started and a launcher would end with it: not what has left the rank's process group."""
    return [process for process in processes.descendants(pid, found) if process.group == group]


def launcher_here(environ: Mapping[str, str]) -> Process | None:
    """The launcher of this process, whose environment is given; None if there is none that can be seen."""
    if not identity(environ):
        return None
    ancestors = ((process, processes.environment_of(process.pid)) for process in processes.ancestors(os.getpid()))
    launcher = launcher_among(identity(environ), ancestors)
    logger.debug("the launcher is process %s", None if launcher is None else launcher.pid)
    return launcher


def launcher_among(own: tuple[str, ...],
                   ancestors: Iterable[tuple[Process, Mapping[str, str] | None]]) -> Process | None:
    """The nearest of the ancestors that is not of the rank `own` (see launch_environment.identity).

    Args:
        own: Of the rank.
        ancestors: The nearest first, each with its environment. None stands for one that cannot be read: a process of
            another user, as Slurm's are.
    """
    for process, environ in ancestors:
        if environ is None or identity(environ) != own:
            return process
    return None


def tell_of_abort(environ: Mapping[str, str]) -> None:
    """Tell `mpistrat run` that this rank ends the job, if it has started the launcher here, and not one around it.

    mpirun is told by MPI_Abort, but may have other hosts to end that it cannot reach.
    """
    launcher = launcher_here(environ)
    number = environ.get(RUN_NAME, "").partition("-")[0]
    if launcher is None or not number.isdigit():
        return
    is_inner = bool(identity(processes.environment_of(launcher.pid) or {}))  # mpirun that a rank has started
    if not is_inner and any(process.pid == int(number) for process in processes.ancestors(launcher.pid)):
        try:
            os.kill(int(number), ABORTED)
        except OSError:
            pass  # It has just ended.
