"""Controller: runs the cycles of an engine. A cycle takes submissions and messages, agrees with other ranks, executes.

In a cycle, a rank passes its callers' submissions and the messages of other ranks to the coordinator, sends the
messages that the coordinator returns, and executes the decisions of rank 0 in order. In the shorter fast path, all
ranks vote on the operation that a caller waits for, without messages to rank 0. `LifeCycle` ends the engine.

This module has no threads: the engine calls it from one thread at a time, and tests call `run_cycle` on each rank.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from ..core.errors import DeadlockError, EngineError, MismatchError, RanksLostError, ShutdownError, StallError
from ..core.handle import Entry
from ..core.interfaces import AgreementRound, ControlPlane, Outcome, RankLeftError
from ..core.interruption import Interruption
from ..core.request import Request
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import ENGINE_SPIN_S, GPU_LOOK_S, OBSERVER_POLL_S
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from ..negotiation.messages import OBSERVER, Announcement, Decision, EndReason
from ..negotiation.subtree import JOIN
from .executor import Executor
from .queue import TensorQueue

logger = logging.getLogger(__name__)

# -- how an engine ends ------------------------------------------------------------------------------------------------
# An engine ends by a shutdown on all ranks, by a failure, or without the other ranks. In each case, operations in
# flight fail with an error that names the cause, and the other ranks receive the cause.

_ERRORS: dict[EndReason, type[EngineError]] = {
    EndReason.SHUTDOWN: ShutdownError, EndReason.RANK_LEFT: ShutdownError, EndReason.STALL: StallError,
    EndReason.DEADLOCK: DeadlockError, EndReason.FAILURE: EngineError, EndReason.MISMATCH: EngineError}
SHUT_DOWN_TEXT = ("mpistrat has been shut down. This was caused by an exception on one of the ranks, or by an attempt "
                  "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")

_LAST_MESSAGE_S = 2.0  # The longest time that a failed rank waits until other ranks have taken its last message.
_LAST_MESSAGE_LOOKS = 40  # The number of looks for this message in this time, on another rank.
# The same time after a stall, when some rank takes no messages. It is short, so that this rank raises its error before
# another rank, which has received the message, ends the job.
_LAST_MESSAGE_AFTER_STALL_S = 0.2


class BrokenOffError(EngineError):
    """The reason to end the engines of all ranks: a graph on one rank cannot continue. Callers get an EngineError.

    The collectives that the graph has submitted cannot be taken back: other ranks may wait for them, and would execute
    them together with the collectives of this rank's next step. `cause`: A sentence that says what has
    happened, and on which rank. The text of the EngineError begins with it.
    """

    def __init__(self, cause: str):
        super().__init__(f"{cause} The other collectives of the step cannot be taken back, so the engine has ended on "
                         "all ranks. To go on in the same process, call shutdown() and init() on every rank.")


class LifeCycle:
    """Ends the engine of one rank, for any reason."""

    def __init__(self, controller: "Controller", interruption: Interruption):
        # Not the controller, which refers to this object: a cycle would keep an engine's memory after a recovery.
        self._rank, self._clock, self._fast_path = controller.topology.job_rank, controller.clock, controller._fast_path
        self._control, self._coordinator = controller.control, controller._coordinator
        self._executor, self._queue, self._interruption = controller.executor, controller.queue, interruption
        self.ended = threading.Event()  # Set when there are no more cycles.
        self.error: Exception | None = None  # The error that ended the engine; None after a shutdown on all ranks.
        # Any thread may set these three; the next cycle reads them.
        self.abandoned: EngineError | None = None  # The error with which to end on this rank only.
        self.broken_off: BrokenOffError | None = None  # The error with which to end on all ranks.
        self.is_end_requested = False  # This rank will submit no more.
        self.is_end_announced = False  # The coordinator knows that this rank will submit no more.

    def end_if_abandoned(self) -> bool:
        """End the engine if `self.abandoned` is set, or ranks are lost. Returns whether this call has ended it.

        Raises BrokenOffError: `self.broken_off` is set, and no ranks are lost.
        """
        if self.ended.is_set():
            return False
        lost = self._interruption.error
        if lost is None and self.broken_off is not None:
            raise self.broken_off
        error = lost or self.abandoned
        if error is not None:
            self._end(error, is_shutdown=False)
        return error is not None

    def end_by(self, decision: Decision) -> None:
        """End the engine by a decision of rank 0. The reason is `decision.end`, which is not None."""
        assert decision.end is not None
        self._end(_ERRORS[decision.end](decision.end_text), is_shutdown=decision.end is EndReason.SHUTDOWN)

    def fail(self, error: BaseException) -> None:
        """End the engine because of `error`. Send the error to the other ranks, so that they do not wait for this rank.

        If ranks are lost, the loss ends the engine, not `error`. Nothing is sent then: other ranks notice the loss too.
        """
        if isinstance(error, Exception) and not isinstance(error, BrokenOffError):
            self._interruption.await_error()
        if self._interruption.error is not None:
            self._executor.data.abandon(False)
            self._end(self._interruption.error, is_shutdown=False)
            return
        cause = self._cause_elsewhere() if isinstance(error, RankLeftError) else ""
        if cause or isinstance(error, BrokenOffError):
            error = EngineError(cause or str(error))
        elif not isinstance(error, StallError):
            where = "".join(traceback.format_exception(error)).strip()
            error = EngineError(f"The engine of rank {self._rank} failed: {error!r}\n{where}")
        self._executor.data.abandon(isinstance(error, StallError))
        self._send_failure(error)
        self._end(error, is_shutdown=False)

    def _cause_elsewhere(self) -> str:
        """Wait for the failure text of the rank that has left a collective, and return it; "" after _LAST_MESSAGE_S."""
        for _ in range(_LAST_MESSAGE_LOOKS):
            for source, message in self._control.poll():
                if message.startswith(OBSERVER):
                    continue
                text = Decision.from_bytes(message).end_text if source == self._coordinator.parent else \
                    Announcement.from_bytes(message).failure
                if text:
                    return text
            self._control.wait(_LAST_MESSAGE_S / _LAST_MESSAGE_LOOKS)
        return ""

    def _send_failure(self, error: EngineError) -> None:
        try:
            text, is_stall, coordinator = str(error), isinstance(error, StallError), self._coordinator
            coordinator.fail(text, is_stall)
            announcement, last = coordinator.advance(self._clock())
            if announcement is not None:
                self._control.send(coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
                # This rank will not relay the next decision of rank 0, so it sends its own decision to its children.
                last = Decision(end=EndReason.STALL if is_stall else EndReason.FAILURE, end_text=text)
            if last is not None:
                message = last.to_bytes()
                for child in coordinator.children:
                    self._control.send(child, message)
            # The engine ends now, and sends nothing afterwards.
            self._control.flush(coordinator.neighbours, _LAST_MESSAGE_AFTER_STALL_S if is_stall else _LAST_MESSAGE_S)
        except Exception:  # `error` is reported in any case. This second failure goes to the log.
            logger.debug("rank %d: the failure could not be sent to the other ranks", self._rank, exc_info=True)

    def _end(self, error: EngineError, is_shutdown: bool) -> None:
        refusal = ShutdownError(SHUT_DOWN_TEXT) if is_shutdown else error
        self.error = None if is_shutdown else error
        if not is_shutdown and not isinstance(error, RanksLostError):  # After a loss the other ranks may go on.
            self._executor.observer.fail()
        if self._fast_path.is_waiting:
            # Other ranks may execute the operation that this rank has voted for.
            self._executor.data.abandon(isinstance(error, StallError))
        if not is_shutdown:
            self._executor.device.halt()
        for entry in (*self._executor.device.unfinished(), *self._queue.close(refusal)):
            if not entry.handle.is_done:
                entry.handle.fail(refusal)
        self.ended.set()
        logger.debug("rank %d: the engine has ended: %s", self._rank, refusal)
        if not is_shutdown:
            self._executor.device.abandon()  # Last: the GPU may never answer.


# -- the controller ----------------------------------------------------------------------------------------------------

_ABRUPT = (EndReason.FAILURE, EndReason.STALL)  # After these reasons some rank may not vote any more.


@dataclass(slots=True)
class _Learned:
    """A decision of rank 0 that this rank has received, and not executed yet."""

    decision: Decision
    requests: Sequence[Request]
    message: bytes  # The decision as bytes, to relay it.
    is_relayed: bool = False


class Controller:
    """Runs the cycles of one rank.

    Args:
        control: Carries the messages of the negotiation, and the messages of the observer of `executor`.
        executor: Executes the operations that the ranks agree on.
        settings: The settings, the same on all ranks.
        agreement: Carries the votes of the fast path; None: the fast path is off.
        clock: Returns seconds, from any origin.
        interruption: Ends the cycles if ranks are lost; None: losses are not noticed.
        where: Returns where in the script this rank is, for the report that other ranks wait for this rank.
        look: Returns which code another rank executes. The argument is its number in the job. May take seconds.
    """

    def __init__(self, topology: Topology, control: ControlPlane, executor: Executor, settings: Settings,
                 agreement: AgreementRound | None = None, clock: Callable[[], float] = time.monotonic,
                 interruption: Interruption | None = None, where: Callable[[], str] = str,
                 look: Callable[[int], str] | None = None):
        self._where = where
        self.topology, self.control, self.executor, self.clock = topology, control, executor, clock
        warning_s = None if settings.stall_check_disable else settings.stall_warning_s
        abort_s = settings.limit_s or None
        self.queue = TensorQueue()  # The submitted operations. Any thread may use it.
        self._coordinator = Coordinator(topology, settings.cache_capacity, warning_s, abort_s,
                                        None if settings.stall_check_disable else settings.deadlock_s or None)
        self._fast_path = FastPath(agreement, topology, warning_s, abort_s)
        if look is not None:
            self._coordinator.stalls.look = self._fast_path.look = look
        # When the coordinator last got submissions, one operation was outstanding, and its caller waited for it.
        self._has_sole_awaited = False
        self._outgoing = executor.observer.outgoing
        self.life = LifeCycle(self, interruption or Interruption())
        self._averages_over_active = settings.join_average == "active"
        self.joins = 0  # The number of times that all ranks have completed a join().
        self._learned: deque[_Learned] = deque()
        self._busy_at = clock()
        logger.debug("rank %d of %d: negotiates with parent %s and children %s of the tree; votes are %s",
                     topology.job_rank, topology.size, self._coordinator.parent,
                     list(self._coordinator.children), "off" if agreement is None else "on")

    def abort_stalls_after(self, seconds: float, setting: str) -> None:
        """Replace the stall limit of the settings: the engines end if ranks wait for others for `seconds` (not 0).

        All ranks pass the same arguments. `setting`: The name by which the user knows the limit, for the error.
        """
        stalls = self._coordinator.stalls
        stalls.abort_setting, stalls.abort_s, self._fast_path.abort_s = setting, seconds, seconds

    # -- for the thread that drives -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether this rank has operations or GPU work to complete, or has voted and waits for the outcome."""
        return bool(self.queue.outstanding or self.queue.new or self.queue.later or self.executor.device.batches
                    or self._fast_path.has_voted)

    @property
    def needs_driver(self) -> bool:
        """Whether a thread must run cycles now. If not, it is enough to check for messages from time to time."""
        return self.has_work or self.life.is_end_announced or bool(self._outgoing)

    @property
    def may_propose(self) -> bool:
        """Whether this rank may vote for a new operation: the fast path is open, and nothing else is outstanding."""
        votes = self._fast_path
        return votes.is_open and not (votes.has_voted or self.queue.outstanding or self.life.is_end_requested)

    def propose(self, entry: Entry) -> None:
        """Vote for an operation that a caller waits for, and wait a moment for the votes of the other ranks.

        `may_propose` must be true, and TensorQueue.put must have returned True for `entry`.
        """
        now = self._busy_at = self.clock()
        self.queue.outstanding += 1  # Not counted in `put`: Ctrl-C may come between `put` and this call.
        self._fast_path.vote(entry, self.executor.prepare(entry), now)
        if not self._settle(now):
            self.executor.prepare_more()
            if not self._settle(now):
                # Messages about other operations can wait for this time.
                self.control.wait(ENGINE_SPIN_S, ENGINE_SPIN_S)
                self._settle(now)
        if self._outgoing:
            # After the operation, so that it need not wait. Without this cycle, a script that calls one fast path
            # operation after the other would never send or receive messages of its observer.
            self.run_cycle()

    def wait(self, longest_s: float, is_awaited: bool) -> None:
        """Wait until the next cycle may have something to do, for `longest_s` at most.

        `is_awaited`: A caller waits for a result. This thread then polls for a moment before it sleeps.
        """
        now, device = self.clock(), self.executor.device
        timeout_s = GPU_LOOK_S if device.batches else min(self._coordinator.next_check_s(),
                                                          self._fast_path.next_check_s())
        if self._outgoing:
            timeout_s = min(timeout_s, OBSERVER_POLL_S)
        spin_s = ENGINE_SPIN_S if is_awaited and not device.batches else 0.0
        self.control.wait(min(timeout_s, longest_s), spin_s, now - self._busy_at)

    def run_cycle(self) -> bool:
        """Run one cycle: take submissions and messages, agree, execute. Returns whether there was anything to do."""
        if self.life.end_if_abandoned():
            return True
        now = self.clock()
        has_finished = self.executor.device.poll()
        # Poll before taking submissions: `poll` consumes wake-ups, and a submission is queued before it sends one. The
        # other way round, a submission between the two calls would lose its wake-up, and the driver could sleep.
        messages = self.control.poll()
        entries = self.queue.take_new()
        is_sole = len(entries) == 1 and self.queue.outstanding == 1 and entries[0].is_awaited
        votes = self._fast_path
        if is_sole and votes.is_open and not votes.has_voted and not self.life.is_end_requested:
            votes.vote(entries[0], self.executor.prepare(entries[0]), now)
        elif entries:
            self._submit(entries, now)
        has_settled = self._fast_path.is_open and self._attend_vote(now)
        if self._outgoing:
            self._send_observed()
        elif self.life.is_end_requested and not self.life.is_end_announced:
            self.life.is_end_announced = True
            self._coordinator.end(self.queue.completed)
        has_news = False  # Messages of observers and answers are no news, since they also come in a deadlock.
        for source, message in messages:
            if message.startswith(OBSERVER):
                self._take_observed(source, message)
                continue
            if source == self._coordinator.parent:
                self._learn(Decision.from_bytes(message, self.topology.job_ranks[source]), message)
                has_news = True
            else:
                has_news = self._coordinator.receive(source, message, now) or has_news
        self._execute_learned(now)
        is_quiet = not (has_news or entries or has_settled or has_finished or self.executor.device.batches)
        announcement, decision = self._coordinator.advance(now, now - self._busy_at if is_quiet else 0.0)
        if announcement is not None:
            self.control.send(self._coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
        if decision is not None:
            if (self._has_sole_awaited and not self.life.is_end_requested and len(decision.agreed) == 1
                    and not any(decision[1:]) and self._fast_path.is_worth_opening()):
                # A caller of rank 0 waits for this decision only, so it may soon wait for the next operation.
                decision = decision._replace(opens_vote=True)
            self._learn(decision, decision.to_bytes() if self._coordinator.children else b"")
            self._execute_learned(now)
        if not self.life.ended.is_set():
            self._coordinator.check(now)
        if report := self._coordinator.stalls.report(now):
            logger.warning("%s", report)
        is_busy = bool(has_finished or entries or has_settled or has_news or announcement
                       or (decision is not None and decision.is_news))
        if is_busy:
            self._busy_at = self.clock()  # Read again: the executed operations may have taken long.
        return is_busy

    def _send_observed(self) -> None:
        """Send the next message of this rank's observer, unless an earlier message is still queued on this rank."""
        parent = self._coordinator.parent
        receivers = self._coordinator.children if parent is None else (parent,)
        if not self.control.is_sending_to(receivers):
            message = OBSERVER + self._outgoing.popleft()
            for receiver in receivers:
                self.control.send(receiver, message)

    def _take_observed(self, source: int, message: bytes) -> None:
        """Deliver or pass on a message of an observer, which travels to rank 0, or from rank 0 to all ranks."""
        parent = self._coordinator.parent
        if parent in (None, source):
            self.executor.observer.receive(message[len(OBSERVER):])
        for receiver in self._coordinator.children if source == parent else () if parent is None else (parent,):
            self.control.send(receiver, message)

    def _submit(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            self._coordinator.submit(entry.request, now)
        self._has_sole_awaited = self.queue.outstanding == 1 and entries[0].is_awaited

    def _settle(self, now: float) -> bool:
        """Once all ranks have voted, execute the operation, or negotiate if they disagree. Return whether all voted."""
        entry, outcome = self._fast_path.settle()
        if entry is None:
            return outcome is not None
        if outcome:
            self.queue.finish(entry.request.name)
            self.executor.execute([entry], all_ready=outcome is Outcome.ALL_READY)
            self.queue.executed()
        else:
            self._submit([entry], now)
        return True

    def _attend_vote(self, now: float) -> bool:
        """Call `_settle` and return its result. Refuse to agree if this rank has other work. Report late ranks."""
        has_settled = self._settle(now)
        if self.queue.outstanding or self.life.is_end_requested:
            self._fast_path.decline(now)
        if self._fast_path.is_late(now):
            self._coordinator.request_vote_end()
        self._fast_path.check(now)
        return has_settled

    def _learn(self, decision: Decision, message: bytes) -> None:
        # The coordinator learns the decision's numbers before this rank executes the decision: children may execute it
        # first, and then send these numbers.
        self._learned.append(_Learned(decision, self._coordinator.learn(decision), message))
        if self.topology.rank in decision.asks:
            self._coordinator.answer(self._where())

    def _execute_learned(self, now: float) -> None:
        """Execute the received decisions of rank 0. If the fast path is open, first end it by refusing to agree."""
        while self._learned and not self.life.ended.is_set():
            learned = self._learned[0]
            # Relay before executing, since the children must first end an open vote too. Do not relay before earlier
            # decisions have been executed: `_execute` waits until all relayed messages are delivered, but a child in
            # the collective of an earlier decision reads no messages.
            self._relay(learned)
            while self._fast_path.is_open:
                self._fast_path.decline(now)
                if not self._settle(now):
                    self._ends_abruptly()
                    return
            self._learned.popleft()
            try:
                self._execute(learned.decision, learned.requests)
            except RankLeftError:
                if not self._ends_abruptly():
                    raise
                self.executor.data.abandon(False)

    def _ends_abruptly(self) -> bool:
        """If the last decision reports a failure or a stall, end the engine at once. Returns whether it has ended."""
        if not self._learned or self._learned[-1].decision.end not in _ABRUPT:
            return False
        for learned in self._learned:
            self._relay(learned)
        self.life.end_by(self._learned[-1].decision)
        return True

    def _relay(self, learned: _Learned) -> None:
        if not learned.is_relayed:
            learned.is_relayed = True
            for child in self._coordinator.children:
                self.control.send(child, learned.message)

    def _execute(self, decision: Decision, requests: Sequence[Request]) -> None:
        self.control.flush(self._coordinator.children)
        for name, text in decision.errors:
            if not self.queue.has(JOIN.name) or self.queue.has(name):  # A rank in join() may not have submitted `name`.
                self.queue.finish(name).handle.fail(MismatchError(text))
        if decision.absent:
            self._execute_without(decision.absent, requests)
        else:
            self.executor.execute([self.queue.finish(request.name) for request in requests])
        self.queue.executed()
        if decision.last_joined:
            self.joins += 1
            self.queue.forget_failures(of_all_threads=True)
            self.queue.finish(JOIN.name).handle.complete([np.array(decision.last_joined[0], np.int32)])
            self.queue.executed()
        if decision.opens_vote:
            self._fast_path.open()
        if decision.end is not None:
            if decision.end is EndReason.SHUTDOWN:
                self.executor.device.drain()
            self.life.end_by(decision)

    def _execute_without(self, absent: Sequence[tuple[int, ...]], requests: Sequence[Request]) -> None:
        """Execute requests while some ranks are in join(). `absent[i]`: The ranks without tensors for `requests[i]`."""
        # Averages over different numbers of ranks do not share a reduction.
        for ranks, together in groupby(zip(absent, requests, strict=True), key=itemgetter(0)):
            divisor = self.topology.size - (len(ranks) if self._averages_over_active else 0)
            self.executor.execute([
                self.executor.absent_entry(request) if self.topology.rank in ranks else self.queue.finish(request.name)
                for _, request in together], divisor=divisor)
