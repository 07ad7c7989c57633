"""Operations that all ranks vote for: execution without a message to rank 0.

negotiation/fast_path.py describes the votes. This module connects them with what a rank executes: it votes for what the
caller waits for, packs the tensors meanwhile, and executes the operation once all ranks have voted for it. An operation
that the ranks have not agreed on goes to the coordinator. Called by the controller, in the thread that drives.
"""

from ..core.handle import Entry
from ..core.interfaces import ControlPlane, Outcome
from ..core.tuning import ENGINE_SPIN_S
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from .executor import Executor
from .queue import TensorQueue


class Proposals:
    """The votes of one rank, and the execution of what they agree on.

    Attributes:
        has_sole_awaited: When the coordinator last got submissions, exactly one operation was outstanding, and its
            caller waited for it.
    """

    def __init__(self, fast_path: FastPath, coordinator: Coordinator, executor: Executor, queue: TensorQueue,
                 control: ControlPlane):
        self._fast_path, self._coordinator, self._executor = fast_path, coordinator, executor
        self._queue, self._control = queue, control
        self.has_sole_awaited = False

    @property
    def is_possible(self) -> bool:
        """Whether this rank may vote for what a caller brings: nothing is outstanding."""
        return self._is_due and not self._queue.outstanding

    @property
    def _is_due(self) -> bool:
        """Whether a vote is open, and this rank has not voted in this round."""
        return self._fast_path.is_open and not self._fast_path.has_voted

    def take(self, entries: list[Entry], now: float, may_agree: bool) -> None:
        """Vote for the one entry that was taken from the queue, or give the coordinator all that were taken.

        Args:
            entries: What was taken.
            now: The time.
            may_agree: False: this rank has something to send that only a decision of rank 0 settles.
        """
        is_sole = len(entries) == 1 and self._queue.outstanding == 1
        if is_sole and entries[0].is_awaited and may_agree and self._is_due:
            self._propose(entries[0], now)
        elif entries:
            self._submit(entries, now)

    def _submit(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            self._coordinator.submit(entry.request, now)
        self.has_sole_awaited = self._queue.outstanding == 1 and entries[0].is_awaited

    def _propose(self, entry: Entry, now: float) -> None:
        self._fast_path.propose(entry, self._executor.prepare(entry), now)

    def propose(self, entry: Entry, now: float) -> None:
        """Vote for an entry that the driver has taken, and wait for the other votes for a moment."""
        self._queue.outstanding += 1  # Not counted when it was put: Ctrl-C may come between the two.
        self._propose(entry, now)
        if not self.settle(now):
            self._executor.prepare_more()
            if not self.settle(now):
                # Messages on other operations can wait for so long.
                self._control.wait(ENGINE_SPIN_S, ENGINE_SPIN_S)
                self.settle(now)

    def settle(self, now: float) -> bool:
        """Execute what all ranks have voted for. Returns whether a round was complete."""
        entry, outcome = self._fast_path.settle()
        if entry is None:
            return outcome is not None
        if outcome:
            self._queue.finish(entry.request.name)
            self._executor.execute([entry], all_ready=outcome is Outcome.ALL_READY)
            self._queue.executed()
        else:
            self._submit([entry], now)
        return True

    def attend(self, now: float, may_agree: bool) -> bool:
        """Do what is due in a vote that is open; `may_agree` as in `take`. Returns whether a round was complete."""
        fast_path = self._fast_path
        if not fast_path.is_open:
            return False
        has_settled = self.settle(now)
        if self._queue.outstanding or not may_agree:
            fast_path.decline(now)
        if fast_path.is_late(now):
            self._coordinator.request_vote_end()
        fast_path.check(now)
        return has_settled

    def end_vote(self, now: float) -> bool:
        """Vote against, if a vote is open. Returns whether no vote is open now."""
        while self._fast_path.is_open:
            self._fast_path.decline(now)
            if not self.settle(now):
                return False
        return True
