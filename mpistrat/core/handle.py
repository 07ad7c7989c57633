"""Handle, the pending result of a collective, and Entry, a request with its arrays and its handle."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import forked
from .request import Request

logger = logging.getLogger(__name__)


# Held for a moment when a handle changes; one for all, since few are ever waited for. In that moment a signal, or the
# garbage collector, may bring in code that uses another handle.
_handles_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked process: another thread may have held it, which is not there."""
    global _handles_lock
    _handles_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_Callback = Callable[[list[Any]], None]


_Call = tuple[_Callback, Any]


class Handle:
    """The pending result of a collective: a future with the collective's name. Any thread may use it."""

    __slots__ = ("_arrays", "_callbacks", "_error", "_is_done", "_waiters", "name")

    def __init__(self, name: str):
        self.name = name
        self._is_done = False
        # For each thread that waits a lock that is held until the handle is done: a third of the time of an Event.
        self._waiters: list[threading.Lock] = []
        self._arrays: list[Any] = []
        self._error: Exception | None = None
        self._callbacks: list[_Call] = []

    def done(self) -> bool:
        """Whether the result or an error is there. Never blocks."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Block until the collective is complete and return its numpy arrays, or GpuArrays (see gpu.arrays).

        Raises:
            CollectiveError: What all ranks were told.
            NotInitializedError: In a process that was forked from this rank before the collective was complete.
            TimeoutError: Not complete after `timeout_s`; it goes on, and wait may be called again.
        """
        if not self.await_done(-1 if timeout_s is None else max(timeout_s, 0.0)):
            raise TimeoutError(f"{self.name} is not complete after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._arrays

    def await_done(self, timeout_s: float) -> bool:
        """Block until it is complete, for at most `timeout_s` (-1: for ever). Returns whether it is."""
        if self.done():
            return True
        forked.require_rank()  # Nothing is completed in a forked process.
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

    def when_done(self, callback: _Callback, argument: Any = None) -> None:
        """Call `callback([argument])` on completion, in the engine's thread, or now if it is complete.

        Handles that are completed at the same time, and have the same callback, share a call, with the arguments of
        all of them. It must not block.
        """
        with _handles_lock:
            if not self._is_done:
                self._callbacks.append((callback, argument))
                return
        callback([argument])

    def complete(self, arrays: list[Any]) -> None:
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


def complete_all(results: Iterable[tuple[Handle, list[Any]]]) -> None:
    """Deliver their results to several handles, and only then make the calls that are to be made. Engine only."""
    calls: list[_Call] = []
    for handle, arrays in results:
        handle._arrays = arrays
        calls += handle._finish()
    if calls:
        _call(calls)


def _call(calls: list[_Call]) -> None:
    by_callback: dict[_Callback, list[Any]] = {}
    for callback, argument in calls:
        by_callback.setdefault(callback, []).append(argument)
    for callback, arguments in by_callback.items():
        try:
            callback(arguments)
        except Exception:  # It must not keep other handles from being completed.
            logger.exception("what was to be done on completion failed")


@dataclass
class Entry:
    """A submitted request with this rank's tensors, which stay unchanged until it is complete.

    They are C-contiguous numpy arrays, or GpuInputs when the request's device is a GPU. `is_awaited`: The thread that
    submitted it does nothing else until it is complete.
    """

    request: Request
    arrays: Sequence[Any]
    handle: Handle
    is_awaited: bool = False
