"""Interruption: ends all waits of a rank for others, because some of them are lost.

Every loop that waits for another rank calls `check`, once it has waited for longer than a moment. Any thread may set
it. One object serves all groups of a job.
"""

import threading
import time
from collections.abc import Callable, Sequence

from .errors import LostRank, RanksLostError

_SIGN_S = 0.5  # From the first sign of a loss, an error of MPI or NCCL, until the watch has noticed it.
_SIGN_POLL_S = 0.005


class Interruption:
    """Which ranks are lost, as far as this rank knows.

    `is_watched`: Whether something watches for lost ranks. Then an error of any kind may be the first sign of one, and
    `await_error` waits for the watch to name it.
    """

    def __init__(self, is_watched: bool = False):
        self.is_watched = is_watched
        # Lets MPI go on with what this rank has sent. Waits that do not use MPI call it, in jobs of several hosts: Open
        # MPI sends the first message to a rank when the connection to it is there, and only while the sender is in one
        # of its calls. A collective that has ended here may not have ended there.
        self.progress: Callable[[], object] = lambda: None
        # Names the lost ranks; None: no rank is lost. Ranks that are lost later are added to it.
        self.error: RanksLostError | None = None
        self._lock = threading.RLock()  # A signal handler may interrupt `add`, and call it.

    def add(self, lost: Sequence[LostRank]) -> RanksLostError:
        """Note that ranks are lost, and interrupt this rank's waits. Returns `error`."""
        with self._lock:
            if self.error is None:
                self.error = RanksLostError(lost)
            else:
                self.error.add(lost)
            return self.error

    def check(self) -> None:
        """Raise RanksLostError if ranks are lost."""
        if self.error is not None:
            raise self.error

    def await_error(self) -> None:
        """Wait until `error` is set, but no longer than the watch takes to notice a loss: then there is none."""
        until = time.monotonic() + _SIGN_S
        while self.is_watched and self.error is None and time.monotonic() < until:
            time.sleep(_SIGN_POLL_S)
