"""Refuse init() in a child process of a rank, which MPI would mistake for the rank.

A child process inherits the rank's environment, and so the rank's identity in the job. A child calls init() by mistake
with multiprocessing's "spawn" start method, which imports the script again in a new process.
"""

import os
from collections.abc import Mapping

from ..core.errors import NotInitializedError
from ..core.forked import RANK_PROCESS
from . import procfs
from .launch_env import identity

_STARTED = ("this process was started by a rank (process {rank}), and is not a rank: only process {rank} can call "
            "init(). If multiprocessing started this process, it imported the script again. Then put the code that "
            "only the rank must run under: if __name__ == '__main__':")


def require_own_place(environ: Mapping[str, str]) -> None:
    """Raise NotInitializedError if this process has inherited its identity from a rank.

    A process that mpirun started is accepted, even if a rank started that mpirun, since mpirun gave it a new identity.
    Without a launcher every process is accepted.
    """
    number = environ.get(RANK_PROCESS, "")
    own = identity(environ)
    if own and number.isdigit() and int(number) != os.getpid():
        is_descendant = any(process.pid == int(number) for process in procfs.ancestors(os.getpid()))
        if is_descendant and identity(procfs.environment_of(int(number)) or {}) == own:
            raise NotInitializedError(_STARTED.format(rank=number))
