"""The engine: one thread at a time negotiates, fuses and reduces what callers submit.

One thread owns MPI and NCCL, for three reasons. MPI libraries work best with one calling thread. The ranks must agree
on names, shapes and order before a collective, and each rank submits in its own order. Reduction overlaps with the
backward pass, which runs in other threads.

The thread that runs the cycles is called the driver. A background thread drives while something submitted
asynchronously is outstanding. A caller that only waits (`run`) drives the engine itself if no other thread does,
because two changes of threads take longer than a small reduction. A lock allows only one driver at a time.

Python runs signal handlers in the main thread, between any two instructions. A handler that called a collective inside
of a cycle would wait for the cycle that it has interrupted. So while the script has signal handlers, the main thread
does not drive. Nor does it take a lock for which the driver may wait, because a handler may interrupt it at any place.

Cycles have no fixed period. A submission or a message wakes the driver, which otherwise sleeps in ControlPlane.wait.
Submissions that arrive during a reduction are fused in the next cycle. While this rank has nothing outstanding, no
collective can begin. The background thread then checks for messages only from time to time.
"""

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from time import monotonic_ns

import numpy as np

from ..core import handle as handles
from ..core import signal_handlers
from ..core.errors import DuplicateNameError, EngineError
from ..core.handle import Entry, Handle, Origin
from ..core.request import Array, Request
from ..core.tuning import ENGINE_IDLE_POLL_S, FAILED_EXECUTION_S
from ..negotiation.subtree import JOIN
from .controller import BrokenOffError, Controller

logger = logging.getLogger(__name__)

_LAST_CYCLE_S = 5.0  # The limit of the wait for the last cycle, which may hang: it gives up GPU work at its end.


