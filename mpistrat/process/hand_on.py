"""SIGTERM and Ctrl-C for `mpistrat run` reach the scripts of all ranks, which then have time to save.

Open MPI's mpirun does not hand them on: it ends all ranks within a second (`prte_odls_base_default_kill_local_procs`
in src/mca/odls/base/odls_base_default_fns.c of PRRTE, which has no setting for that second). But it hands on other
signals to the ranks of all hosts (`ess_base_forward_signals` is "all"), of which programs ignore two, SIGURG and
SIGCONT, unless they ask for them. The rest would end a shell around the script, or a process that loads data. So
`mpistrat run` sends mpirun SIGURG, and a rank that gets it sends itself SIGTERM; or SIGINT, if SIGCONT has come just
before it. MPICH's mpiexec hands SIGTERM and SIGINT on.

Python's own handler of SIGINT raises KeyboardInterrupt in the main thread at once, which may be in the middle of a
collective. So the ranks come to that by api/interrupt.py.
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
# The kernel may give the two to two threads (wants_signal in kernel/signal.c), of which either may run first.
_SWAPPED_S = 0.2

# Whether Ctrl-C has come to all ranks, so that one of them that ends by it need not end the others.
is_interrupted = False


def begin(rank: int, environ: MutableMapping[str, str], interrupt: Callable[[], None]) -> None:
    """Take SIGURG of `mpistrat run` for SIGTERM or SIGINT from now on, and tell it so. Local; init() calls it when the
    ranks are connected.

    Does nothing without `mpistrat run`, on another thread than the main one, and if the script handles SIGURG itself.
    `interrupt`: Sends SIGINT to this process, soon. Called by a signal's handler, so it returns at once.
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
        # mpirun signals the process group. A forked process loads data for the rank, which ends it.
        if os.getpid() == process:
            if not is_ctrl_c():
                time.sleep(_SWAPPED_S)  # `note` runs meanwhile, or behind it.
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
