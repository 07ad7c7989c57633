"""Ctrl-C of `mpistrat run` interrupts the scripts of all ranks in the same step.

A script that catches KeyboardInterrupt around fit goes on to save, which all ranks may have to do together. A rank that
is a step ahead would wait for the others in that step, and they for it in the save. So when the signal comes the ranks
meet in a barrier, in a thread beside the script. The engines of all ranks execute in one order, and so the first
operation after the barrier is the same on all of them: the script is interrupted while it waits for that. A rank that
does not come to the barrier soon, or to another operation, is interrupted where it is.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from ..core import handle, signal_handlers
from ..core.errors import MpistratError
from ..core.request import barrier_request
from ..engine.engine import Engine

_NAME = "Ctrl-C"
_LIMIT_S = 2.0
_LOOK_S = 0.001


def interrupt(engine: Callable[[], Engine]) -> None:
    """Have this process get SIGINT, soon. Local; for a signal handler, in the main thread. Returns at once.

    `engine`: Returns that of all ranks, or raises NotInitializedError.
    """
    signal_handlers.expect()
    threading.Thread(target=_interrupt, args=[engine], name="mpistrat-interrupt", daemon=True).start()


def _interrupt(engine: Callable[[], Engine]) -> None:
    main, lock = threading.main_thread().ident, threading.Lock()
    is_due, has_come = threading.Event(), threading.Event()

    def come() -> None:
        is_due.set()
        # A main thread that drives would be interrupted in the middle of a collective. It does not begin to, now.
        if threading.get_ident() != main and main not in handle.drivers:
            with lock:
                if not has_come.is_set():
                    has_come.set()
                    os.kill(os.getpid(), signal.SIGINT)

    try:
        controller = (found := engine()).controller
        if controller.topology.size > 1:
            found.submit(barrier_request(_NAME), []).when_done(
                lambda _: setattr(controller.executor, "before_next", come))
            is_due.wait(_LIMIT_S)
    except MpistratError:
        pass  # There is no engine any more, or a second Ctrl-C.
    while not has_come.is_set():
        come()
        time.sleep(_LOOK_S)
