"""End the whole job from one rank: print the reason, then call MPI_Abort with a time limit.

init() calls `prepare`. After that an uncaught exception of the main thread ends the job, even if the script replaces
sys.excepthook. If the job went on, the other ranks would wait for the failed rank until the stall limit. shutdown()
calls `end_job_at_exit` if other ranks do not answer, because MPI_Finalize would wait for those ranks without a limit.
All functions are local.
"""

import atexit
import contextlib
import faulthandler
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

from ..core import forked, signal_handlers
from ..core.errors import CollectiveError, SettingsError, StallError
from . import exit_code, launcher_watch, report
from .error_text import OWN_ERRORS, ErrorText, describe
from .launch_env import launched_rank
from .launchers import launcher_of

# Ranks that cannot reach each other detect a stall at different times, each after its own wait. If the first of them
# aborted at once, the others would not get to raise their error.
_STALL_SPREAD_S = 2.0
# A rank that has left by sys.exit() ends the job with its exit code. The waiting ranks must not end the job before.
_EXIT_SPREAD_S = 2.0
# A rank that fails before init() ends so much later, since mpirun ends all ranks when the first one has ended. Most
# errors of a script occur on all ranks at about the same time, and each rank can then print its report.
_EARLY_WAIT_S = 0.5
_SHUTDOWN_ERROR = f"{OWN_ERRORS}ShutdownError:"
_INTERRUPTED = 130  # exit code after Ctrl-C
_TELL_S = 0.3  # in which the other ranks report their last operations
_ABORT_LIMIT_S = 20.0  # from the call of MPI_Abort to the end of this process

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_end: tuple[str, int] | None = None  # If set, this rank aborts the job at exit, instead of calling MPI_Finalize.
# Set by init(). Makes all ranks report their last operations, since a rank fails. Returns soon, and whether other ranks
# were asked to report.
tell_last: Callable[[], bool] = bool
_leaves = False  # Whether this process ends without MPI_Finalize.


def end_job(mpi: ModuleType, rank: int, host: str, text: ErrorText, code: int = 1, wait_s: float = 0.0) -> None:
    """Print why this rank ends the whole job, wait `wait_s`, and end the job with exit code `code`. Local."""
    try:
        report.announce(rank, host, code, text, os.environ)
        if code != _INTERRUPTED and tell_last():
            wait_s = max(wait_s, _TELL_S)
        _flush()
        time.sleep(wait_s)
    finally:
        # Also if printing fails: a launcher that has already ended no longer reads the output.
        launcher_watch.notify_abort(os.environ)
        # If there is no stderr to print to, MPI_Abort runs without a limit.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            # Ends this process if MPI_Abort, which waits for the launcher, does not return. faulthandler's thread does
            # not need the GIL, which mpi4py does not release during MPI_Abort.
            faulthandler.dump_traceback_later(_ABORT_LIMIT_S, exit=True)
        mpi.COMM_WORLD.Abort(code)


def prepare(mpi: ModuleType, rank: int, host: str, skip_finalize: Callable[[], None] | None = None) -> None:
    """Make this rank end the job after an uncaught exception or `end_job_at_exit`. Local. Later calls do nothing.

    At the prompt of interactive Python an exception is only printed, and the session continues.

    `rank`: This rank in MPI_COMM_WORLD. `skip_finalize`: Makes this process end without MPI_Finalize; given if the job
    survives the loss of a rank. Then an exception, or sys.exit with a code other than 0, ends only this rank.
    """
    if isinstance(sys, _Sys):
        return
    previous = sys.excepthook
    exit_code.note()
    is_reported = bool(report.mode(os.environ))
    # A hook of the script, or of a library of the script, is called in any case: the hook may do more than print.
    is_pythons = previous is sys.__excepthook__ or hasattr(previous, "_mpistrat_before_init")

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = sys.__excepthook__ if is_pythons else previous
        # Python sets sys.ps1 when it shows the first prompt. It calls this hook for every error in a line.
        if forked.is_child() or hasattr(sys, "ps1"):
            _Sys._show(shown, kind, error, trace)
            return
        text, wait_s = ErrorText("", kind.__qualname__), 0.0
        try:
            is_replaced = is_pythons and report.replaces_traceback(os.environ)
            _Sys._show(None if is_replaced else shown, kind, error, trace)
            text = describe(error, trace)
            wait_s = _wait_s(error, text.message, rank, is_reported)
        finally:
            is_interrupt = issubclass(kind, KeyboardInterrupt)
            code = _INTERRUPTED if is_interrupt else 1
            if is_interrupt and _is_interrupted:
                # The other ranks are interrupted too, and may still save. So this rank leaves as at a normal end.
                report.announce(rank, host, code, text, os.environ, ends_job=False)
            elif skip_finalize is None:
                end_job(mpi, rank, host, text, code, wait_s)
            else:
                end_alone(rank, host, text, code)

    def end() -> None:
        if forked.is_child():
            return
        if _end is not None:
            end_job(mpi, rank, host, ErrorText("", _end[0]), _end[1])
            return
        ended = exit_code.final()
        if ended is not None and (is_reported or skip_finalize is not None):
            # No rank waits, or the other ranks go on alone. mpirun may not name this rank.
            code, call = ended
            report.announce(rank, host, code, ErrorText("", call), os.environ, ends_job=skip_finalize is None)
        if skip_finalize is not None and (_leaves or ended is not None):
            skip_finalize()

    _Sys._ours = sys.excepthook = hook  # Python calls it for uncaught exceptions from now on.
    sys.__class__ = _Sys
    # Python runs exit handlers in reverse order: `end` runs after shutdown(), which init() registers later. `end` is
    # registered here, since shutdown() may run when the script is already ending, too late to register a handler.
    atexit.register(end)


