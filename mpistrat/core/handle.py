"""Handle, the pending result of a collective, and Entry, a request with its arrays and its handle.

The engine completes handles in the thread that drives it. Any thread may wait for them.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import forked
from .protocols import Array
from .request import Request

logger = logging.getLogger(__name__)

# Held briefly while a handle changes. One lock serves all handles, since few threads wait. It is reentrant, because a
# signal handler or the garbage collector may run code that uses another handle meanwhile.
_handles_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked process: a thread that does not exist there may have held it."""
    global _handles_lock
    _handles_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_A = TypeVar("_A", bound=Array)
_Callback = Callable[[list[Any]], None]
_Call = tuple[_Callback, object]


class Handle:
    """The pending result of a collective: a future with the collective's name. Any thread may use it."""

    __slots__ = ("_arrays", "_callbacks", "_error", "_is_done", "_waiters", "name")

    def __init__(self, name: str):
        self.name = name
        self._is_done = False
        # One lock per waiting thread, held until the handle is done. Takes a third of the time of a threading.Event.
        self._waiters: list[threading.Lock] = []
        self._arrays: list[Any] = []
        self._error: Exception | None = None
        self._callbacks: list[_Call] = []

    def done(self) -> bool:
        """Whether the collective has a result or an error. Never blocks."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Block until the collective is complete and return its numpy arrays, or GpuArrays (see gpu.arrays).

        Raises:
            CollectiveError: The collective failed, on all ranks.
            NotInitializedError: In a process that was forked from this rank before the collective was complete.
            TimeoutError: Not complete after `timeout_s`. The collective goes on, and `wait` may be called again.
        """
        if not self.await_done(-1 if timeout_s is None else max(timeout_s, 0.0)):
            raise TimeoutError(f"{self.name} is not complete after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._arrays

    def await_done(self, timeout_s: float) -> bool:
        """Block until the collective is complete, for at most `timeout_s` (-1: no limit). Returns whether it is."""
        if self.done():
            return True
        forked.require_rank()  # No handle is ever completed in a forked process.
        waiter = threading.Lock()
        waiter.acquire()
        with _handles_lock:
            if self.done():
                return True
            self._waiters.append(waiter)
        if not waiter.acquire(timeout=timeout_s):
            with _handles_lock:
                self._waiters.remove(waiter)
        return self.done()

    def when_done(self, callback: _Callback, argument: object = None) -> None:
        """Call `callback([argument])` on completion in the engine's thread, or at once if the handle is complete.

        Handles that are completed together and have the same callback share one call, with the arguments of all of
        them. The callback must not block.
        """
        with _handles_lock:
            if not self._is_done:
                self._callbacks.append((callback, argument))
                return
        callback([argument])

    def complete(self, arrays: list[_A]) -> None:
        """Deliver the result. Engine only."""
        self._arrays = arrays
        _call(self._finish())

    def fail(self, error: Exception) -> None:
        """Deliver an error. Engine only."""
        self._error = error
        _call(self._finish())

    def _finish(self) -> list[_Call]:
        with _handles_lock:
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for waiter in tuple(self._waiters):
            waiter.release()
        return callbacks


def complete_all(results: Iterable[tuple[Handle, list[_A]]]) -> None:
    """Deliver results to several handles, and call their callbacks afterwards. Engine only."""
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
            logger.exception("what was to be done on completion failed")


@dataclass(frozen=True, eq=False)
class Origin:
    """The node of a graph that submits requests of one name.

    Attributes:
        place: Returns where the user's code makes the node. It takes milliseconds.
        is_in_order: Whether the nodes of this name run in the order of the program, the same on all ranks.
    """

    place: Callable[[], str]
    is_in_order: bool


@dataclass
class Entry:
    """A submitted request with this rank's tensors, which stay unchanged until it is complete.

    Attributes:
        arrays: C-contiguous numpy arrays, or GpuInputs if the request's device is a GPU.
        is_awaited: Whether the submitting thread blocks until the request is complete.
        origin: The node that has submitted it; None: no graph has.
    """

    request: Request
    arrays: Sequence[Array]
    handle: Handle
    is_awaited: bool = False
    origin: Origin | None = None
