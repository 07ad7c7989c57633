"""Run eager operations of a thread synchronously, outside of the asynchronous queue that all threads share."""

from functools import cache
from types import TracebackType
from typing import Any

from .private_names import context, pywrap_tfe


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
        self._previous = None
        previous = pywrap_tfe.TFE_ContextGetExecutorForThread(_context())
        if pywrap_tfe.TFE_ExecutorIsAsync(previous):
            pywrap_tfe.TFE_ContextSetExecutorForThread(_context(), _synchronous())
            self._previous = previous
        else:
            pywrap_tfe.TFE_DeleteExecutor(previous)  # Deletes this reference only.

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._previous is not None:
            pywrap_tfe.TFE_ContextSetExecutorForThread(_context(), self._previous)
            pywrap_tfe.TFE_DeleteExecutor(self._previous)


def is_asynchronous() -> bool:
    """Whether this thread's eager operations run in the background.

    tf.config.experimental.get_synchronous_execution would wait for all of them.
    """
    here = pywrap_tfe.TFE_ContextGetExecutorForThread(_context())
    try:
        return bool(pywrap_tfe.TFE_ExecutorIsAsync(here))
    finally:
        pywrap_tfe.TFE_DeleteExecutor(here)


def _context() -> Any:
    """TensorFlow's eager context, as its C functions take it."""
    its = context()
    its.ensure_initialized()
    return its._handle


@cache
def _synchronous() -> Any:
    """A synchronous executor, which has no queue; one for all threads."""
    return pywrap_tfe.TFE_NewExecutor(False, True, 0)
