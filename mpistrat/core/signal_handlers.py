"""Whether Python functions handle signals. They run in the main thread, between any two instructions."""

import math
import signal
import threading
import time
from collections.abc import Callable

# Handlers of mpistrat, which call no collective.
harmless: set[Callable[..., object]] = set()

_LOOK_EVERY_S = 0.1  # A look takes 40 us.

_found, _next_look_at = False, -math.inf


def are_installed() -> bool:
    """Whether the script has installed a signal handler. Python's own, for Ctrl-C, only raises an exception."""
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler and handler not in harmless
               for handler in handlers)


def may_interrupt() -> bool:
    """Whether a handler of the script may interrupt the calling thread. New handlers are noticed after 0.1 s."""
    global _found, _next_look_at
    if threading.get_ident() != threading.main_thread().ident:
        return False
    now = time.monotonic()
    if now >= _next_look_at:
        _found, _next_look_at = are_installed(), now + _LOOK_EVERY_S
    return _found
