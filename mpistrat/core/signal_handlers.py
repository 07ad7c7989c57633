"""Detects signal handlers that are Python functions, and provides an event that such handlers may set.

Python runs these handlers in the main thread, between any two instructions.
"""

import math
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

# Handlers of mpistrat, which call no collective.
harmless: set[Callable[..., object]] = set()

_LOOK_EVERY_S = 0.1  # A look takes 40 us.

_found, _next_look_at = False, -math.inf


def are_installed() -> bool:
    """Return whether the script has installed a signal handler. Python's handler for Ctrl-C does not count."""
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler and handler not in harmless
               for handler in handlers)


def expect() -> None:
    """Make may_interrupt return True in the main thread from now on: mpistrat will send this process a signal."""
    global _found, _next_look_at
    _found, _next_look_at = True, math.inf


def may_interrupt() -> bool:
    """Return whether a handler of the script may interrupt this thread. New handlers are noticed within 0.1 s."""
    global _found, _next_look_at
    if threading.get_ident() != threading.main_thread().ident:
        return False
    now = time.monotonic()
    if now >= _next_look_at:
        _found, _next_look_at = are_installed(), now + _LOOK_EVERY_S
    return _found


class WakeUp:
    """An event that `wait` clears. A signal handler may call `set`, even if it has interrupted a call of `set`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Make a `wait` in progress, or the next `wait`, return at once."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for `set`, at most `timeout_s` (None: no limit). Returns whether `set` was called."""
        try:
            self._calls.get(timeout=timeout_s)
        except Empty:
            return False
        return True
