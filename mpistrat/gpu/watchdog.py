"""A limit on calls that may block for ever: NCCL connects ranks at their first collective, and waits for all of them.

The thread that drives the engine is in such a call then, and hears of nothing. Another thread has to abort it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import EngineError

logger = logging.getLogger(__name__)

_LOOKS = 10  # while the limit lasts
_LONGEST_PAUSE_S = 5.0


class Watchdog:
    """Calls `abort`, once, from a thread of its own, when a guarded call takes too long.

    Args:
        limit_s: How long; 0: for ever, and there is no thread.
        abort: Makes the call return, in whatever way. Any thread may call it; it does not raise.
        text: What to say then.
    """

    def __init__(self, limit_s: float, abort: Callable[[], None], text: str):
        self._limit_s, self._abort, self._text = limit_s, abort, text
        self._since: float | None = None
        self._has_fired = False
        self._closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="mpistrat-gpu-watchdog", daemon=True).start()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """What is done within it is limited. One thread at a time.

        Raises:
            EngineError: In place of whatever the abort has led to.
        """
        self._since = time.monotonic()
        try:
            yield
        except Exception as error:
            if self._has_fired:
                raise EngineError(self._text) from error
            raise
        finally:
            self._since = None
        if self._has_fired:
            raise EngineError(self._text)

    def close(self) -> None:
        """End the thread. May be called twice, by any thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S)):
            since = self._since
            if since is not None and time.monotonic() - since > self._limit_s:
                self._has_fired = True
                logger.debug("%s", self._text)
                self._abort()
                return
