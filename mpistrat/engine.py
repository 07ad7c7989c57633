"""The engine: negotiates, fuses and reduces what is submitted, in one thread at a time, mostly a background thread.

One thread owns MPI and NCCL, because MPI libraries are happiest with one calling thread; because the ranks must agree
on names, shapes and order before a collective, while each of them submits in an order of its own; and because
reduction then overlaps with the backward pass that still runs in other threads.

That thread is a background thread while anything submitted asynchronously is outstanding. A caller that has nothing to
do but wait (`run`) drives the engine itself instead, if nobody else does: waking another thread, and being woken by it,
takes longer than a small reduction. A lock sees to it that there is one driver at a time.

There is no fixed cycle. A submission or a message wakes the driver, and it sleeps in ControlPlane.wait otherwise. While
it reduces, further submissions gather, and are fused in the next round. With nothing outstanding on this rank there is
nothing that other ranks could wait for, so the background thread then looks at its messages only now and then.
"""

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .autotune import Autotuner, Choice
from .collectives.base import Ballot, ControlPlane, DataPlane, Outcome
from .coordinator import Coordinator
from .errors import EngineError, MismatchError, ShutdownError, StallError
from .execution import Executor
from .gpu.connection import NO_WAYS, Ways
from .gpu.execution import GpuExecutor
from .messages import Decision, End, Request
from .settings import Settings
from .tensor_queue import Entry, Handle, TensorQueue
from .voting import Voting

logger = logging.getLogger(__name__)

_ERRORS: dict[End, type[EngineError]] = {
    End.SHUTDOWN: ShutdownError, End.RANK_ENDED: ShutdownError, End.STALL: StallError, End.FAILURE: EngineError,
    End.MISMATCH: EngineError}
SHUT_DOWN_TEXT = ("mpistrat has been shut down. This was caused by an exception on one of the ranks, or by an attempt "
                  "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.")

_IDLE_LOOK_S = 0.05  # how often a rank that waits for nothing looks at its messages
_SPIN_S = 300e-6  # a sleep and a wake-up take a third of that


