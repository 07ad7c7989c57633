"""Controller: one cycle of an engine. Take submissions and messages, agree with the other ranks, execute.

In a cycle, a rank gives the coordinator what its callers have submitted and what other ranks have sent, sends what the
coordinator returns, and executes the decisions of rank 0 in their order. The shorter way is a vote of all ranks on the
operation that a caller waits for, without a message to rank 0: negotiation/fast_path.py. `LifeCycle` has the end.

No threads here: the engine calls all of it from one thread at a time, and tests call `run_cycle` on each rank in turn.
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
from ..core.interfaces import AgreementRound, ControlPlane, Observer, Outcome, RankLeftError
from ..core.interruption import Interruption
from ..core.request import Request
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import ENGINE_SPIN_S, GPU_LOOK_S, OBSERVER_POLL_S
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from ..negotiation.joined import JOIN
from ..negotiation.messages import OBSERVER, Announcement, Decision, EndReason
from .executor import Executor
from .queue import TensorQueue

# -- the states of an engine -------------------------------------------------------------------------------------------
# The end of an engine: by a shutdown on all ranks, by a failure, or without the other ranks.
#
# However an engine ends, each operation that is in flight fails with an error that names the cause, and the other ranks
# receive that cause. Called by the controller, in the thread that drives; `abandon` and `break_off` by any thread.


logger = logging.getLogger(__name__)

_ERRORS: dict[EndReason, type[EngineError]] = {
    EndReason.SHUTDOWN: ShutdownError, EndReason.RANK_LEFT: ShutdownError, EndReason.STALL: StallError,
    EndReason.DEADLOCK: DeadlockError, EndReason.FAILURE: EngineError, EndReason.MISMATCH: EngineError}
SHUT_DOWN_TEXT = ("mpistrat has been shut down. This was caused by an exception on one of the ranks, or by an attempt "
                  "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")

_LAST_MESSAGE_S = 2.0  # A rank that has failed waits at most so long until other ranks have taken its last message.
_LAST_MESSAGE_LOOKS = 40  # How often another rank looks for it in this time.
# The same after a stall, when some rank takes no messages. This rank must raise its error before another one, which has
# received the message, ends the job.
_LAST_MESSAGE_AFTER_STALL_S = 0.2


class BrokenOffError(EngineError):
    """Ends the engines of all ranks because of a graph of one rank. The ranks raise it as EngineError, with this text.

    The collectives that the graph has submitted cannot be taken back: the other ranks may wait for them, and would
    execute them with what this rank submits for the next step.

    Args:
        cause: What has happened on which rank, as a sentence.
    """

    def __init__(self, cause: str):
        super().__init__(f"{cause} The other collectives of the step cannot be taken back, so the engine has ended on "
                         "all ranks. To go on in the same process, call shutdown() and init() on every rank.")


@dataclass(frozen=True)
class Parts:
    """What an engine is made of: its controller makes them, and its life cycle ends them."""

    rank: int  # This rank in the job.
    control: ControlPlane
    coordinator: Coordinator
    fast_path: FastPath
    executor: Executor
    queue: TensorQueue
    clock: Callable[[], float]  # Seconds, from any origin.
    interruption: Interruption  # Ends the cycles because ranks are lost.


class LifeCycle:
    """Ends the engine of one rank."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._abandoned: EngineError | None = None
        self._broken_off: BrokenOffError | None = None
        self.ended = threading.Event()  # Set when there are no more cycles.
        self.error: Exception | None = None  # What ended them; None after a shutdown on all ranks.
        # is_end_requested: This rank submits no more. Any thread may set it; the next cycle announces it.
        # is_end_announced: The coordinator knows that.
        self.is_end_requested = self.is_end_announced = False

    # -- from any thread ----------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """End in the next cycle, without the other ranks."""
        self._abandoned = EngineError(reason)

    def break_off(self, error: BrokenOffError) -> None:
        """End in the next cycle, on all ranks."""
        self._broken_off = error

    # -- from the thread that drives ----------------------------------------------------------------------------------

    def announce_end(self) -> None:
        """Announce that this rank submits no more, if that was requested. Once."""
        if self.is_end_requested and not self.is_end_announced:
            self.is_end_announced = True
            self._parts.coordinator.end(self._parts.queue.completed)

    def end_if_abandoned(self) -> bool:
        """End if `abandon` was called, or ranks are lost. Returns whether it has ended now.

        Raises what `break_off` was called with.
        """
        if self.ended.is_set():
            return False
        if self._parts.interruption.error is not None:
            self._end(self._parts.interruption.error, is_shutdown=False)
            return True
        if self._broken_off is not None:
            raise self._broken_off
        if self._abandoned is None:
            return False
        self._end(self._abandoned, is_shutdown=False)
        return True

    def end_by(self, decision: Decision) -> None:
        """End for the reason that rank 0 has decided on: `decision.end`, which is not None."""
        assert decision.end is not None
        self._end(_ERRORS[decision.end](decision.end_text), is_shutdown=decision.end is EndReason.SHUTDOWN)

    def fail(self, error: BaseException) -> None:
        """End because of an error of any kind. The other ranks receive it, and do not wait for this one.

        If ranks are lost, the error is a consequence of that, and the others learn of it in the same ways as this one.
        """
        if isinstance(error, Exception) and not isinstance(error, BrokenOffError):
            self._parts.interruption.await_error()
        if self._parts.interruption.error is not None:
            self._parts.executor.data.abandon(False)
            self._end(self._parts.interruption.error, is_shutdown=False)
            return
        cause = self._cause_elsewhere() if isinstance(error, RankLeftError) else ""
        if cause or isinstance(error, BrokenOffError):
            error = EngineError(cause or str(error))
        elif not isinstance(error, StallError):
            where = "".join(traceback.format_exception(error)).strip()
            error = EngineError(f"The engine of rank {self._parts.rank} failed: {error!r}\n{where}")
        self._parts.executor.data.abandon(isinstance(error, StallError))
        self._send_failure(error)
        self._end(error, is_shutdown=False)

    def _cause_elsewhere(self) -> str:
        """What the rank says that has left a collective; "" if it says nothing for a moment."""
        for _ in range(_LAST_MESSAGE_LOOKS):
            for source, message in self._parts.control.poll():
                if message.startswith(OBSERVER):
                    continue
                text = Decision.from_bytes(message).end_text if source == self._parts.coordinator.parent else \
                    Announcement.from_bytes(message).failure
                if text:
                    return text
            self._parts.control.wait(_LAST_MESSAGE_S / _LAST_MESSAGE_LOOKS)
        return ""

    def _send_failure(self, error: EngineError) -> None:
        try:
            text, is_stall = str(error), isinstance(error, StallError)
            coordinator = self._parts.coordinator
            coordinator.fail(text, is_stall)
            announcement, decision = coordinator.advance(self._parts.clock())
            last = decision
            if announcement is not None:
                self._parts.control.send(coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
                # This rank will not relay the decision of rank 0 that follows, so it sends one to its children itself.
                last = Decision(end=EndReason.STALL if is_stall else EndReason.FAILURE, end_text=text)
            if last is not None:
                message = last.to_bytes()
                for child in coordinator.children:
                    self._parts.control.send(child, message)
            # The engine ends now, and sends nothing afterwards.
            self._parts.control.flush(coordinator.neighbours,
                                      _LAST_MESSAGE_AFTER_STALL_S if is_stall else _LAST_MESSAGE_S)
        except Exception:  # `error` is reported in any case. This second failure goes to the log.
            logger.debug("rank %d: the failure could not be sent to the other ranks", self._parts.rank, exc_info=True)

    def _end(self, error: EngineError, is_shutdown: bool) -> None:
        refusal = ShutdownError(SHUT_DOWN_TEXT) if is_shutdown else error
        self.error = None if is_shutdown else error
        if not is_shutdown and not isinstance(error, RanksLostError):  # After that the other ranks may go on.
            self._parts.executor.observer.fail()
        if self._parts.fast_path.is_waiting:
            # Other ranks may execute what this rank has voted for.
            self._parts.executor.data.abandon(isinstance(error, StallError))
        if not is_shutdown:
            self._parts.executor.device.halt()
        for entry in (*self._parts.executor.device.unfinished(), *self._parts.queue.close(refusal)):
            if not entry.handle.is_done:
                entry.handle.fail(refusal)
        self.ended.set()
        logger.debug("rank %d: the engine has ended: %s", self._parts.rank, refusal)
        if not is_shutdown:
            self._parts.executor.device.abandon()  # Last: the GPU may never answer.


# -- messages of observers ---------------------------------------------------------------------------------------------
# Carries the messages of the ranks' observers over the control plane, between those of the negotiation.


class ObserverMessages:
    """One rank's part: it sends those of its own observer, and passes on those of others. In the thread that drives."""

    def __init__(self, control: ControlPlane, coordinator: Coordinator, observer: Observer):
        self._control, self._observer = control, observer
        self._parent, self._children = coordinator.parent, coordinator.children

    def send(self) -> None:
        """Send one message of this rank's observer, which has some, if there is room for it beside the others."""
        receivers = self._children if self._parent is None else (self._parent,)
        if not self._control.is_sending_to(receivers):
            message = OBSERVER + self._observer.outgoing.popleft()
            for receiver in receivers:
                self._control.send(receiver, message)

    def take(self, source: int, message: bytes) -> None:
        """Take a message that begins with OBSERVER: one of rank 0 is for all ranks, one of another rank for rank 0."""
        parent = self._parent
        if parent in (None, source):
            self._observer.receive(message[len(OBSERVER):])
        for receiver in self._children if source == parent else () if parent is None else (parent,):
            self._control.send(receiver, message)


# -- the controller ----------------------------------------------------------------------------------------------------

_ABRUPT = (EndReason.FAILURE, EndReason.STALL)  # Some rank may not vote any more.


@dataclass(slots=True)
class _Learned:
    """A decision of rank 0 that has not been executed; `message` is its byte form."""

    decision: Decision
    requests: Sequence[Request]
    message: bytes
    is_relayed: bool = False


class Controller:
    """One rank's part in the cycles.

    Args:
        control: Messages among the ranks.
        executor: Executes what the ranks have agreed on. Its observer exchanges messages over `control`.
        settings: The same on all ranks.
        agreement: How the ranks vote; None: they do not.
        clock: Seconds, from any origin.
        interruption: Ends the cycles because ranks are lost; None: nothing does.
        where: Returns where the threads of this process are, for reports on ranks that others wait for.
        look: See StallWatch. It may take seconds, in which nothing can be agreed on with the rank that does not answer.
    """

    def __init__(self, topology: Topology, control: ControlPlane, executor: Executor, settings: Settings,
                 agreement: AgreementRound | None = None, clock: Callable[[], float] = time.monotonic,
                 interruption: Interruption | None = None, where: Callable[[], str] = str,
                 look: Callable[[int], str] | None = None):
        self._where = where
        self.topology, self.control, self.executor, self.clock = topology, control, executor, clock
        warning_s = None if settings.stall_check_disable else settings.stall_warning_s
        abort_s = settings.limit_s or None
        self.queue = TensorQueue()  # What is submitted. Any thread may use it.
        self._coordinator = Coordinator(topology, settings.cache_capacity, warning_s, abort_s,
                                        None if settings.stall_check_disable else settings.deadlock_s or None)
        self._fast_path = FastPath(agreement, topology, warning_s, abort_s)
        if look is not None:
            self._coordinator.stalls.look = self._fast_path.look = look
        # When the coordinator last got submissions, one operation was outstanding, and its caller waited for it.
        self._has_sole_awaited = False
        self._observers = ObserverMessages(control, self._coordinator, executor.observer)
        self._outgoing = executor.observer.outgoing
        # How the cycles end. Any thread may use some of it.
        self.life = LifeCycle(Parts(topology.job_rank, control, self._coordinator, self._fast_path, executor,
                                    self.queue, clock, interruption or Interruption()))
        self._averages_over_active = settings.join_average == "active"
        self.joins = 0  # How often all ranks have joined.
        self._learned: deque[_Learned] = deque()
        self._busy_at = clock()
        logger.debug("rank %d of %d: negotiates with parent %s and children %s of the tree; votes are %s",
                     topology.job_rank, topology.size, self._coordinator.parent,
                     list(self._coordinator.children), "off" if agreement is None else "on")

    def abort_stalls_after(self, seconds: float, setting: str) -> None:
        """In place of the setting: end when ranks have waited for so many seconds, more than 0, for others.

        The same on all ranks. `setting` is what the user has set, for the error.
        """
        self._coordinator.stalls.abort_after(seconds, setting)
        self._fast_path.abort_s = seconds

    # -- for the thread that drives -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is to be completed on this rank."""
        return bool(self.queue.outstanding or self.queue.new or self.queue.later or self.executor.device.batches
                    or self._fast_path.has_voted)

    @property
    def needs_driver(self) -> bool:
        """Whether cycles must go on now; without work it is enough to look at the messages now and then."""
        return self.has_work or self.life.is_end_announced or bool(self._outgoing)

    @property
    def may_propose(self) -> bool:
        """Whether this rank may vote for what a caller brings: nothing else is outstanding or to be sent."""
        votes = self._fast_path
        return votes.is_open and not (votes.has_voted or self.queue.outstanding or self.life.is_end_requested)

    def propose(self, entry: Entry) -> None:
        """Vote for what a caller waits for, and wait for the other votes for a moment. This rank `may_propose`.

        The driver has taken the entry when it was put in the queue.
        """
        now = self._busy_at = self.clock()
        self.queue.outstanding += 1  # Not counted when it was put: Ctrl-C may come between the two.
        self._fast_path.vote(entry, self.executor.prepare(entry), now)
        if not self._settle(now):
            self.executor.prepare_more()
            if not self._settle(now):
                # Messages on other operations can wait for so long.
                self.control.wait(ENGINE_SPIN_S, ENGINE_SPIN_S)
                self._settle(now)
        if self._outgoing:
            # After the operation, which does not wait for it. A script that calls one operation after the other on the
            # fast path would else send and receive nothing for its observer.
            self.run_cycle()

    def wait(self, longest_s: float, is_awaited: bool) -> None:
        """Return when the next cycle may have something to do, after `longest_s` at most.

        If a caller waits (`is_awaited`), it pays to stay awake for a moment.
        """
        now, device = self.clock(), self.executor.device
        if device.batches:
            timeout_s, spins = GPU_LOOK_S, False
        else:
            timeout_s = min(self._coordinator.next_check_s(), self._fast_path.next_check_s())
            spins = is_awaited
        if self._outgoing:
            timeout_s = min(timeout_s, OBSERVER_POLL_S)
        self.control.wait(min(timeout_s, longest_s), ENGINE_SPIN_S if spins else 0.0, now - self._busy_at)

    def run_cycle(self) -> bool:
        """Take submissions and messages, decide, execute. Returns whether anything happened."""
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
            self._observers.send()
        else:
            self.life.announce_end()
        has_news = False  # Messages of observers, and answers, are no news: they come in a deadlock, too.
        for source, message in messages:
            if message.startswith(OBSERVER):
                self._observers.take(source, message)
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
            if self._may_open_vote(decision):
                decision = decision._replace(opens_vote=True)
            self._learn(decision, decision.to_bytes() if self._coordinator.children else b"")
            self._execute_learned(now)
        if not self.life.ended.is_set():
            self._coordinator.check(now)
        report = self._coordinator.stalls.report(now)
        if report:
            logger.warning("%s", report)
        is_busy = bool(has_finished or entries or has_settled or has_news or announcement
                       or (decision is not None and decision.is_news))
        if is_busy:
            self._busy_at = self.clock()  # What was executed may have taken long.
        return is_busy

    def _submit(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            self._coordinator.submit(entry.request, now)
        self._has_sole_awaited = self.queue.outstanding == 1 and entries[0].is_awaited

    def _settle(self, now: float) -> bool:
        """Execute what all ranks have voted for. Returns whether a round of votes was complete."""
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
        """Do what is due in the vote that is open. Returns whether a round was complete."""
        has_settled = self._settle(now)
        if self.queue.outstanding or self.life.is_end_requested:
            self._fast_path.decline(now)
        if self._fast_path.is_late(now):
            self._coordinator.request_vote_end()
        self._fast_path.check(now)
        return has_settled

    def _end_vote(self, now: float) -> bool:
        """Vote against, if a vote is open. Returns whether no vote is open now."""
        while self._fast_path.is_open:
            self._fast_path.decline(now)
            if not self._settle(now):
                return False
        return True

    def _may_open_vote(self, decision: Decision) -> bool:
        """Whether rank 0's own caller waits for what is decided, so that all may soon wait for the next operation."""
        return (self._has_sole_awaited and not self.life.is_end_requested and len(decision.agreed) == 1
                and not any(decision[1:]) and self._fast_path.is_worth_opening())

    def _learn(self, decision: Decision, message: bytes) -> None:
        # The coordinator learns its numbers before this rank executes it. Children may execute it first, and then send
        # these numbers.
        self._learned.append(_Learned(decision, self._coordinator.learn(decision), message))
        if self.topology.rank in decision.asks:
            self._coordinator.answer(self._where())

    def _execute_learned(self, now: float) -> None:
        """Execute what rank 0 has decided, as soon as no vote is open."""
        while self._learned and not self.life.ended.is_set():
            learned = self._learned[0]
            # Relayed before it is executed, since the children must end an open vote first, too. Not relayed before the
            # earlier decisions have been executed: `_execute` waits until all relayed messages are delivered, and a
            # child inside the collective of an earlier decision reads no messages.
            self._relay(learned)
            if self._end_vote(now):
                self._learned.popleft()
                try:
                    self._execute(learned.decision, learned.requests)
                except RankLeftError:
                    if not self._ends_abruptly():
                        raise
                    self.executor.data.abandon(False)
                continue
            self._ends_abruptly()
            return

    def _ends_abruptly(self) -> bool:
        """End if the last decision says so, without those before it. Returns whether it has ended now."""
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
            if not self.queue.has(JOIN.name) or self.queue.has(name):  # A rank in join() may not have submitted it.
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
        """Execute requests, each of them without tensors of the ranks that are `absent`, which have joined."""
        # Averages over different numbers of ranks do not share a reduction.
        for ranks, together in groupby(zip(absent, requests, strict=True), key=itemgetter(0)):
            divisor = self.topology.size - (len(ranks) if self._averages_over_active else 0)
            self.executor.execute([
                self.executor.absent_entry(request) if self.topology.rank in ranks else self.queue.finish(request.name)
                for _, request in together], divisor=divisor)
