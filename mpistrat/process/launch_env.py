"""What the environment of a process says about its launcher (mpirun, srun), and the variables of `mpistrat run`.

Any process may call the functions, also before init().
"""

import gc
import os
from collections.abc import Mapping

from .launchers import LAUNCHERS, launcher_of

# Variables that `mpistrat run` sets for the ranks on all hosts. They are not settings.
RUN_NAME = "_MPISTRAT_RUN"  # for mpirun: the process number of `mpistrat run`, and a random text, unique to the run
RUN_REPORTS = "_MPISTRAT_REPORTS"  # how a failing rank reports the reason (`report`)
# Set if mpirun binds no rank: the ranks divide the cores when Python starts. "report": Each rank prints its cores.
RUN_CORES = "_MPISTRAT_CORES"
RUN_ELASTIC = "_MPISTRAT_ELASTIC"  # with --elastic: the job, as JSON (elastic/elastic_job.py)
RUN_STEPS = "_MPISTRAT_STEPS"  # with --efficiency: after how many steps the script ends
RUN_KERAS_2 = "_MPISTRAT_KERAS_2"  # with --as-horovod=keras2: Keras 3 takes three words of Keras 2

# The values of these variables together differ for every process that a launcher starts.
_IDENTITY = tuple(dict.fromkeys(name for each in LAUNCHERS for name in (each.rank, *each.process)))


def launched_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of processes that the launcher started, and the name of the launcher.

    Without a launcher the result is (1, ""). The number is 0 if only the MPI library knows it.
    """
    if (launcher := launcher_of(environ)) is None:
        return 1, ""
    size = environ.get(launcher.size, "")
    return int(size) if size.isdigit() else 0, launcher.title


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process; 0 if there is no launcher."""
    launcher = launcher_of(environ)
    return 0 if launcher is None else int(environ[launcher.rank])


def identity(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return values of the environment that tell one rank from all others; () without a launcher.

    A rank, its child processes, and the shells and wrappers around the rank have the same values.
    """
    return () if launcher_of(environ) is None else tuple(environ.get(name, "") for name in _IDENTITY)


def freeze_libraries() -> None:
    """Exclude all existing objects from garbage collection, in a job of several ranks.

    Importing mpistrat.tensorflow or mpistrat.keras calls this at its end. TensorFlow and Keras make 380,000 objects
    that live until the process ends. A garbage collection of all of them takes 0.2 s, and Python collects four or five
    times when it ends. Without this function each rank would end 0.9 s later.
    """
    if launched_size(os.environ)[0] != 1:
        gc.freeze()
