"""Interruption: ends the waits of this rank for other ranks when ranks are lost.

Every loop that waits for another rank calls `check`, unless the wait ends within a moment. Any thread may call the
methods. All groups (process sets) of a job share one object.
"""

import threading
import time
from collections.abc import Callable, Sequence

from .errors import LostRank, RanksLostError

_SIGN_S = 0.5  # From the first sign of a loss, an error of MPI or NCCL, until the watch has noticed it.
_SIGN_POLL_S = 0.005


class Interruption:
    """A flag that ends this rank's waits when ranks are lost. `error` names the lost ranks."""

    def __init__(self, is_watched: bool = False):
        # Whether a watch looks for lost ranks. If so, an error of any kind may be the first sign of a loss, and
        # `await_error` waits for the watch to name the lost rank.
        self.is_watched = is_watched
        # Lets MPI make progress with sent messages. In jobs of several hosts, waits that do not use MPI call it: Open
        # MPI sends the first message to a rank after it has connected to the rank, and only while the sender calls MPI.
        # So a collective that has ended on this rank may not have ended on another rank.
        self.progress: Callable[[], object] = lambda: None
        # The error that names the lost ranks; None: no rank is lost. Ranks that are lost later are added to the error.
        self.error: RanksLostError | None = None
        self._lock = threading.RLock()  # A signal handler may interrupt `add`, and itself call `add`.

    def add(self, lost: Sequence[LostRank]) -> RanksLostError:
        """Note that ranks are lost, and make this rank's waits raise `error`. Returns `error`."""
        with self._lock:
            if self.error is None:
                self.error = RanksLostError(lost)
            else:
                self.error.add(lost)
            return self.error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def await_error(self) -> None:
        """Wait, for 0.5 s at most, until a lost rank has been noticed. If `error` stays None, no rank is lost."""
        until = time.monotonic() + _SIGN_S
        while self.is_watched and self.error is None and time.monotonic() < until:
            time.sleep(_SIGN_POLL_S)
