"""Run eager operations of a thread synchronously, outside of the asynchronous queue that all threads share."""

from functools import cache
from types import TracebackType
from typing import Any

from .._private import (
    TFE_ContextGetExecutorForThread,
    TFE_ContextSetExecutorForThread,
    TFE_DeleteExecutor,
    TFE_ExecutorIsAsync,
    TFE_NewExecutor,
    context,
)


class SynchronousExecution:
    """A context in which this thread runs each of its eager operations before the next statement.

    After tf.config.experimental.set_synchronous_execution(False), eager operations go into the queue of the thread's
    executor, and all threads have the same executor. In that queue, a function that waits for a collective may be ahead
    of the operation that completes the collective or wakes the function.

    TensorFlow's executor_scope does not work here: it wraps the thread's executor in an object that waits for the whole
    queue when it is deleted.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        context().ensure_initialized()
        previous = TFE_ContextGetExecutorForThread(context()._handle)
        if TFE_ExecutorIsAsync(previous):
            TFE_ContextSetExecutorForThread(context()._handle, _synchronous())
            self._previous = previous
        else:
            TFE_DeleteExecutor(previous)  # Deletes this reference only.
            self._previous = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._previous is not None:
            TFE_ContextSetExecutorForThread(context()._handle, self._previous)
            TFE_DeleteExecutor(self._previous)


def is_asynchronous() -> bool:
    """Whether this thread's eager operations run in the background.

    tf.config.experimental.get_synchronous_execution would wait for all of them.
    """
    context().ensure_initialized()
    here = TFE_ContextGetExecutorForThread(context()._handle)
    try:
        return TFE_ExecutorIsAsync(here)
    finally:
        TFE_DeleteExecutor(here)


@cache
def _synchronous() -> Any:
    """A synchronous executor, which has no queue; one for all threads."""
    return TFE_NewExecutor(False, True, 0)
