"""Controller: what an engine does in each cycle. Take submissions and messages, agree with the other ranks, execute.

No threads here: the engine calls all of it from one thread at a time, and tests call `step` on each rank in turn.
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import EngineError, MismatchError, ShutdownError, StallError
from ..core.handle import Entry
from ..core.interfaces import AgreementRound, ControlPlane, DataPlane, DeviceExecutor, Outcome
from ..core.request import Request
from ..core.settings import Settings
from ..core.topology import Topology
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from ..negotiation.messages import Decision, EndReason
from .autotune import Autotuner, Choice
from .executor import Executor
from .queue import TensorQueue

logger = logging.getLogger(__name__)

_ERRORS: dict[EndReason, type[EngineError]] = {
    EndReason.SHUTDOWN: ShutdownError, EndReason.RANK_ENDED: ShutdownError, EndReason.STALL: StallError,
    EndReason.FAILURE: EngineError, EndReason.MISMATCH: EngineError}
SHUT_DOWN_TEXT = ("mpistrat has been shut down. This was caused by an exception on one of the ranks, or by an attempt "
                  "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")

_SPIN_S = 300e-6  # a sleep and a wake-up take a third of that
_LAST_WORDS_S = 2.0  # for the other ranks to take the message that this one has failed
# After a stall some rank does not take it, and this one has to tell its caller before those that do end the job.
_LAST_WORDS_OF_STALL_S = 0.2
_ABRUPT = (EndReason.FAILURE, EndReason.STALL)  # A rank may vote no more.


@dataclass(slots=True)
class _Pending:
    """A decision that has been learned and not been executed; `message` is its byte form."""

    decision: Decision
    requests: Sequence[Request]
    message: bytes
    is_relayed: bool = False


class Controller:
    """One rank's part in the rounds. The arguments are those of Engine.

    Attributes:
        queue: What is submitted. Any thread may use it.
        ended: Set when there are no more rounds.
        error: What ended them, if anything but a shutdown by all ranks did.
    """

    def __init__(self, rank: int, size: int, control: ControlPlane, data: DataPlane, settings: Settings,
                 clock: Callable[[], float], tuned: Callable[[Autotuner], None] | None,
                 agreement: AgreementRound | None, topology: Topology | None, device: DeviceExecutor):
        self._rank = rank
        self._control, self._data, self._clock = control, data, clock
        warning_s = None if settings.stall_check_disable else settings.stall_warning_s
        abort_s = settings.limit_s or None
        topology = topology or Topology(rank, ("",) * size)
        self._coordinator = Coordinator(rank, size, settings.cache_capacity, warning_s, abort_s, topology)
        self._fast_path = None if agreement is None else FastPath(agreement, topology, warning_s, abort_s)
        self._device = device
        self._executor = Executor(data, size, settings.fusion_bytes, device)
        self._tuned = tuned
        self._tuner = Autotuner(self._executor.knobs()) if tuned is not None and rank == 0 else None
        self._executing: list[Entry] = []  # no longer in the queue, and not all complete
        self._end_requested = False
        self._end_announced = False
        self._abandoned: EngineError | None = None
        self._decided: deque[_Pending] = deque()
        self._busy_at = clock()
        self._awaits_one = False  # what is outstanding is one operation, and a caller awaits it
        self._outstanding = 0
        self._completed = 0
        self.queue = TensorQueue()
        self.ended = threading.Event()
        self.error: Exception | None = None

    # -- from any thread ----------------------------------------------------------------------------------------------

    def request_end(self) -> None:
        """Say in the next round that this rank submits no more."""
        self._end_requested = True

    def abandon(self, reason: str) -> None:
        """End in the next cycle, without the other ranks."""
        self._abandoned = EngineError(reason)

    # -- before the first round, or after the last --------------------------------------------------------------------

    def knobs(self) -> dict[str, tuple[Any, ...]]:
        """What `choose` can choose among; see autotune."""
        return self._executor.knobs()

    def choose(self, choice: Choice) -> None:
        """Reduce in this way. Collective."""
        self._executor.choose(choice)
        self._tuner = None

    def abort_stalls_after(self, seconds: float, setting: str) -> None:
        """As Engine.abort_stalls_after."""
        self._coordinator.abort_stalls_after(seconds, setting)
        if self._fast_path is not None:
            self._fast_path.abort_s = seconds

    def close(self) -> None:
        """Release what the GPU holds. Collective."""
        self._device.close()

    # -- for the thread that drives -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is to be completed on this rank."""
        has_voted = self._fast_path is not None and self._fast_path.has_voted
        return bool(self._outstanding) or self._device.is_busy or has_voted

    @property
    def needs_driver(self) -> bool:
        """Whether rounds must go on now; without work it is enough to look at the messages now and then."""
        return self.has_work or self._end_announced

    def wait(self, longest_s: float, is_awaited: bool) -> None:
        """Return when the next round may have something to do, after `longest_s` at most.

        Args:
            longest_s: In seconds.
            is_awaited: Whether a caller waits, so that it pays to stay awake for a moment.
        """
        now = self._clock()
        if self._device.is_busy:
            patience_s = self._device.patience(now)
            spins = patience_s == 0.0
        else:
            patience_s, spins = self._coordinator.patience(now), is_awaited
            if self._fast_path is not None:
                patience_s = min(patience_s, self._fast_path.patience())
        self._control.wait(min(patience_s, longest_s), _SPIN_S if spins else 0.0, now - self._busy_at)

    @property
    def may_vote(self) -> bool:
        """Whether this rank may vote for what a caller brings, if that is all there is to do."""
        fast_path = self._fast_path
        return (fast_path is not None and fast_path.is_open and not fast_path.has_voted and not self._outstanding
                and self._is_willing)

    def propose(self, entry: Entry) -> None:
        """Vote for what a caller waits for, and be there when all have voted.

        Args:
            entry: It is in flight, but was not among the new ones. This rank `may_vote`.
        """
        assert self._fast_path is not None
        now = self._clock()
        self._propose(entry, now)
        if not self._settle(now):
            self._executor.prepare_more()
            if not self._settle(now):
                # What others have to say of other operations can wait for so long.
                self._control.wait(_SPIN_S, _SPIN_S)
                self._settle(now)

    def _propose(self, entry: Entry, now: float) -> None:
        assert self._fast_path is not None
        self._outstanding += 1
        self._busy_at = now
        self._fast_path.propose(entry, self._executor.prepare(entry), now)

    @property
    def _is_willing(self) -> bool:
        """Whether this rank may agree to something by vote: nothing is to be said that only a decision can say."""
        return not (self._end_requested or self._tuner is not None or self._coordinator.has_choice)

    def _settle(self, now: float) -> bool:
        """Execute what all ranks have voted for. Returns whether a round was complete."""
        assert self._fast_path is not None
        entry, outcome = self._fast_path.settle()
        if entry is None:
            return outcome is not None
        if outcome:
            self._finish(entry.request.name)
            self._executing = [entry]
            self._executor.execute_prepared(entry, outcome is Outcome.ALL_READY)
            self._executing = []
        else:
            self._coordinator.submit(entry.request, now)
            self._awaits_one = self._outstanding == 1
        return True

    def _attend_vote(self, now: float) -> bool:
        """Do what is due in a vote that is open. Returns whether a round was complete."""
        fast_path = self._fast_path
        if fast_path is None or not fast_path.is_open:
            return False
        has_settled = self._settle(now)
        if self._outstanding or not self._is_willing:
            fast_path.decline(now)
        if fast_path.is_late(now):
            self._coordinator.recall()
        fast_path.check(now)
        return has_settled

    def _ends_vote(self, now: float) -> bool:
        """Vote against, if a vote is open. Returns whether it has ended."""
        fast_path = self._fast_path
        while fast_path is not None and fast_path.is_open:
            fast_path.decline(now)
            if not self._settle(now):
                return False
        return True

    def step(self) -> bool:
        """One round: take submissions and messages, decide, execute. Returns whether anything happened."""
        if self._abandoned is not None and not self.ended.is_set():
            self._stop(self._abandoned, clean=False)
            return True
        now = self._clock()
        finished = self._device.poll()
        # First the messages, then the submissions: a poll takes the wake-up with it that a submission has sent.
        messages = self._control.poll()
        entries = self.queue.take_new()
        self._take(entries, now)
        has_settled = self._attend_vote(now)
        if self._end_requested and not self._end_announced:
            self._end_announced = True
            self._coordinator.end(self._completed)
        for source, message in messages:
            if source == self._coordinator.parent:
                self._learn(Decision.from_bytes(message, source), message)
            else:
                self._coordinator.receive(source, message, now)
        self._execute_decisions(now)
        announcement, decision = self._coordinator.advance(now)
        if announcement is not None:
            self._control.send(self._coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
        if decision is not None:
            if self._may_call_vote(decision):
                decision = decision._replace(calls_vote=True)
            self._learn(decision, decision.to_bytes() if self._coordinator.children else b"")
            self._execute_decisions(now)
        if not self.ended.is_set():
            self._coordinator.check(now)
        report = self._coordinator.stall_report(now)
        if report:
            logger.warning("%s", report)
        is_busy = bool(finished or entries or has_settled or messages or announcement or decision)
        if is_busy:
            self._busy_at = now
        return is_busy

    def _take(self, entries: list[Entry], now: float) -> None:
        if len(entries) == 1 and entries[0].is_awaited and self.may_vote:
            self._propose(entries[0], now)
        elif entries:
            for entry in entries:
                self._coordinator.submit(entry.request, now)
            self._outstanding += len(entries)
            self._awaits_one = self._outstanding == 1 and entries[0].is_awaited

    def _relay(self, message: bytes) -> None:
        for child in self._coordinator.children:
            self._control.send(child, message)

    def _may_call_vote(self, decision: Decision) -> bool:
        """Whether rank 0's own caller has awaited what is decided, so that all may soon await the next operation."""
        return (self._fast_path is not None and self._awaits_one and self._is_willing and len(decision.agreed) == 1
                and not any(decision[1:]) and self._fast_path.is_worth_calling())

    def _execute_decisions(self, now: float) -> None:
        """Execute what rank 0 has decided, as soon as no vote is open."""
        while self._decided and not self.ended.is_set():
            pending = self._decided[0]
            # At once, for it ends an open vote. But a decision is relayed only when those before it have been executed:
            # a child that has entered the collective of one reads no further messages, and before this rank enters it,
            # all that has been relayed must be out.
            self._relay_decision(pending)
            if self._ends_vote(now):
                self._decided.popleft()
                self._execute(pending.decision, pending.requests)
                continue
            last = self._decided[-1].decision
            if last.end in _ABRUPT:
                for pending in self._decided:
                    self._relay_decision(pending)
                self._stop(_ERRORS[last.end](last.end_text), clean=False)
            return

    def _relay_decision(self, pending: _Pending) -> None:
        if not pending.is_relayed:
            pending.is_relayed = True
            self._relay(pending.message)

    def _learn(self, decision: Decision, message: bytes) -> None:
        # Not only when it is executed: children may have executed it, and send numbers that it gives.
        self._decided.append(_Pending(decision, self._coordinator.learn(decision), message))

    def _execute(self, decision: Decision, requests: Sequence[Request]) -> None:
        self._control.flush(self._coordinator.children)
        for name, text in decision.errors:
            entry = self._finish(name)
            entry.handle.fail(MismatchError(text))
        entries = [self._finish(request.name) for request in requests]
        if decision.choice:
            self._executor.choose(dict(decision.choice))
        self._run_all(entries)
        if decision.calls_vote and self._fast_path is not None:
            self._fast_path.call()
        if decision.end is not None:
            if decision.end is EndReason.SHUTDOWN:
                self._device.drain()
            self._stop(_ERRORS[decision.end](decision.end_text), clean=decision.end is EndReason.SHUTDOWN)

    def _run_all(self, entries: list[Entry]) -> None:
        self._executing = entries
        if self._tuner is None:
            self._executor.execute(entries)
        else:
            began = self._clock()
            self._executor.execute(entries)
            self._tune(self._tuner, entries, self._clock() - began)
        self._executing = []

    def _tune(self, tuner: Autotuner, entries: Sequence[Entry], seconds: float) -> None:
        choice = tuner.record(sum(array.nbytes for entry in entries for array in entry.arrays), seconds)
        if choice is not None:
            self._coordinator.adopt(choice)
        if tuner.is_done:
            self._tuner = None
            if self._tuned is not None:
                self._tuned(tuner)

    def _finish(self, name: str) -> Entry:
        entry = self.queue.finish(name)
        assert entry is not None, f"{name} was decided on, but is not in flight on rank {self._rank}"
        self._outstanding -= 1
        self._completed += 1
        return entry

    def fail(self, error: BaseException) -> None:
        """End because of an error of any kind, and tell the other ranks, so that none waits for this one."""
        if not isinstance(error, StallError):
            where = "".join(traceback.format_exception(error)).strip()
            error = EngineError(f"The engine of rank {self._rank} failed: {error!r}\n{where}")
        self._data.abandon(isinstance(error, StallError))
        self._tell_of_failure(error)
        self._stop(error, clean=False)

    def _tell_of_failure(self, error: BaseException) -> None:
        try:
            text, is_stall = str(error), isinstance(error, StallError)
            self._coordinator.fail(text, is_stall)
            announcement, decision = self._coordinator.advance(self._clock())
            if announcement is not None:
                self._control.send(self._coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
                # This rank will not relay what rank 0 decides on that, so its children hear of it from here.
                decision = Decision(end=EndReason.STALL if is_stall else EndReason.FAILURE, end_text=text)
            if decision is not None:
                self._relay(decision.to_bytes())
            # Nothing is sent on once the engine has ended.
            self._control.flush(self._coordinator.neighbours, _LAST_WORDS_OF_STALL_S if is_stall else _LAST_WORDS_S)
        except Exception:  # The first failure is the one to report; what may have broken the messages too is logged.
            logger.debug("rank %d: could not tell the other ranks", self._rank, exc_info=True)

    def _stop(self, error: EngineError, clean: bool) -> None:
        refusal = ShutdownError(SHUT_DOWN_TEXT) if clean else error
        self.error = None if clean else error
        if self._fast_path is not None and self._fast_path.is_waiting:
            self._data.abandon(isinstance(error, StallError))  # Others may execute what this rank has voted for.
        for entry in (*self._executing, *self._device.unfinished(), *self.queue.close(refusal)):
            if not entry.handle.done():
                entry.handle.fail(refusal)
        self.ended.set()
        if not clean:
            self._device.abandon()  # At the end, for nobody should wait for a GPU that may not answer.
