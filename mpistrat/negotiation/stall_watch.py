"""Requests that are incomplete for too long: when to look, what to report, when to end. Pure: time is an argument.

Rank 0 reports such requests, and ends the engines at the limit. Shortly before the limit, rank 0 asks the missing ranks
where they are. A rank without any answer of rank 0 ends its own engine: rank 0 is stopped, or cannot be reached.
Called by the coordinator and by the controller.
"""

import math
from collections.abc import Callable, Iterable

from ..core.errors import StallError
from ..core.stalls import describe_wait, hosts_without
from ..core.topology import Topology
from ..core.tuning import (
    STALL_ABORT_LONGEST_POLL_S,
    STALL_ABORT_LOOKS,
    STALL_LONGEST_POLL_S,
    STALL_SHORTEST_POLL_S,
    STALL_WARNING_LOOKS,
)
from .subtree import Subtree
from .tensor_reports import describe_deadlock, describe_places, describe_stall
from .tree import depth_of

_MOST_ASKED = 4  # ranks; a report on more would be too long to read
# Seconds after the limit on stalls within which rank 0's decision must arrive: rank 0 checks for stalls only now and
# then, and the decision passes through the tree.
_ANSWER_S = 4.0


class StallWatch:
    """The ages of the incomplete requests of a subtree, and their limits.

    Args:
        subtree: Has the requests.
        warning_s: Age in seconds at which an incomplete request is reported; None: never.
        abort_s: Age in seconds at which an incomplete request ends the engines; None: never.
        deadlock_s: Seconds without news after which the engines end if all ranks wait; None: never.
    """

    def __init__(self, subtree: Subtree, warning_s: float | None, abort_s: float | None,
                 deadlock_s: float | None = None):
        self._subtree = subtree
        self.warning_s, self.abort_s, self.deadlock_s = warning_s, abort_s, deadlock_s
        # Returns where a given rank of the job is, which has not answered, as text that begins a new line.
        self.look: Callable[[int], str] = lambda _: ""
        self._abort_setting = "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS"
        self._last_report = 0.0
        self._next_look = 0.0  # for the limit
        self._next_ask = 0.0
        self._asked: tuple[int, ...] = ()

    def abort_after(self, seconds: float, setting: str) -> None:
        """Set `abort_s` to `seconds`. `setting`: The name of the setting with this limit, for the error text."""
        self.abort_s, self._abort_setting = seconds, setting

    def poll_s(self) -> float | None:
        """Seconds between two checks while a request is incomplete; None: no check, since warnings are off."""
        if self.warning_s is None:
            return None
        due_s = self.warning_s if self.deadlock_s is None else min(self.warning_s, self.deadlock_s)
        return max(STALL_SHORTEST_POLL_S, min(due_s / STALL_WARNING_LOOKS, STALL_LONGEST_POLL_S))

    @property
    def pass_on_s(self) -> float:
        """Age in seconds at which a rank passes an incomplete request on to its parent, for the reports of rank 0."""
        return min(math.inf if self.warning_s is None else self.warning_s / 2,
                   math.inf if self.deadlock_s is None else self.deadlock_s / 4)

    def stalled(self, now: float, limit_s: float) -> dict[str, list[int]]:
        """The names of requests incomplete for more than `limit_s`, each with the ranks that have not submitted it."""
        return {name: pending.missing() for name, pending in self._subtree.incomplete().items()
                if now - pending.since > limit_s}

    def asks(self, now: float, quiet_s: float) -> tuple[int, ...]:
        """On rank 0, the ranks to ask now where they are, because a report or the end of the engines is due soon.

        `quiet_s`: See `deadlock`.
        """
        poll_s = self.poll_s()
        if poll_s is None or now < self._next_ask:
            return ()
        self._next_ask = now + poll_s / 2
        ahead_s = 2 * poll_s  # Looks are `poll_s` apart at most, so the ranks have as long to answer.
        limits = [] if self.abort_s is None else [self.abort_s]
        if self.warning_s is not None and now - self._last_report > self.warning_s - ahead_s:
            limits.append(self.warning_s)
        missing: set[int] = set()
        for pending in self._subtree.incomplete().values():
            if now - pending.since > min(limits, default=math.inf) - ahead_s:
                missing.update(pending.missing())
        if not missing and self.deadlock_s is not None and quiet_s > self.deadlock_s / 2 and self._do_all_wait():
            missing.update(range(self._subtree.node.size))
        if missing:
            self._next_ask = now + 2 * ahead_s  # The report comes before that, up to `poll_s` late.
            self._asked = tuple(sorted(missing)[:_MOST_ASKED])
            self._subtree.places.clear()
        return self._asked if missing else ()

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
        """On rank 0, the text on requests incomplete for longer than `abort_s`; None: none, or no check is due."""
        if self.abort_s is None or now < self._next_look:
            return None
        # Not in every cycle: checking all pending names takes long, and the end may be this late.
        self._next_look = now + min(self.abort_s / STALL_ABORT_LOOKS, STALL_ABORT_LONGEST_POLL_S)
        if not self.stalled(now, self.abort_s):
            return None
        # Includes requests that began later: the ranks missing from the first one often wait for a later one.
        stalled = self.stalled(now, min(self.abort_s, math.inf if self.warning_s is None else self.warning_s))
        return f"{self._describe(stalled, now)} Ended after {self.abort_s:g} s ({self._abort_setting})."

    def deadlock(self, quiet_s: float) -> str | None:
        """On rank 0, the text on a deadlock of all ranks; None: there is none, or not for long enough.

        A deadlock: each rank has submitted a request, no request is complete, and rank 0 has received nothing new for
        `deadlock_s`. A rank may still call the missing collective: in another thread, after long work, or in a graph.
        Rank 0 cannot see such plans, so the text names the setting.

        Ranks that submit in the same order never deadlock: all requests of the slowest rank are complete.

        Args:
            quiet_s: Seconds for which nothing was submitted, received or executed on rank 0.
        """
        if self.deadlock_s is None or quiet_s < self.deadlock_s:
            return None
        subtree = self._subtree
        # A rank between another one and rank 0 keeps an incomplete request for `pass_on_s`, until it looks.
        late_s = (self.pass_on_s + (self.poll_s() or 0.0)) * max(depth_of(subtree.node.size - 1) - 1, 0)
        if quiet_s < self.deadlock_s + late_s or not self._do_all_wait():
            return None
        return describe_deadlock(subtree.topology, subtree.incomplete(), self.deadlock_s) + self._places()

    def _do_all_wait(self) -> bool:
        incomplete = self._subtree.incomplete().values()
        return len(set().union(*(pending.present() for pending in incomplete))) == self._subtree.node.size

    def _describe(self, stalled: dict[str, list[int]], now: float) -> str:
        topology, places = self._subtree.topology, self._subtree.places
        silent = hosts_without(topology, [topology.rank, *places])
        unanswered = [rank for rank in self._asked if topology.host_of[rank] in silent]
        return describe_stall(topology, self._subtree.incomplete(), stalled, now, unanswered) + self._places()

    def _places(self) -> str:
        return describe_places(self._subtree.topology, self._asked, self._subtree.places, self.look)


