"""Requests that are incomplete for too long: when to look, what to report, when to end. Pure: time is an argument.

Rank 0 reports them, and ends the engines at the limit. Called by the coordinator, by root.py and by the controller.
"""

from ..core.tuning import (
    STALL_ABORT_LONGEST_POLL_S,
    STALL_ABORT_LOOKS,
    STALL_LONGEST_POLL_S,
    STALL_SHORTEST_POLL_S,
    STALL_WARNING_LOOKS,
)
from .reports import describe_stall
from .subtree import Subtree


class StallWatch:
    """The ages of the incomplete requests of a subtree, and their limits.

    Args:
        subtree: Has the requests.
        warning_s: Age in seconds at which an incomplete request is reported; None: never.
        abort_s: Age in seconds at which it ends the engines; None: never.

    Attributes:
        warning_s, abort_s: As given, or as set later.
    """

    def __init__(self, subtree: Subtree, warning_s: float | None, abort_s: float | None):
        self._subtree = subtree
        self.warning_s, self.abort_s = warning_s, abort_s
        self._abort_setting = "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS"
        self._last_report = 0.0
        self._next_look = 0.0  # for the limit

    def abort_after(self, seconds: float, setting: str) -> None:
        """From now on, end the engines when a request has been incomplete for so long. `setting` names the cause."""
        self.abort_s, self._abort_setting = seconds, setting

    def poll_s(self) -> float | None:
        """Seconds after which to look again while a request is incomplete; None: never, as nothing is reported."""
        if self.warning_s is None:
            return None
        return max(STALL_SHORTEST_POLL_S, min(self.warning_s / STALL_WARNING_LOOKS, STALL_LONGEST_POLL_S))

    def stalled(self, now: float, limit_s: float) -> dict[str, list[int]]:
        """The names incomplete for more than `limit_s`, each with the ranks of the subtree that miss."""
        return {name: pending.missing() for name, pending in self._subtree.incomplete().items()
                if now - pending.since > limit_s}

    def report(self, now: float) -> str | None:
        """On rank 0, the warning that is due now, if any; each stall is reported every `warning_s`."""
        if self._subtree.node.rank != 0 or self.warning_s is None or now - self._last_report < self.warning_s:
            return None
        stalled = self.stalled(now, self.warning_s)
        if not stalled:
            return None
        self._last_report = now
        return self._describe(stalled, now)

    def reason_to_end(self, now: float) -> str | None:
        """On rank 0, what has been incomplete beyond the limit, in words; None: nothing, or not looked for yet."""
        if self.abort_s is None or now < self._next_look:
            return None
        # Not in every cycle: checking all pending names takes long, and the end may be this late.
        self._next_look = now + min(self.abort_s / STALL_ABORT_LOOKS, STALL_ABORT_LONGEST_POLL_S)
        stalled = self.stalled(now, self.abort_s)
        if not stalled:
            return None
        return f"{self._describe(stalled, now)} Ended after {self.abort_s:g} s ({self._abort_setting})."

    def _describe(self, stalled: dict[str, list[int]], now: float) -> str:
        return describe_stall(self._subtree.topology, self._subtree.incomplete(), stalled, now)
