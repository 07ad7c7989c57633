"""Decide when the launcher terminates or kills an mpirun that does not end by itself. Pure. For supervisor.py."""

import math
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeLimits:
    """Time limits, in seconds."""

    total_s: float = math.inf  # From the start of the job to SIGTERM for mpirun.
    abort_s: float = 15.0  # From the abort of the job by a rank to SIGTERM for mpirun.
    grace_s: float = 0.0  # From SIGTERM or Ctrl-C for the ranks to SIGTERM for mpirun; 0: mpirun alone gets the signal.
    # From the first signal that mpirun gets to SIGKILL for mpirun. Meanwhile mpirun ends its ranks.
    signal_s: float = 30.0
    unstarted_s: float = 2.0  # In place of signal_s, as long as not all ranks have started.
    # A signal within this time after the first signal counts as the same signal, because some senders signal both a
    # process and its process group.
    second_s: float = 0.3
    kill_s: float = 5.0  # From SIGTERM to SIGKILL for mpirun.
    left_s: float = 5.0  # From the end of mpirun to SIGKILL for the remaining processes.


USUAL = TimeLimits()


class Termination:
    """Decides when to terminate or kill mpirun. Times are arguments, in seconds from any origin."""

    def __init__(self, limits: TimeLimits, now: float):
        self._limits = limits
        self._terminate_at, self._kill_at = now + limits.total_s, math.inf
        self._signalled_at: float | None = None
        self.reason = ""  # Why mpirun is terminated or killed, for the user.
        # is_late: Whether the start of all ranks has timed out.
        # is_urgent: Whether a second signal has arrived, so that the remaining processes are killed at once.
        self.is_late = self.is_urgent = False

    def note_abort(self, now: float) -> None:
        """Record that a rank has aborted the job."""
        if not self.reason:
            self._terminate_at = min(self._terminate_at, now + self._limits.abort_s)
            self.reason = f"a rank ended the job, and mpirun has not ended within {self._limits.abort_s:g} s"

    def note_stop(self, now: float, reason: str) -> None:
        """Record that mpirun must end now, for the given reason."""
        self._terminate_at = now
        self.reason = reason

    def note_no_start(self, now: float, timeout_s: float) -> None:
        """Record that not all ranks have started in time."""
        self._kill_at = now
        self.is_late = True
        self.reason = f"mpirun has not started all ranks within {timeout_s:g} s (--start-timeout)"

    def is_first(self, now: float) -> bool:
        """Whether a signal that arrives now is the first signal, or counts as the first."""
        return self._signalled_at is None or now - self._signalled_at < self._limits.second_s

    def note_signal(self, now: float, has_started: bool = True, handed_on: str = "") -> None:
        """Record that a signal that ends programs has arrived. `handed_on`: Its name if ranks got it; "" if mpirun."""
        if self._signalled_at is None and handed_on:
            self._signalled_at = now
            self._terminate_at = min(self._terminate_at, now + self._limits.grace_s)
            self.reason = \
                f"the ranks have not ended within {self._limits.grace_s:g} s after {handed_on} (--grace-period)"
        elif self._signalled_at is None:
            self._signalled_at = now
            limit_s = self._limits.signal_s if has_started else self._limits.unstarted_s
            self._kill_at = min(self._kill_at, now + limit_s)
            self.reason = f"mpirun has not ended within {limit_s:g} s after a signal"
        elif not self.is_first(now):
            self._kill_at = now
            self.reason = "this is the second signal"
            self.is_urgent = True

    def due(self, now: float) -> signal.Signals | None:
        """Return the signal to send to mpirun now, if any."""
        if now >= self._kill_at:
            self._kill_at = math.inf
            return signal.SIGKILL
        if now >= self._terminate_at:
            self.reason = self.reason or f"the job has not ended within {self._limits.total_s:g} s"
            self._terminate_at = math.inf
            self._kill_at = min(self._kill_at, now + self._limits.kill_s)
            return signal.SIGTERM
        return None

    def wait_s(self, now: float) -> float:
        """Return the seconds until `due` may return a signal."""
        return max(0.0, min(self._terminate_at, self._kill_at) - now)