class Engine:
    """Reduces, gathers and broadcasts what `submit` is given, on all ranks in the same order.

    Without `start`, tests drive it by calling `step` on each rank in turn.

    Args:
        rank: This rank.
        size: How many ranks there are.
        control: Messages among the ranks.
        data: Collectives on arrays.
        settings: The same on all ranks.
        clock: Seconds, from any origin.
        tuned: Called on rank 0 with the Autotuner when its search is done; None: nothing is tuned.
        gpu_ways: As for GpuExecutor.
        ballot: How the ranks vote, where they can; see voting.
    """

    def __init__(self, rank: int, size: int, control: ControlPlane, data: DataPlane, settings: Settings,
                 clock: Callable[[], float] = time.monotonic, tuned: Callable[[Autotuner], None] | None = None,
                 gpu_ways: Ways = NO_WAYS, ballot: Ballot | None = None):
        self._rank, self._size = rank, size
        self._control, self._data, self._clock = control, data, clock
        check = not settings.stall_check_disable
        warning_s = settings.stall_warning_s if check else None
        abort_s = (settings.stall_abort_s or None) if check else None
        self._coordinator = Coordinator(rank, size, settings.cache_capacity, warning_s, abort_s)
        self._voting = None if ballot is None else Voting(ballot, rank, warning_s, abort_s)
        self._gpu = GpuExecutor(rank, size, data, settings, gpu_ways, clock)
        self._executor = Executor(data, size, settings.fusion_bytes, self._gpu)
        self._tuned = tuned
        self._tuner = Autotuner(self._executor.knobs()) if tuned is not None and rank == 0 else None
        self._queue = TensorQueue()
        self._executing: list[Entry] = []  # no longer in the queue, and not all complete
        self._thread: threading.Thread | None = None
        self._driving = threading.Lock()
        self._attention = threading.Event()
        self._end_requested = False
        self._end_announced = False
        self._abandoned: EngineError | None = None
        self._ended = threading.Event()
        self._end_error: Exception | None = None
        self._clean = False  # all ranks have shut down
        self._outstanding = 0
        self._completed = 0

    # -- for callers, from any thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread."""
        self._thread = threading.Thread(target=self._run, name="mpistrat-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, arrays: Sequence[Any]) -> Handle:
        """Hand over a request; returns at once.

        Args:
            request: As on all ranks.
            arrays: This rank's tensors as C-contiguous arrays, or as GpuInputs when the request's device is a GPU, in
                the order of `request.tensors`. They must stay unchanged until the handle is done.

        Raises:
            DuplicateNameError: The name is in flight.
            EngineError: The engine has ended.
        """
        handle = Handle(request.name)
        self._queue.put(Entry(request, arrays, handle))
        self._call_background()
        return handle

    def run(self, request: Request, arrays: Sequence[Any], limit_s: float = math.inf) -> Handle:
        """As submit, but returns when the handle is done, or after about `limit_s`; drives if nobody does."""
        handle = Handle(request.name)
        entry = Entry(request, arrays, handle)
        if not self._driving.acquire(blocking=False):
            self._queue.put(entry)
            self._call_background()
            handle.await_done(-1 if limit_s == math.inf else limit_s)
            return handle
        try:
            is_taken = self._queue.put(entry, is_taken=self._may_vote)
            self._drive(handle, self._clock() + limit_s, entry if is_taken else None)
        finally:
            self._driving.release()
            if self._outstanding or self._gpu.is_busy:
                self._attention.set()
        return handle

    def _call_background(self) -> None:
        self._attention.set()
        if self._driving.locked():
            # Whoever drives may be asleep. If it is just about to stop, the background thread is called already.
            self._control.wake()

    def announce_end(self) -> None:
        """Say that this rank submits no more, so that other ranks need not wait for it. Returns at once."""
        self._end_requested = True
        self._call_background()

    def end(self, report: Callable[[float], None] | None = None, report_every_s: float = 60.0) -> None:
        """Say that this rank submits no more, wait until all ranks have said so, and stop the thread.

        The wait has no limit, like that of MPI_Finalize: a rank may evaluate for hours after the others are done.
        `report(waited_s)` is called every `report_every_s`.
        """
        began = self._clock()
        self.announce_end()
        if self._thread is None or self._ended.is_set():
            return
        while not self._ended.wait(report_every_s):
            if report:
                report(self._clock() - began)
        self._thread.join()

    def abandon(self, reason: str) -> None:
        """Stop without the other ranks, some of which have died. What is pending, and all that comes, fails. Local."""
        self._abandoned = EngineError(reason)
        if self._thread is None or self._ended.is_set():
            return
        self._call_background()
        self._ended.wait()
        self._thread.join()

    def knobs(self) -> dict[str, tuple[Any, ...]]:
        """What `choose` can choose among; see autotune."""
        return self._executor.knobs()

    def choose(self, choice: Choice) -> None:
        """Reduce in this way. Collective; before `start`."""
        self._executor.choose(choice)
        self._tuner = None

    def abort_stalls_after(self, seconds: float, setting: str) -> None:
        """In place of the setting: end when ranks have waited so long for others. The same on all ranks.

        Args:
            seconds: More than 0.
            setting: What the user has set, for the error.
        """
        self._coordinator.abort_stalls_after(seconds, setting)
        if self._voting is not None:
            self._voting.abort_s = seconds

    def close(self) -> None:
        """Release what the GPU holds. Collective; after `end`, when `error` is None."""
        self._gpu.close()

    @property
    def error(self) -> Exception | None:
        """What ended the engine, if anything but a shutdown by all ranks did."""
        return None if isinstance(self._end_error, ShutdownError) and self._clean else self._end_error

    # -- the thread that drives ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            is_called = self._attention.wait(_IDLE_LOOK_S if self._size > 1 else None)
            if not is_called and self._driving.locked():
                continue
            self._attention.clear()
            with self._driving:
                self._drive(None, math.inf)

    def _drive(self, handle: Handle | None, deadline: float, proposal: Entry | None = None) -> None:
        """Step until `handle` is done or the deadline has passed; without a handle, until nothing is outstanding.

        First vote for `proposal`, if there is one: the entry of `handle`, which is not in the queue then.
        """
        try:
            # Overflows and NaNs are for the user to look for; under `-W error` numpy's warning would end the engine.
            with np.errstate(all="ignore"):
                if proposal is not None:
                    self._propose(proposal)
                    if proposal.handle.done():
                        return
                while not self._ended.is_set():
                    busy = self.step()
                    # Asked for even if nothing happened: another driver may have been quicker with this handle.
                    if handle is not None:
                        if handle.done():
                            return
                    elif not self._outstanding and not self._end_announced and not self._gpu.is_busy:
                        return  # Without another look: who has waited for this may want to drive what comes next.
                    elif busy:
                        continue
                    now = self._clock()
                    if now >= deadline:
                        return
                    if self._gpu.is_busy:
                        patience_s = self._gpu.patience(now)
                        spins = patience_s == 0.0
                    else:
                        patience_s, spins = self._patience(now), handle is not None
                    self._control.wait(min(patience_s, deadline - now), spin_s=_SPIN_S if spins else 0.0)
        except BaseException as error:  # Whatever it was, nobody may wait for this engine any longer.
            logger.debug("rank %d: the engine failed", self._rank, exc_info=True)
            self._die(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C in a caller that drives.

    def _patience(self, now: float) -> float:
        longest_s = self._coordinator.patience(now)
        return min(longest_s, 1.0) if self._voting is not None and self._voting.is_waiting else longest_s

    @property
    def _may_vote(self) -> bool:
        """Whether this rank may vote for what a caller brings, if that is all there is to do."""
        return self._voting is not None and not self._outstanding and self._voting.is_free and self._is_willing

    def _propose(self, entry: Entry) -> None:
        """Vote for what a caller waits for, and be there when all have voted."""
        assert self._voting is not None
        self._outstanding += 1
        now = self._clock()
        self._voting.propose(entry, self._executor.prepare(entry), now)
        if not self._settle(now):
            self._executor.prepare_more()
            if not self._settle(now):
                # What others have to say of other operations can wait for so long.
                self._control.wait(_SPIN_S, spin_s=_SPIN_S)
                self._settle(now)

    @property
    def _is_willing(self) -> bool:
        """Whether this rank may agree to something by vote: nothing is to be said that only a decision can say."""
        return not (self._end_requested or self._tuner is not None or self._coordinator.has_choice)

    def _settle(self, now: float) -> bool:
        """Execute what all ranks have voted for. Returns whether a round was complete that this rank waited for."""
        assert self._voting is not None
        entry, outcome = self._voting.settle()
        if entry is None:
            return False
        if outcome:
            self._finish(entry.request.name)
            self._executing = [entry]
            self._executor.execute_prepared(entry, outcome is Outcome.ALL_READY)
            self._executing = []
        else:
            self._coordinator.submit(entry.request, now)
        return True

    def step(self) -> bool:
        """One round: take submissions and messages, decide, execute. Returns whether anything happened."""
        if self._abandoned is not None and not self._ended.is_set():
            self._stop(self._abandoned, clean=False)
            return True
        now = self._clock()
        finished = self._gpu.poll()
        # First the messages, then the submissions: a poll takes the wake-up with it that a submission has sent.
        messages = self._control.poll()
        entries = self._queue.take_new()
        for entry in entries:
            self._coordinator.submit(entry.request, now)
        self._outstanding += len(entries)
        has_settled = False
        if self._voting is not None:
            # After the messages are here, and before the decisions in them are executed; see voting.
            has_settled = self._settle(now)
            self._voting.attend(bool(self._outstanding) or not self._is_willing, now)
            self._voting.check(now)
        if self._end_requested and not self._end_announced:
            self._end_announced = True
            self._coordinator.end(self._completed)
        decisions = []
        for source, message in messages:
            if source == self._coordinator.parent:
                self._relay(message)
                decisions.append(Decision.from_bytes(message))
            else:
                self._coordinator.receive(source, message, now)
        for received in decisions:
            self._execute(received)
        announcement, decision = self._coordinator.advance(now)
        if announcement is not None:
            self._control.send(self._coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
        if decision is not None:
            if self._coordinator.children:
                self._relay(decision.to_bytes())
            self._execute(decision)
        report = self._coordinator.stall_report(now)
        if report:
            logger.warning("%s", report)
        return bool(finished or entries or has_settled or messages or announcement or decision)

    def _relay(self, message: bytes) -> None:
        for child in self._coordinator.children:
            self._control.send(child, message)

    def _execute(self, decision: Decision) -> None:
        self._control.flush(self._coordinator.children)
        requests = self._coordinator.learn(decision)
        for name, text in decision.errors:
            entry = self._finish(name)
            entry.handle.fail(MismatchError(text))
        entries = [self._finish(request.name) for request in requests]
        if decision.choice:
            self._executor.choose(dict(decision.choice))
        self._run_all(entries)
        if decision.end is not None:
            if decision.end is End.SHUTDOWN:
                self._gpu.drain()
            self._stop(_ERRORS[decision.end](decision.end_text), clean=decision.end is End.SHUTDOWN)

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
        entry = self._queue.finish(name)
        assert entry is not None, f"{name} was decided on, but is not in flight on rank {self._rank}"
        self._outstanding -= 1
        self._completed += 1
        return entry

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, StallError):
            where = "".join(traceback.format_exception(error)).strip()
            error = EngineError(f"The engine of rank {self._rank} failed: {error!r}\n{where}")
        self._tell_of_failure(str(error))
        self._data.abandon()
        self._stop(error, clean=False)

    def _tell_of_failure(self, text: str) -> None:
        try:
            self._coordinator.fail(text)
            announcement, decision = self._coordinator.advance(self._clock())
            if announcement is not None:
                self._control.send(self._coordinator.parent, announcement.to_bytes())  # type: ignore[arg-type]
                # This rank will not relay what rank 0 decides on that, so its children hear of it from here.
                decision = Decision(end=End.FAILURE, end_text=text)
            if decision is not None:
                self._relay(decision.to_bytes())
        except Exception:  # The first failure is the one to report; what may have broken the messages too is logged.
            logger.debug("rank %d: could not tell the other ranks", self._rank, exc_info=True)

    def _stop(self, error: EngineError, clean: bool) -> None:
        self._clean = clean
        self._end_error = error
        if self._voting is not None and self._voting.is_waiting:
            self._data.abandon()  # Others may execute what this rank has voted for.
        refusal = ShutdownError(SHUT_DOWN_TEXT) if clean else error
        for entry in (*self._executing, *self._gpu.unfinished(), *self._queue.close(refusal)):
            if not entry.handle.done():
                entry.handle.fail(refusal)
        self._ended.set()
        self._attention.set()  # The background thread, too, has to hear of it.
        if not clean:
            self._gpu.abandon()  # At the end, for nobody should wait for a GPU that may not answer.