class _Sys(ModuleType):
    """The class of the module `sys` on a rank. Python calls the excepthook `_ours`, which calls the hook of the script.

    Scripts and libraries replace sys.excepthook after init() (rich.traceback.install(), Sentry, a hook that logs), and
    most of them do not call the previous hook. Without this class a rank with such a hook would end as if its script
    had succeeded, and the job would end with an error about ranks that wait for it. The script's assignment to
    sys.excepthook calls a setter of this class. Python reads `_ours` from the module's dictionary (PySys_GetObject).
    """

    _ours: Hook
    _theirs: Hook | None = None  # what was assigned to sys.excepthook

    @classmethod
    def _show(cls, shown: Hook | None, kind: type[BaseException], error: BaseException,
             trace: TracebackType | None) -> None:
        """Call the script's hook with an error; or `shown`, if the script has no hook or its hook calls `_ours`."""
        theirs, cls._theirs = cls._theirs, None
        try:
            if (chosen := theirs or shown) is not None:
                chosen(kind, error, trace)
        finally:
            cls._theirs = theirs

    @property
    def excepthook(self) -> Hook:
        return _Sys._theirs or _Sys._ours

    @excepthook.setter
    def excepthook(self, hook: Hook) -> None:
        _Sys._theirs = None if hook is _Sys._ours else hook


def uncaught(error: BaseException) -> None:
    """Treat an exception of another thread or of an exit handler as an uncaught exception of the main thread. Local."""
    vars(sys)["excepthook"](type(error), error, error.__traceback__)


def end_alone(rank: int, host: str, text: ErrorText, code: int) -> NoReturn:
    """Print why this rank ends, and end this process with exit code `code`. The other ranks go on. Local."""
    try:
        report.announce(rank, host, code, text, os.environ, ends_job=False)
        _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout is full, has no reader, or is closed.
        sys.stdout.flush()


def leave_without_finalize() -> None:
    """Let this process end without MPI_Finalize, which may hang after a loss of ranks. Local; returns at once."""
    global _leaves
    _leaves = True


