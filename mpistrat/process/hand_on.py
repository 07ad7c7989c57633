"""SIGTERM and Ctrl-C for `mpistrat run` reach the scripts of all ranks, which then have time to save.

Open MPI's mpirun does not forward these signals. It ends all ranks within a second, for which PRRTE has no setting
(`prte_odls_base_default_kill_local_procs` in src/mca/odls/base/odls_base_default_fns.c). But mpirun forwards other
signals to the ranks of all hosts (`ess_base_forward_signals` is "all"). Of these, programs ignore SIGURG and SIGCONT by
default. All others would end a shell around the script, or a process that loads data. So `mpistrat run` sends SIGURG to
mpirun, and a rank that receives SIGURG sends itself SIGTERM, or SIGINT if SIGCONT has arrived just before SIGURG.
MPICH's mpiexec forwards SIGTERM and SIGINT.

Python's own handler of SIGINT raises KeyboardInterrupt in the main thread at once, which may be in the middle of a
collective. So the ranks use api/runtime.py instead.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, MutableMapping
from types import FrameType

from ..core import signal_handlers
from . import report
from .launchers import launcher_of

_TOGETHER_S = 3.0  # Between SIGCONT and SIGURG of a Ctrl-C. SIGCONT alone comes from a terminal (Ctrl-Z, fg).
# The kernel may deliver the two signals to two threads (wants_signal in kernel/signal.c), in either order.
_SWAPPED_S = 0.2

# Whether Ctrl-C has reached all ranks, so that a rank that ends because of Ctrl-C need not end the other ranks.
is_interrupted = False


def begin(rank: int, environ: MutableMapping[str, str], interrupt: Callable[[], None]) -> None:
    """Install a handler that turns SIGURG of `mpistrat run` into SIGTERM or SIGINT, and report to `mpistrat run`.

    Local; init() calls it when the ranks are connected.
    Does nothing without `mpistrat run`, in a thread other than the main one, and if the script handles SIGURG.
    `interrupt`: Makes this process receive SIGINT soon. Called in a signal handler, so it must return at once.
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
        global is_interrupted
        # mpirun signals the process group. The rank itself ends its forked processes, which load data.
        if os.getpid() == process:
            if not is_ctrl_c():
                time.sleep(_SWAPPED_S)  # Meanwhile, or right after, `note` may run.
            is_interrupted = is_ctrl_c()
            if is_interrupted:
                interrupt()
            else:
                os.kill(process, signal.SIGTERM)

    def take_first(number: int, frame: FrameType | None) -> None:
        global is_interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        is_interrupted = True
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