class Engine:
    """Executes the collectives that callers submit, on all ranks in the same order."""

    def __init__(self, controller: Controller):
        self.controller = controller
        self._queue, self._life, self._clock = controller.queue, controller.life, controller.clock
        self._rank = f"rank {controller.topology.job_rank}"
        self._thread: threading.Thread | None = None
        self._driving = threading.Lock()
        self._is_called = signal_handlers.WakeUp()  # Wakes the background thread.
        self._sleeps = False  # Whether the background thread sleeps until `_is_called` is set.

    # -- for callers, from any thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mpistrat-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, arrays: Sequence[Array], origin: Origin | None = None) -> Handle:
        """Submit a request. Returns at once. For the arguments see Entry.

        Raises:
            DuplicateNameError: The name is in flight; see TensorQueue.put. In the main thread of a script with signal
                handlers, the handle's `wait` raises this error instead.
            EngineError: The engine has ended.
        """
        handle = Handle(request.name)
        self._put(Entry(request, arrays, handle, origin=origin, submitted=monotonic_ns()))
        return handle

    def run(self, request: Request, arrays: Sequence[Array], limit_s: float = math.inf,
            origin: Origin | None = None) -> Handle:
        """Submit a request, and wait until its handle is done, at most for about `limit_s`. May drive the engine.

        Raises the errors of `submit`, and InvalidRequestError: This thread drives already; see require_no_driver.
        """
        thread = threading.get_ident()
        if thread in handles.drivers:
            handles.require_no_driver(request.name)  # Raises the error. Not always called: a call takes longer.
        handle = Handle(request.name)
        entry = Entry(request, arrays, handle, True, origin, monotonic_ns())
        drives: list[bool] = []
        may_drive = self._thread is None or not signal_handlers.may_interrupt()
        try:
            if may_drive:
                handles.drivers.add(thread)
            # `extend` takes the lock and stores whether it got the lock, in one call of C code, which Ctrl-C cannot
            # interrupt. Ctrl-C between `acquire` and an assignment would leave the lock locked for ever.
            drives.extend(map(self._driving.acquire, [False] if may_drive else []))
            if drives == [True]:
                is_taken = self._queue.put(entry, is_driver=self.controller.may_propose)
                self._drive(handle, self._clock() + limit_s, entry if is_taken else None)
        except DuplicateNameError as error:
            self._end_graph_of(entry, error)
            raise
        finally:
            try:
                if drives == [True]:
                    self._driving.release()
                    if self.controller.has_work or self._life.ended.is_set() or (self._sleeps and
                                                                                 self.controller.executor.device.kept):
                        self._is_called.set()
            finally:
                handles.drivers.discard(thread)
        if drives != [True]:
            self._put(entry)
            handle.await_done(-1 if limit_s == math.inf else limit_s)
        if self._queue.failures and not request.in_graph and handle.is_done:
            self._queue.forget_failures()
        return handle

    def _put(self, entry: Entry) -> None:
        if self._thread is not None and signal_handlers.may_interrupt():
            self._queue.put_later(entry)
        else:
            try:
                self._queue.put(entry)
            except DuplicateNameError as error:
                self._end_graph_of(entry, error)
                raise
        self._call_background()

    def _end_graph_of(self, entry: Entry, error: DuplicateNameError) -> None:
        """If a tf.function has submitted `entry`, end the engines of all ranks, and raise `error` as an EngineError."""
        if entry.request.in_graph:
            raise self.break_off(f"{error} That was in a tf.function on {self._rank}.") from error

    def break_off(self, cause: str) -> EngineError:
        """End the engines of all ranks, because a graph of this rank cannot continue. Return the error to raise. Local.

        `cause`: A sentence that says what has happened, and on which rank.
        """
        error = BrokenOffError(cause)
        self._life.broken_off = error
        self._call_background()
        return EngineError(str(self._life.error or error))

    def end_failed_execution(self, names: Collection[str], origins: Collection[Origin]) -> None:
        """Wait for operations in flight of a graph whose execution has failed. Count the failure (TensorQueue). Local.

        `origins`: The nodes of the graph. `names`: The names that these nodes may submit. Normally the other ranks also
        submit the operations in flight, which then complete. If they do not complete soon, the engines of all ranks
        end. The engines also end if the graph has a join(), because the other ranks would continue without this rank.
        """
        deadline = self._clock() + FAILED_EXECUTION_S
        for entry in self._queue.in_flight():
            if entry.origin in origins and not entry.handle.await_done(max(deadline - self._clock(), 0.0)):
                self.break_off(f"{entry.request.name}: on {self._rank} the tf.function that has submitted this "
                               "operation ended in an error before the operation was complete. To see why, read the "
                               f"error of the tf.function on {self._rank}.")
                self._life.ended.wait(FAILED_EXECUTION_S)
                return
        if JOIN.name in names:
            self.break_off(f"On {self._rank} a tf.function with join() ended in an error.")
        self._queue.count_failure(names)

    def _call_background(self) -> None:
        self._is_called.set()
        if self._driving.locked():
            # The driver may sleep. If the driver is about to stop, the background thread, now awake, takes over.
            self.controller.control.wake()

    def announce_end(self) -> None:
        """Announce that this rank submits no more, so that other ranks do not wait for it. Returns at once."""
        self._life.is_end_requested = True
        self._call_background()

    def end(self, report: Callable[[float], None] | None = None, report_every_s: float = 60.0) -> None:
        """Announce that this rank submits no more, wait until all ranks have announced it, and stop. Collective.

        The wait has no limit, as in MPI_Finalize: a rank may evaluate for hours after the other ranks have ended.
        `report(waited_s)` is called every `report_every_s` seconds.
        """
        began = self._clock()
        self.announce_end()
        if self._thread is None:
            return
        while not self._life.ended.wait(report_every_s):
            if report:
                report(self._clock() - began)
        self._join(self._thread)

    def abandon(self, reason: str) -> None:
        """Stop without the other ranks, for example if some have died. Pending and later operations fail. Local."""
        self._life.abandoned = EngineError(reason)
        self.await_interrupted(None)

    def interrupt(self, error: Exception) -> None:
        """Refuse later operations with `error`, and wake the engine, which then ends because ranks are lost.

        Operations in flight fail when the engine ends. Returns at once. Any thread may call it.
        """
        self._queue.refuse(error)
        self._call_background()

    def await_interrupted(self, limit_s: float | None) -> bool:
        """Wait for the engine to end, at most `limit_s` (None: no limit). Local. Returns whether it has ended."""
        self._call_background()
        if self._thread is None or not self._life.ended.wait(limit_s):
            return self._thread is None
        self._join(self._thread)
        return True

    def _join(self, thread: threading.Thread) -> None:
        """Wait until the background thread has completed its last cycle and ended, for _LAST_CYCLE_S at most."""
        self._is_called.set()
        if thread is not threading.current_thread():
            thread.join(_LAST_CYCLE_S)

    # -- the thread that drives ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        thread = threading.get_ident()
        handles.drivers.add(thread)
        try:
            while not self._life.ended.is_set():
                # A job of one rank gets no messages, but its GPU may still use memory of complete operations.
                self._sleeps = self.controller.topology.size == 1 and not self.controller.executor.device.kept
                is_called = self._is_called.wait(None if self._sleeps else ENGINE_IDLE_POLL_S)
                if not is_called and self._driving.locked():
                    continue
                with self._driving:
                    self._drive(None, math.inf)
        finally:
            handles.drivers.discard(thread)  # A new thread may get the same id.

    # The user decides about overflows and NaNs. Under `-W error`, a warning of numpy would end the engine.
    @np.errstate(all="ignore")
    def _drive(self, handle: Handle | None, deadline: float, proposal: Entry | None = None) -> None:
        """Run cycles until `handle` is done or the deadline has passed; without a handle, until there is no work.

        `proposal`: The entry of `handle`, for which this thread first votes; None if TensorQueue.put returned False.
        """
        controller, life = self.controller, self._life
        try:
            if proposal is not None:
                controller.propose(proposal)
                if proposal.handle.is_done:
                    return
            while not life.ended.is_set():
                busy = controller.run_cycle()
                # Checked even if nothing happened: an earlier driver may have completed this handle.
                if handle is not None:
                    if handle.is_done:
                        return
                elif not controller.needs_driver:
                    return  # At once, so that the caller that has waited may drive its next operation.
                elif busy:
                    continue
                longest_s = deadline - self._clock()
                if longest_s <= 0:
                    return
                controller.wait(longest_s, is_awaited=handle is not None)
        except BaseException as error:  # Of any kind: all waiters must get an error.
            logger.debug("rank %d: the engine failed", controller.topology.job_rank, exc_info=True)
            life.fail(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C in a caller that drives.
