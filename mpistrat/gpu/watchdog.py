"""A time limit for calls that may block for ever.

A call of NCCL may wait for other ranks. The engine's thread is blocked in that call then, so another thread has to end
the call.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..core.errors import EngineError
from ..core.tuning import WATCHDOG_LONGEST_SLEEP_S, WATCHDOG_LOOKS, WATCHDOG_REVOKE_S

T = TypeVar("T")

logger = logging.getLogger(__name__)


def within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return `call()`, which must not raise; None if it has not returned in time. Then it goes on in another thread."""
    returned: list[T] = []
    thread = threading.Thread(target=lambda: returned.append(call()), name="mpistrat-gpu-ends", daemon=True)
    thread.start()
    thread.join(limit_s)
    return returned[0] if returned else None


class Watchdog:
    """Ends a guarded call that takes too long, once, from a separate thread.

    Calls inside of `with watchdog:` are guarded. The watchdog calls `revoke`, and `abort` only if the guarded call does
    not return soon, because `abort` frees the memory that the call uses.

    Args:
        limit_s: Seconds that a guarded call may take; 0: no limit, and no thread.
        revoke: Makes the call return or raise. Returns False if it cannot.
        abort: Makes the call return or raise, and frees its memory. Any thread may call both functions; neither raises.
        text: The message of the error. Names the rank.
    """

    def __init__(self, limit_s: float, revoke: Callable[[], bool], abort: Callable[[], None], text: str):
        self._limit_s, self._revoke, self._abort, self._text = limit_s, revoke, abort, text
        self._ended = threading.Event()  # The guarded call that was too long has ended.
        self._since: float | None = None
        self._has_fired = False
        self._lock = threading.Lock()  # of `_since` and `_has_fired`: a call that has ended in time is not aborted
        self._closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="mpistrat-gpu-watchdog", daemon=True).start()

    def __enter__(self) -> None:
        """Begin a guarded call. One thread at a time."""
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End a guarded call. Raises EngineError if it was too long, in place of the exception caused by the abort."""
        if self._end() and (error is None or isinstance(error, Exception)):
            raise EngineError(self._text) from error

    def close(self) -> None:
        """End the watchdog's thread. May be called twice, by any thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._limit_s / WATCHDOG_LOOKS, WATCHDOG_LONGEST_SLEEP_S)):
            with self._lock:
                since = self._since
                self._has_fired = since is not None and time.monotonic() - since > self._limit_s
            if self._has_fired:
                logger.debug("%s", self._text)
                if not (within(WATCHDOG_REVOKE_S, self._revoke) and self._ended.wait(WATCHDOG_REVOKE_S)):
                    self._abort()
                return

    def _end(self) -> bool:
        """Record that the guarded call has ended. Returns whether it took too long."""
        with self._lock:
            self._since = None
            if self._has_fired:
                self._ended.set()
            return self._has_fired