class AnswerWatch:
    """The requests of one rank on which rank 0 has not decided. On rank 0 itself nothing is watched.

    `warning_s`: See StallWatch.
    """

    def __init__(self, topology: Topology, warning_s: float | None):
        self._topology = topology
        self._since: dict[str, float] = {}  # the oldest first
        self._checked_at = self._resumed_at = float("-inf")
        # Each rank between this one and rank 0 passes on an incomplete request only after half of `warning_s`.
        self._answer_s = _ANSWER_S + max(depth_of(topology.rank) - 1, 0) * (warning_s or 0.0) / 2

    def __bool__(self) -> bool:
        return bool(self._since)

    def begin(self, name: str, now: float) -> None:
        """This rank has submitted `name`."""
        if self._topology.rank:
            self._since[name] = now

    def end(self, names: Iterable[str]) -> None:
        """Rank 0 has decided on `names`."""
        if self._since:
            for name in names:
                self._since.pop(name, None)

    def check(self, now: float, limit_s: float) -> None:
        """Check that rank 0 answers. To be called in every cycle, after the received messages have been read.

        Raises StallError: Rank 0 has not decided within `limit_s` plus the time that an answer may take.
        """
        if not self._since:
            return
        if now - self._checked_at > _ANSWER_S:
            self._resumed_at = now  # This rank was in a collective, or was stopped. An answer may be there, unread.
        self._checked_at = now
        name, since = next(iter(self._since.items()))
        if now >= max(since + limit_s, self._resumed_at) + self._answer_s:
            raise StallError(f"{name}: {describe_wait(self._topology, [0], now - since)}")
