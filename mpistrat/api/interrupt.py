"""Ctrl-C of `mpistrat run` interrupts the scripts of all ranks in the same step.

A script that catches KeyboardInterrupt around fit may then save the model, for which all ranks may have to call the
same collectives. A rank that is one step ahead would deadlock: it waits in the next step, and the other ranks in the
save. So after the signal, a background thread of each rank enters a barrier. The engines of all ranks execute in one
order, so the first operation after the barrier is the same on all ranks, and interrupts the script on each of them. A
rank that does not come to the barrier soon, or to another operation, is interrupted at once.
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
    """Send SIGINT to this process soon. Returns at once. Local; for a signal handler, in the main thread.

    `engine`: A function that returns the engine of all ranks, or raises NotInitializedError.
    """
    signal_handlers.expect()
    threading.Thread(target=_interrupt, args=[engine], name="mpistrat-interrupt", daemon=True).start()


def _interrupt(engine: Callable[[], Engine]) -> None:
    main, lock = threading.main_thread().ident, threading.Lock()
    is_due, has_come = threading.Event(), threading.Event()

    def come() -> None:
        is_due.set()
        # A main thread that drives would be interrupted inside a collective. After `expect` it does not start to drive.
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
        pass  # The engine has ended, or this is a second Ctrl-C.
    while not has_come.is_set():
        come()
        time.sleep(_LOOK_S)