def report_before_init(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook before init() under `mpistrat run`: print a report (report.announce) of the exception. Local."""
    if not report.replaces_traceback(os.environ):
        sys.__excepthook__(kind, error, trace)
    is_interrupt = issubclass(kind, KeyboardInterrupt)
    report.announce(launched_rank(os.environ), platform.node(), _INTERRUPTED if is_interrupt else 1,
                    describe(error, trace), os.environ)
    if not is_interrupt:
        time.sleep(_EARLY_WAIT_S)


def end_job_at_exit(reason: str, code: int = 1) -> None:
    """Let this rank abort the job when its script ends, instead of calling MPI_Finalize. Local; returns at once."""
    global _end
    _end = reason, code


def end_job_for_sys_exit(waiting: str) -> None:
    """If sys.exit() ends this process with a code other than 0, abort the job with that code. Local; returns at once.

    `waiting`: A text that names the ranks that wait for this rank, and the operation that they wait for.
    """
    if ended := exit_code.final():
        code, call = ended
        end_job_at_exit(f"{call}, while other ranks wait for this one: {waiting.partition('. ')[0]}", code)


def _wait_s(error: BaseException, message: str, rank: int, is_reported: bool) -> float:
    """Return how many seconds this rank waits before it ends the job, because other ranks may still print their errors.

    Under `mpistrat run` a rank waits after each error, because equal errors of all ranks are printed once. Otherwise a
    rank waits only after errors that mpistrat raises on all ranks. The waits differ by rank because mpirun of Open MPI
    5 has been seen to hang, with no rank left, after several ranks had aborted at the same moment.
    """
    is_of_collective = isinstance(error, CollectiveError | SettingsError) or message.startswith(OWN_ERRORS)
    if isinstance(error, KeyboardInterrupt) or not (is_reported or is_of_collective):
        return 0.0
    spread_s = _STALL_SPREAD_S if isinstance(error, StallError) else 0.0
    return 0.5 + 0.25 * min(rank, 8) + (_EXIT_SPREAD_S if message.startswith(_SHUTDOWN_ERROR) else spread_s)


# -- SIGTERM and Ctrl-C of `mpistrat run` ------------------------------------------------------------------------------
# Both reach the scripts of all ranks, which then have time to save. Open MPI's mpirun forwards neither of the signals:
# it ends all ranks within a second, for which PRRTE has no setting (`prte_odls_base_default_kill_local_procs` in
# src/mca/odls/base/odls_base_default_fns.c). But it forwards other signals to the ranks of all hosts
# (`ess_base_forward_signals` is "all"). Of these, programs ignore SIGURG and SIGCONT by default. All others would end a
# shell around the script, or a process that loads data. So `mpistrat run` sends SIGURG to mpirun, and a rank that
# receives SIGURG sends itself SIGTERM, or SIGINT if SIGCONT has arrived just before SIGURG. MPICH's mpiexec forwards
# SIGTERM and SIGINT.
#
# Python's own handler of SIGINT raises KeyboardInterrupt in the main thread at once, which may be in the middle of a
# collective. So the ranks use api/runtime.py instead.

_TOGETHER_S = 3.0  # between SIGCONT and SIGURG of a Ctrl-C. SIGCONT alone comes from a terminal (Ctrl-Z, fg).
_SWAPPED_S = 0.2  # The kernel may deliver the two to two threads (wants_signal in kernel/signal.c), in either order.
# Whether Ctrl-C has reached all ranks, so that a rank that ends because of Ctrl-C need not end the other ranks.
_is_interrupted = False


def hand_on(rank: int, environ: MutableMapping[str, str], interrupt: Callable[[], None]) -> None:
    """Install a handler of SIGURG. It sends this process SIGTERM, or calls `interrupt` if SIGCONT came just before.

    `mpistrat run` sends SIGURG in place of SIGTERM, and SIGCONT then SIGURG for Ctrl-C. This function tells it of
    the handler. Local. Does nothing without `mpistrat run`, outside the main thread, or if the script handles SIGURG.
    `interrupt`: Makes this process receive SIGINT soon. A signal handler calls it, so it must return at once.
    """
    if not report.mode(environ) or threading.current_thread() is not threading.main_thread() \
            or signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        return
    process, continued_at = os.getpid(), -math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal continued_at
        continued_at = time.monotonic()

    def is_ctrl_c() -> bool:
        return time.monotonic() - continued_at < _TOGETHER_S

    def handle(number: int, frame: FrameType | None) -> None:
        global _is_interrupted
        # mpirun signals the process group. The rank itself ends its forked processes, which load data.
        if os.getpid() == process:
            if not is_ctrl_c():
                time.sleep(_SWAPPED_S)  # Meanwhile, or right after, `note` may run.
            _is_interrupted = is_ctrl_c()
            if _is_interrupted:
                interrupt()
            else:
                os.kill(process, signal.SIGTERM)

    def take_first(number: int, frame: FrameType | None) -> None:
        global _is_interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _is_interrupted = True
        interrupt()

    signal_handlers.harmless.update((note, handle, take_first))
    signal.signal(signal.SIGURG, handle)
    if signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, note)
    launcher = launcher_of(environ)
    if launcher is not None and launcher.handed_on.get(signal.SIGINT) == (signal.SIGINT,) \
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, take_first)
    report.tell(rank, report.HANDS_ON, environ)
