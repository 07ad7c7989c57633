"""Handle, the pending result of a collective, and Entry, a request with its arrays and its handle.

The thread that runs the engine completes handles. Any thread may wait for a handle.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from . import forked, signal_handlers
from .errors import InvalidRequestError
from .request import Array, Request

logger = logging.getLogger(__name__)

_NBYTES = attrgetter("nbytes")

_SIGNALS_S = 0.5  # The longest time that a signal waits for its handler.

drivers: set[int] = set()  # The ids of the threads that currently run a cycle of an engine.


def require_no_driver(operation: str) -> None:
    """Raise InvalidRequestError if this thread is inside a cycle of an engine. `operation`: The call, for the error.

    The caller is then a signal handler or finalizer that has interrupted the cycle, and would wait for it for ever.
    """
    if threading.get_ident() in drivers:
        raise InvalidRequestError(
            f"{operation}: called by a signal handler or a finalizer (__del__) that has interrupted a collective of "
            "this thread. The call would wait for this collective for ever. Only set a flag there, and call "
            f"{operation} in the training loop when the flag is set. Or install the signal handler before the training "
            "begins: then the handler may call collectives.")


_Callback = Callable[[list[Any]], None]
_Call = tuple[_Callback, object]


class Handle:
    """The pending result of a collective: a future with the collective's name. Any thread may use it.

    A lock in a handle could cause a deadlock: a signal handler interrupts the thread that holds the lock, and waits for
    the engine, which waits for the lock. So handles use atomic list operations. A waiting thread adds its waiter or
    callback before it reads `is_done`. The engine sets `is_done` before it reads the waiters and callbacks.
    """

    __slots__ = ("_arrays", "_callbacks", "_error", "_waiters", "is_done", "name")

    def __init__(self, name: str):
        self.name = name
        self.is_done = False  # Whether the collective has a result or an error.
        # A lock per waiting thread, held until the handle is done. It takes a third of the time of threading.Event.
        self._waiters: list[threading.Lock] = []
        self._arrays: list[Any] = []
        self._error: Exception | None = None
        self._callbacks: list[_Call] = []

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Block until the collective is complete and return its numpy arrays, or GpuArrays (see gpu.arrays).

        Raises:
            CollectiveError: The collective failed, on all ranks.
            InvalidRequestError: The collective is not complete, and the caller has interrupted a cycle of the engine.
            NotInitializedError: The process was forked from this rank before the collective was complete.
            TimeoutError: The collective is not complete after `timeout_s`. The collective continues; call `wait` again.
        """
        if not self.is_done and not self.await_done(-1 if timeout_s is None else max(timeout_s, 0.0)):
            raise TimeoutError(f"{self.name} is not complete after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._arrays

    def await_done(self, timeout_s: float) -> bool:
        """Block until completion, for `timeout_s` at most (-1: no limit). Return whether the collective is complete."""
        if self.is_done:
            return True
        forked.require_rank()  # No handle is ever completed in a forked process.
        require_no_driver(self.name)
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        until = math.inf if timeout_s < 0 else time.monotonic() + timeout_s
        while not self.is_done:
            rest_s = until - time.monotonic()
            if rest_s < 0:
                break
            # A signal just before `acquire` does not end `acquire`. The handler runs when `acquire` has returned.
            limit_s = min(rest_s, _SIGNALS_S) if signal_handlers.may_interrupt() else rest_s
            waiter.acquire(timeout=-1 if limit_s == math.inf else limit_s)
        self._waiters.remove(waiter)
        return self.is_done

    def when_done(self, callback: _Callback, argument: object = None) -> None:
        """Call `callback([argument])` in the engine's thread when the collective completes, or now if it has completed.

        If several handles with the same callback complete together, the callback is called once, with a list of all
        their arguments. The callback must not block.
        """
        self._callbacks.append((callback, argument))
        if self.is_done:
            _call(self._take_callbacks())

    def complete(self, arrays: list[Any]) -> None:
        """Deliver the result. Only the engine calls this."""
        self._arrays = arrays
        calls = self._finish()
        if calls:
            _call(calls)

    def fail(self, error: Exception) -> None:
        """Deliver an error. Only the engine calls this."""
        self._error = error
        _call(self._finish())

    def _finish(self) -> list[_Call]:
        self.is_done = True
        for waiter in tuple(self._waiters):
            waiter.release()
        return self._take_callbacks() if self._callbacks else []

    def _take_callbacks(self) -> list[_Call]:
        """Remove and return the callbacks that no other thread has taken."""
        taken: list[_Call] = []
        with suppress(IndexError):
            while self._callbacks:
                taken.append(self._callbacks.pop(0))
        return taken


def complete_all(results: Iterable[tuple[Handle, list[Any]]]) -> None:
    """Deliver results to several handles, and call their callbacks afterwards. Only the engine calls this."""
    calls: list[_Call] = []
    for handle, arrays in results:
        handle._arrays = arrays
        calls += handle._finish()
    if calls:
        _call(calls)


def _call(calls: list[_Call]) -> None:
    by_callback: dict[_Callback, list[object]] = {}
    for callback, argument in calls:
        by_callback.setdefault(callback, []).append(argument)
    for callback, arguments in by_callback.items():
        try:
            callback(arguments)
        except Exception:  # Other handles must be completed all the same.
            logger.exception("a callback that runs when a collective is complete has failed")


@dataclass(frozen=True, eq=False)
class Origin:
    """A node of a TensorFlow graph. All requests that it submits have the same name."""

    place: Callable[[], str]  # Returns the place in user code where the node is made. A call takes milliseconds.
    is_in_order: bool  # Whether the nodes with this name run in program order, the same on all ranks.


@dataclass
class Entry:
    """A submitted request with this rank's tensors, which must not change until the request is complete."""

    request: Request
    arrays: Sequence[Array]  # C-contiguous numpy arrays, or GpuTensors if the request's device is a GPU.
    handle: Handle
    is_awaited: bool = False  # Whether the submitting thread blocks until the request is complete.
    origin: Origin | None = None  # The graph node that has submitted the request; None: no graph has.
    submitted: int = 0  # When this rank submitted the request, as time.monotonic_ns(); 0: never, the rank is in join().
    agreed: int = 0  # The time when this rank learned that all ranks had submitted the request.
    number: int = 0  # The index in the execution order of the process set, the same on all its ranks.

    @property
    def nbytes(self) -> int:
        arrays = self.arrays
        whole: int | None = getattr(arrays, "nbytes", None)  # GpuTensors know their total.
        if whole is not None:
            return whole
        return arrays[0].nbytes if len(arrays) == 1 else sum(map(_NBYTES, arrays))
