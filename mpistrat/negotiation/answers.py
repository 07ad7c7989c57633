"""Whether rank 0 answers. Pure: time is an argument.

Rank 0 decides within the limit on stalls on what a rank has submitted, or ends the engines. A rank that gets neither
ends its engine: rank 0 is stopped, or cannot be reached.
"""

from collections.abc import Iterable

from ..core.errors import StallError
from ..core.stalls import describe_wait
from ..core.topology import Topology
from .tree import depth_of

# Seconds after the limit on stalls within which rank 0's decision must arrive: rank 0 checks for stalls only now and
# then, and the decision passes through the tree.
_ANSWER_S = 4.0


class AnswerWatch:
    """What one rank has submitted, and rank 0 has not decided on. Rank 0 itself watches nothing.

    Args:
        topology: Where the ranks are.
        warning_s: Age in seconds at which rank 0 reports an incomplete request; None: never.
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
        """To be called in every cycle, once the messages that have come are read.

        Raises:
            StallError: Rank 0 has not decided within `limit_s` and the time that its answer may take.
        """
        if not self._since:
            return
        if now - self._checked_at > _ANSWER_S:
            self._resumed_at = now  # This rank was in a collective, or was stopped. An answer may be there, unread.
        self._checked_at = now
        name, since = next(iter(self._since.items()))
        if now >= max(since + limit_s, self._resumed_at) + self._answer_s:
            raise StallError(f"{name}: {describe_wait(self._topology, [0], now - since)}")
