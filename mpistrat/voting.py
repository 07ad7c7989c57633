"""Agreement on an operation without a message: the ranks vote for it, in memory that all of them share.

The coordinator's way is a message to rank 0 and one back. A rank that waits for an operation, and has nothing else to
do, takes a shorter one: it votes for the operation's fingerprint. If all ranks have voted for the same, all of them
execute it; if they have not, it goes to the coordinator, on the ranks that voted for it. So nothing that ranks
disagree on is decided here, and no order of operations can make them wait for each other:

- A rank votes only when nothing of its own is outstanding. Everything that the coordinator decides on was submitted on
  all ranks, and comes after the vote on the rank that voted; its vote can be seen when the decision arrives. So ranks
  that look at the votes before they execute a decision execute both in the same order.
- A rank with something outstanding votes against as soon as it is awaited; so does one with nothing to do at all, after
  a while, for it is the coordinator that knows which ranks miss, and reports it.
"""

import logging

from .collectives.base import Ballot, Outcome
from .errors import StallError
from .mismatch import rank_list
from .tensor_queue import Entry

logger = logging.getLogger(__name__)

_LATE_S = 0.04  # the engine of a rank with nothing to do looks every 0.05 s, so that the second look is late


class Voting:
    """One rank's votes. Used by the thread that drives the engine.

    Args:
        ballot: How the ranks vote.
        rank: This rank.
        warning_s: After so many seconds a round that is not complete is reported; None: never.
        abort_s: After so many seconds it is an error; None: never.
    """

    def __init__(self, ballot: Ballot, rank: int, warning_s: float | None, abort_s: float | None):
        self._ballot, self._rank, self._warning_s, self.abort_s = ballot, rank, warning_s, abort_s
        self._entry: Entry | None = None
        self._since = 0.0
        self._awaited_since: float | None = None
        self._next_report = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has voted for an operation, and the round is not complete."""
        return self._entry is not None

    @property
    def is_free(self) -> bool:
        """Whether this rank may vote."""
        return not self._ballot.has_voted

    def propose(self, entry: Entry, is_ready: bool, now: float) -> None:
        """Vote for an entry's operation; `is_free`."""
        self._entry, self._since, self._awaited_since = entry, now, None
        self._next_report = now + (self._warning_s or 0.0)
        self._ballot.cast(entry.request.fingerprint, is_ready)

    def settle(self) -> tuple[Entry | None, Outcome]:
        """The entry that this rank voted for, once all ranks have voted, and whether all of them voted for it."""
        outcome = self._ballot.outcome()
        if outcome is None:
            return None, Outcome.REFUSED
        entry, self._entry = self._entry, None
        return entry, outcome

    def attend(self, is_busy: bool, now: float) -> None:
        """Vote against, if the others wait for this rank's vote and it has something else to do, or nothing."""
        if not self._ballot.is_awaited:
            self._awaited_since = None
        elif is_busy or (self._awaited_since is not None and now - self._awaited_since >= _LATE_S):
            self._awaited_since = None
            self._ballot.cast(0)
        elif self._awaited_since is None:
            self._awaited_since = now

    def check(self, now: float) -> None:
        """Report a rank that does not vote. An engine that runs does; nobody else can tell of one that does not.

        Raises:
            StallError: After `abort_s`.
        """
        if self._entry is None:
            return
        waited_s = now - self._since
        is_too_long = self.abort_s is not None and waited_s >= self.abort_s
        if not is_too_long and (self._warning_s is None or now < self._next_report):
            return
        text = (f"{self._entry.request.name}: rank {self._rank} has waited {waited_s:.0f} s for ranks "
                f"{rank_list(self._ballot.missing())}, whose engines do not run: their processes are stopped, or "
                "something in them keeps Python's global interpreter lock.")
        if is_too_long:
            raise StallError(text)
        self._next_report = now + (self._warning_s or 0.0)
        logger.warning("%s", text)
