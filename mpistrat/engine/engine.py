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

Tests that need no threads call `Controller.run_cycle` instead.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.handle import Entry, Handle
from ..core.request import Request
from .controller import Controller

logger = logging.getLogger(__name__)

_IDLE_LOOK_S = 0.05  # how often a rank that waits for nothing looks at its messages


class Engine:
    """Reduces, gathers and broadcasts what `submit` is given, on all ranks in the same order.

    Args:
        controller: What is done in each cycle. The engine calls it in one thread at a time.
    """

    def __init__(self, controller: Controller):
        self.controller = controller
        self._queue, self._life, self._clock = controller.queue, controller.life, controller.clock
        self._thread: threading.Thread | None = None
        self._driving = threading.Lock()
        self._attention = threading.Event()

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
        entry = Entry(request, arrays, handle, is_awaited=True)
        drives: list[bool] = []
        try:
            # Taken and noted by one call: Ctrl-C raises between calls, and a lock that is not noted is never released.
            drives.extend(map(self._driving.acquire, [False]))
            if drives[0]:
                is_taken = self._queue.put(entry, is_driver=self.controller.may_propose)
                self._drive(handle, self._clock() + limit_s, entry if is_taken else None)
        finally:
            if drives == [True]:
                self._driving.release()
                if self.controller.has_work or self._life.ended.is_set():
                    self._attention.set()
        if not drives[0]:
            self._queue.put(entry)
            self._call_background()
            handle.await_done(-1 if limit_s == math.inf else limit_s)
        return handle

    def _call_background(self) -> None:
        self._attention.set()
        if self._driving.locked():
            # Whoever drives may be asleep. If it is just about to stop, the background thread is called already.
            self.controller.control.wake()

    def announce_end(self) -> None:
        """Say that this rank submits no more, so that other ranks need not wait for it. Returns at once."""
        self._life.request_end()
        self._call_background()

    def end(self, report: Callable[[float], None] | None = None, report_every_s: float = 60.0) -> None:
        """Say that this rank submits no more, wait until all ranks have said so, and stop the thread.

        The wait has no limit, like that of MPI_Finalize: a rank may evaluate for hours after the others are done.
        `report(waited_s)` is called every `report_every_s`.
        """
        began = self._clock()
        self.announce_end()
        if self._thread is None or self._life.ended.is_set():
            return
        while not self._life.ended.wait(report_every_s):
            if report:
                report(self._clock() - began)
        self._thread.join()

    def abandon(self, reason: str) -> None:
        """Stop without the other ranks, some of which have died. What is pending, and all that comes, fails. Local."""
        self._life.abandon(reason)
        if self._thread is None or self._life.ended.is_set():
            return
        self._call_background()
        self._life.ended.wait()
        self._thread.join()

    def disown(self, error: Exception) -> None:
        """In a forked process, which has no background thread: refuse all submissions with `error`. Local."""
        self._queue.disown(error)

    # -- the thread that drives ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._life.ended.is_set():
            is_called = self._attention.wait(_IDLE_LOOK_S if self.controller.topology.size > 1 else None)
            if not is_called and self._driving.locked():
                continue
            self._attention.clear()
            with self._driving:
                self._drive(None, math.inf)

    # Overflows and NaNs are for the user to look for; under `-W error` numpy's warning would end the engine.
    @np.errstate(all="ignore")
    def _drive(self, handle: Handle | None, deadline: float, proposal: Entry | None = None) -> None:
        """Go on until `handle` is done or the deadline has passed; without a handle, until there is nothing to do.

        First vote for `proposal`, if there is one: the entry of `handle`, which is not in the queue then.
        """
        controller, life = self.controller, self._life
        try:
            if proposal is not None:
                controller.propose(proposal)
                if proposal.handle.done():
                    return
            while not life.ended.is_set():
                busy = controller.run_cycle()
                # Asked for even if nothing happened: another driver may have been quicker with this handle.
                if handle is not None:
                    if handle.done():
                        return
                elif not controller.needs_driver:
                    return  # Without another look: who has waited for this may want to drive what comes next.
                elif busy:
                    continue
                longest_s = deadline - self._clock()
                if longest_s <= 0:
                    return
                controller.wait(longest_s, is_awaited=handle is not None)
        except BaseException as error:  # Whatever it was, nobody may wait for this engine any longer.
            logger.debug("rank %d: the engine failed", controller.topology.rank, exc_info=True)
            life.fail(error)
            if not isinstance(error, Exception):
                raise  # Ctrl-C in a caller that drives.
