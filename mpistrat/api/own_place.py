"""Programs that a rank has started: they must not take the rank's place in the job.

A program that a rank starts has the rank's environment, by which the launcher's MPI would take it for the rank. That
happens by mistake where multiprocessing starts a process afresh ("spawn"), which imports the script once more.
"""

import os
from collections.abc import Mapping

from ..core.errors import NotInitializedError
from ..core.forked import RANK_PROCESS
from . import processes
from .launch_env import identity

_STARTED = ("this process was started by a rank (process {rank}), and is none itself: only that process can call "
            "init(). If multiprocessing has started it, and so has imported the script once more, put what only the "
            "script itself shall do below: if __name__ == '__main__':")


def require_own_place(environ: Mapping[str, str]) -> None:
    """Raise NotInitializedError in a process that has its place in the job from a rank that has started it.

    One that mpirun has started, even if a rank has started mpirun, has a place of its own; and without a launcher every
    process may be a rank.
    """
    number = environ.get(RANK_PROCESS, "")
    own = identity(environ)
    if own and number.isdigit() and int(number) != os.getpid():
        above = any(process.pid == int(number) for process in processes.ancestors(os.getpid()))
        if above and identity(processes.environment_of(int(number)) or {}) == own:
            raise NotInitializedError(_STARTED.format(rank=number))
