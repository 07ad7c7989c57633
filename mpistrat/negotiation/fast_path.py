"""Agreement on an operation by a vote of all ranks, without a message to rank 0.

The coordinator needs a message to rank 0 and a message back. A vote takes less time, and is for ranks that wait for one
operation after the other. A vote is a series of rounds:

1. Rank 0 opens the vote by a decision with a single operation, if a caller on rank 0 waits for this operation.
2. In each round, a rank votes for the fingerprint of an operation if its caller waits for this operation and nothing
   else is outstanding. Otherwise the rank votes against.
3. If all ranks have voted for the same fingerprint, all of them execute that operation, and the next round begins.
   If not, the vote has ended, and the coordinator gets all operations, including those that ranks have voted for.

Rounds and decisions have the same order on all ranks:

- A rank that has given an operation to the coordinator votes against in every round, until the vote has ended.
- A rank that receives a decision votes against, and executes the decision once the vote has ended. All ranks receive
  the decision, therefore all of them vote, and the round is complete soon.

A rank that calls no collective does not vote. After VOTE_TIMEOUT_S, the ranks that wait for it ask rank 0 to end the
vote by a decision. The coordinator then finds and reports the missing ranks. Used by the engine's thread.
"""

import logging
from collections.abc import Callable

from ..core.errors import StallError
from ..core.handle import Entry
from ..core.interfaces import AgreementRound, Outcome
from ..core.topology import Topology, describe_wait
from ..core.tuning import LONGEST_CYCLE_S, MOST_SKIPPED_VOTES, VOTE_REPORT_POLL_S, VOTE_TIMEOUT_S

logger = logging.getLogger(__name__)

_MOST_LOOKED_AT = 2  # The number of ranks that `look` is called for. Each call may take seconds.


class FastPath:
    """One rank's part in votes. `agreement` carries out the rounds with the other ranks; None: there are no votes.

    `warning_s`, `abort_s`: Seconds after which an incomplete round is reported, and is an error; None: never.
    """

    def __init__(self, agreement: AgreementRound | None, topology: Topology, warning_s: float | None,
                 abort_s: float | None):
        self._agreement, self._topology, self._warning_s, self.abort_s = agreement, topology, warning_s, abort_s
        self.look: Callable[[int], str] = lambda _: ""  # See StallWatch.
        self.is_open = False  # A vote has been opened, and has not ended.
        self.has_voted = False  # This rank has voted, for or against, and the round is not complete.
        self._entry: Entry | None = None
        self._since, self._was_late, self._next_report = 0.0, False, 0.0
        self._agreements = 0  # The number of operations that the ranks have agreed on in this vote.
        self._skipped, self._to_skip = 0, 0

    def open(self) -> None:
        self.is_open, self._agreements = True, 0
        logger.debug("rank %d: a vote of the fast path begins", self._topology.job_rank)

    def is_worth_opening(self) -> bool:
        """Return whether rank 0 should open a vote. Each vote that fails in its first round makes later votes rarer."""
        self._skipped += 1
        if self._agreement is None or self._skipped <= self._to_skip:
            return False
        self._skipped = 0
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has voted for an operation, and the round is not complete."""
        return self._entry is not None

    def vote(self, entry: Entry | None, is_ready: bool, now: float) -> None:
        """Vote for `entry`, or against (None), once in each round. `is_ready`: The rank has packed the entry's data."""
        assert self._agreement is not None
        self._entry, self.has_voted = entry, True
        self._since, self._was_late, self._next_report = now, False, now + (self._warning_s or 0.0)
        self._agreement.vote(0 if entry is None else entry.request.fingerprint, is_ready)

    def decline(self, now: float) -> None:
        """Vote against, if a vote is open and this rank has not voted in this round."""
        if self.is_open and not self.has_voted:
            self.vote(None, False, now)

    def settle(self) -> tuple[Entry | None, Outcome | None]:
        """End the round if all ranks have voted. Returns (entry that this rank voted for or None, outcome).

        Returns (None, None) if a rank has not voted yet. To be called only while a vote is open.
        """
        assert self._agreement is not None
        outcome = self._agreement.outcome()
        if outcome is None:
            return None, None
        entry, self._entry, self.has_voted = self._entry, None, False
        if outcome is not Outcome.REFUSED:
            self._agreements += 1
        else:
            self.is_open = False
            self._to_skip = 0 if self._agreements else min(2 * self._to_skip + 1, MOST_SKIPPED_VOTES)
            logger.debug("rank %d: the vote of the fast path ends after %d operations; rank 0 skips %d chances before "
                         "the next one", self._topology.job_rank, self._agreements, self._to_skip)
        return entry, outcome

    def is_late(self, now: float) -> bool:
        """Return whether this rank has waited so long that rank 0 should end the vote. True only once in a round."""
        if not self.has_voted or self._was_late or now - self._since < VOTE_TIMEOUT_S:
            return False
        self._was_late = True
        logger.debug("rank %d: no outcome after %.2f s; rank 0 is asked to end the vote", self._topology.job_rank,
                     now - self._since)
        return True

    def next_check_s(self) -> float:
        """Return the seconds after which `is_late` and `check` must be called again."""
        if not self.has_voted:
            return LONGEST_CYCLE_S
        return VOTE_REPORT_POLL_S if self._was_late else VOTE_TIMEOUT_S

    def check(self, now: float) -> None:
        """Warn of ranks that have not voted in time. Their engines do not run, or the network does not work.

        Raises StallError: The round is still incomplete after `abort_s`.
        """
        if self._agreement is None or not self.has_voted:
            return
        waited_s = now - self._since
        is_too_long = self.abort_s is not None and waited_s >= self.abort_s
        if not is_too_long and (self._warning_s is None or now < self._next_report):
            return
        what = f"{self._entry.request.name}: " if self._entry is not None else ""
        topology, missing = self._topology, self._agreement.missing()
        text = what + describe_wait(topology, missing, waited_s)
        here = [rank for rank in topology.local_ranks if rank not in missing]
        if here[:1] == [topology.rank]:  # One rank of each host looks.
            late = [rank for rank in topology.local_ranks if rank in missing]
            text += "".join(self.look(topology.job_ranks[rank]) for rank in late[:_MOST_LOOKED_AT])
        if is_too_long:
            raise StallError(text)
        self._next_report = now + (self._warning_s or 0.0)
        logger.warning("%s", text)
