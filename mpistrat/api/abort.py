"""End the whole job from one rank: print the reason, then call MPI_Abort with a time limit.

`end_job_on_exception` installs this as the reaction to an uncaught exception. Without it, the other ranks would wait
for this one until the stall limit.
"""

import faulthandler
import os
import sys
import time
import traceback
from types import ModuleType, TracebackType

from ..core import forked
from ..core.errors import CollectiveError, SettingsError, StallError
from . import launcher_watch

# Ranks that cannot reach each other detect a stall at different times, each after its own wait. If the first of them
# aborted at once, the others would not get to raise their error.
_STALL_SPREAD_S = 2.0
_OWN_ERRORS = "mpistrat.core.errors."
_ABORT_LIMIT_S = 20.0  # from the call of MPI_Abort to the end of this process


def end_job(mpi: ModuleType, rank: int, host: str, reason: str, code: int = 1, wait_s: float = 0.0) -> None:
    """Print why this rank ends the whole job, wait `wait_s`, and end the job with exit code `code`. Local."""
    try:
        print(f"[mpistrat] rank {rank} on {host} ends the job: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(wait_s)
    finally:
        # Also if printing fails: a launcher that has already ended no longer reads the output.
        launcher_watch.notify_abort(os.environ)
        _end_after(_ABORT_LIMIT_S)
        mpi.COMM_WORLD.Abort(code)


def end_job_on_exception(mpi: ModuleType, rank: int, host: str) -> None:
    """Make an uncaught exception on this rank end the whole job. Local. Further calls do nothing."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if forked.is_child():
            return previous(kind, error, trace)
        try:
            previous(kind, error, trace)
        finally:
            cause = cause_of(kind, error)
            # All ranks raise these errors, so this rank waits until the others have printed theirs. The waits differ by
            # rank because the ranks must not abort at the same moment: Open MPI 5's mpirun has been seen to hang after
            # that, with no rank left.
            is_on_all_ranks = isinstance(error, CollectiveError | SettingsError) or cause.startswith(_OWN_ERRORS)
            wait_s = 0.5 + 0.25 * min(rank, 8) if is_on_all_ranks else 0.0
            if isinstance(error, StallError):
                wait_s += _STALL_SPREAD_S
            end_job(mpi, rank, host, cause, 130 if issubclass(kind, KeyboardInterrupt) else 1, wait_s)

    if getattr(previous, "_mpistrat", False):
        return
    hook._mpistrat = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def cause_of(kind: type[BaseException], error: BaseException) -> str:
    """Return one line that describes the exception.

    TensorFlow puts an error that was raised inside a graph into the text of its own exception. If that text has a line
    with an error of mpistrat, this is the line; otherwise it is the first one.
    """
    lines = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()
    return next((line for line in lines if line.startswith(_OWN_ERRORS)), lines[0])


def _end_after(limit_s: float) -> None:
    """Print the stacks and end this process after `limit_s`. MPI_Abort waits for the launcher and may not return."""
    try:
        # faulthandler's thread does not need the GIL, which mpi4py does not release during MPI_Abort.
        faulthandler.dump_traceback_later(limit_s, exit=True)
    except (AttributeError, OSError, ValueError, RuntimeError):
        pass  # There is no stderr to print to, so MPI_Abort runs without a limit.
