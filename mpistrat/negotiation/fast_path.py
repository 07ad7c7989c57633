"""Agreement on an operation without the coordinator: all ranks vote for what they do next.

The coordinator's way is a message to rank 0 and one back. Where ranks wait for one operation after the other, there is
a shorter one. Rank 0 calls a vote with a decision, when it has itself waited for the one operation that this decides
on. From then on the next thing that any rank does is to vote, in one round after the other: for the operation's
fingerprint, if it waits for that and has nothing else to do, or against all. If all ranks have voted for the same, all
of them execute it, and the next round begins. A round in which they have not ends the vote, and everything goes to the
coordinator again, what was voted for as well.

So nothing that ranks disagree on is decided here. Rounds and decisions come in the same order on all ranks, for

- a rank with an operation at the coordinator votes against, in every round until the vote has ended;
- a rank that hears of a decision votes against, and executes it once the vote has ended. All ranks hear of it, so that
  all of them vote, and none waits for long.

A rank that does nothing at all does not vote. One that has waited for it tells rank 0, which recalls the vote by a
decision; then it is the coordinator that knows which ranks miss, and reports it.
"""

import logging

from ..core.errors import StallError
from ..core.handle import Entry
from ..core.interfaces import AgreementRound, Outcome
from ..core.stalls import describe_wait
from ..core.topology import Topology

logger = logging.getLogger(__name__)

_LATE_S = 0.04
_LOOK_S = 1.0  # how often a rank whose vote is not answered looks whether to report that
_MOST_SKIPPED = 64


class _NoAgreement:
    """An AgreementRound of ranks that cannot vote: no round begins."""

    has_voted = False

    def cast(self, number: int, is_ready: bool = False) -> None:
        raise AssertionError("a rank that cannot vote has voted")

    def outcome(self) -> Outcome | None:
        return None

    def has_news(self) -> bool:
        return False

    def missing(self) -> list[int]:
        return []

    def close(self) -> None:
        return


class FastPath:
    """One rank's votes. Used by the thread that drives the engine.

    Args:
        agreement: How the ranks vote; None: they cannot, and no vote is ever called.
        topology: Where the ranks are.
        warning_s: After so many seconds a round that is not complete is reported; None: never.
        abort_s: After so many seconds it is an error; None: never.

    Attributes:
        is_open: A vote has been called, and has not ended.
    """

    def __init__(self, agreement: AgreementRound | None, topology: Topology, warning_s: float | None,
                 abort_s: float | None):
        self._is_possible, self._agreement = agreement is not None, agreement or _NoAgreement()
        self._topology, self._warning_s, self.abort_s = topology, warning_s, abort_s
        self.is_open = False
        self._entry: Entry | None = None
        self._since = 0.0
        self._is_late_told = False
        self._next_report = 0.0
        self._agreements = 0  # in this vote
        self._skipped, self._to_skip = 0, 0

    def call(self) -> None:
        """A vote is called."""
        self.is_open, self._agreements = True, 0

    def is_worth_calling(self) -> bool:
        """On rank 0, when a vote may be called: whether to. Votes that ended in the first round make it rarer."""
        self._skipped += 1
        if not self._is_possible or self._skipped <= self._to_skip:
            return False
        self._skipped = 0
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has voted for an operation, and the round is not complete."""
        return self._entry is not None

    @property
    def has_voted(self) -> bool:
        """Whether this rank has voted, for or against, and the round is not complete."""
        return self._agreement.has_voted

    def propose(self, entry: Entry, is_ready: bool, now: float) -> None:
        """Vote for an entry's operation, in a vote that `is_open`, once in a round."""
        self._entry = entry
        self._cast(entry.request.fingerprint, is_ready, now)

    def decline(self, now: float) -> None:
        """Vote against all, if a vote is open and this rank has not voted."""
        if self.is_open and not self._agreement.has_voted:
            self._cast(0, False, now)

    def _cast(self, number: int, is_ready: bool, now: float) -> None:
        self._since, self._is_late_told, self._next_report = now, False, now + (self._warning_s or 0.0)
        self._agreement.cast(number, is_ready)

    def settle(self) -> tuple[Entry | None, Outcome | None]:
        """What this rank voted for, if anything, and the outcome, once all ranks have voted; None before."""
        outcome = self._agreement.outcome()
        if outcome is None:
            return None, None
        entry, self._entry = self._entry, None
        if outcome is not Outcome.REFUSED:
            self._agreements += 1
        else:
            self.is_open = False
            self._to_skip = 0 if self._agreements else min(2 * self._to_skip + 1, _MOST_SKIPPED)
        return entry, outcome

    def is_late(self, now: float) -> bool:
        """Whether this rank has waited for others so long that the vote should be recalled. Once in a round."""
        if not self._agreement.has_voted or self._is_late_told or now - self._since < _LATE_S:
            return False
        self._is_late_told = True
        return True

    def patience(self) -> float:
        """Seconds after which `is_late` and `check` must be called again."""
        if not self._agreement.has_voted:
            return 60.0
        return _LOOK_S if self._is_late_told else _LATE_S

    def check(self, now: float) -> None:
        """Report a rank that does not vote. An engine that runs does, and is heard as long as the network works.

        Raises:
            StallError: After `abort_s`.
        """
        if not self._agreement.has_voted:
            return
        waited_s = now - self._since
        is_too_long = self.abort_s is not None and waited_s >= self.abort_s
        if not is_too_long and (self._warning_s is None or now < self._next_report):
            return
        what = f"{self._entry.request.name}: " if self._entry is not None else ""
        text = what + describe_wait(self._topology, self._agreement.missing(), waited_s)
        if is_too_long:
            raise StallError(text)
        self._next_report = now + (self._warning_s or 0.0)
        logger.warning("%s", text)
