"""The end of an engine: by a shutdown on all ranks, by a failure, or without the other ranks.

However an engine ends, each operation that is in flight fails with an error that names the cause, and the other ranks
receive that cause. Called by the controller, in the thread that drives; `abandon` and `break_off` by any thread.
"""

import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import DeadlockError, EngineError, RanksLostError, ShutdownError, StallError
from ..core.interfaces import ControlPlane, RankLeftError
from ..core.interruption import Interruption
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from ..negotiation.messages import OBSERVER, Announcement, Decision, EndReason
from .executor import Executor
from .queue import TensorQueue

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
