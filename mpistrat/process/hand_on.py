"""SIGTERM for `mpistrat run` reaches the scripts of all ranks, which then have time to save.

Open MPI's mpirun does not hand SIGTERM on: it ends all ranks within a second (`prte_odls_base_default_kill_local_procs`
in src/mca/odls/base/odls_base_default_fns.c of PRRTE, which has no setting for that second). But it hands SIGURG on to
the ranks of all hosts (`ess_base_forward_signals` is "all"), which programs ignore unless they ask for it. So
`mpistrat run` sends mpirun SIGURG, and a rank that gets it sends itself SIGTERM. MPICH's mpiexec hands SIGTERM on.
"""

import os
import signal
import threading
from collections.abc import MutableMapping
from types import FrameType

from ..core import signal_handlers
from . import report

HANDED_ON = signal.SIGURG


def begin(rank: int, environ: MutableMapping[str, str]) -> None:
    """Take SIGURG of `mpistrat run` for SIGTERM from now on, and tell it so. Local; init() calls it when the ranks are
    connected.

    Does nothing without `mpistrat run`, on another thread than the main one, and if the script handles SIGURG itself.
    """
    if not report.mode(environ) or threading.current_thread() is not threading.main_thread() \
            or signal.getsignal(HANDED_ON) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # mpirun signals the process group. A forked process loads data for the rank, which ends it.
        if os.getpid() == process:
            os.kill(process, signal.SIGTERM)

    signal_handlers.harmless.add(handle)
    signal.signal(HANDED_ON, handle)
    report.tell(rank, report.HANDS_ON, environ)
