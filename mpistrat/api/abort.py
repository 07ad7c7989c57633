"""The end of a whole job by one rank: what is said, and MPI_Abort with a limit."""

import faulthandler
import os
import sys
import time
import traceback
from typing import Any

from ..core import forked
from ..core.errors import CollectiveError, SettingsError, StallError
from . import launcher_watch

# Ranks that do not reach each other notice a stall one by one, each when it has itself waited for too long, and the
# first to end the job would take the error from the others.
_STALLS_DIFFER_S = 2.0


_OWN_ERRORS = "mpistrat.core.errors."


_ABORT_LIMIT_S = 20.0  # for MPI_Abort to end this process


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
