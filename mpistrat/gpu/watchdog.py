"""A time limit for calls that may block for ever.

NCCL connects the ranks in their first collective, and waits there for all of them. The engine's thread is blocked in
that call, so another thread has to abort it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import EngineError
from ..core.tuning import WATCHDOG_LONGEST_SLEEP_S, WATCHDOG_LOOKS

logger = logging.getLogger(__name__)


class Watchdog:
    """Calls `abort`, once, from a thread of its own, when a guarded call takes too long.

    Args:
        limit_s: Seconds that a guarded call may take; 0: no limit, and no thread.
        abort: Makes the call return or raise. Any thread may call it; it does not raise.
        text: The message of the error. Names the rank.
    """

    def __init__(self, limit_s: float, abort: Callable[[], None], text: str):
        self._limit_s, self._abort, self._text = limit_s, abort, text
        self._since: float | None = None
        self._has_fired = False
        self._lock = threading.Lock()  # of the two: a call that has ended in time is not aborted
        self._closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="mpistrat-gpu-watchdog", daemon=True).start()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """A context with the time limit. One thread at a time.

        Raises:
            EngineError: The limit was exceeded. Replaces the exception that the abort caused.
        """
        self._since = time.monotonic()
        try:
            yield
        except Exception as error:
            if self._end():
                raise EngineError(self._text) from error
            raise
        if self._end():
            raise EngineError(self._text)

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
                self._abort()
                return

    def _end(self) -> bool:
        """The guarded call has ended; whether too late."""
        with self._lock:
            self._since = None
            return self._has_fired
