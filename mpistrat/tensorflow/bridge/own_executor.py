"""Eager operations of threads that must not stand in line with the program's."""

from functools import cache
from typing import Any

from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context


class at_once:  # noqa: N801
    """A context in which eager operations of this thread are executed in it, each before the next statement.

    After tf.config.experimental.set_synchronous_execution(False) an eager operation is put into the queue of its
    thread's executor, which is the same one for all threads. There a function that waits for a collective may be in
    front of the operation that is to complete the collective or to wake the function.

    TensorFlow's executor_scope does not serve: it reads the thread's executor as an object that, when it is deleted,
    waits for all that is in the queue.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        context().ensure_initialized()
        previous = pywrap_tfe.TFE_ContextGetExecutorForThread(context()._handle)
        if pywrap_tfe.TFE_ExecutorIsAsync(previous):
            pywrap_tfe.TFE_ContextSetExecutorForThread(context()._handle, _synchronous())
            self._previous = previous
        else:
            pywrap_tfe.TFE_DeleteExecutor(previous)  # this reference to it
            self._previous = None

    def __exit__(self, *error: Any) -> None:
        if self._previous is not None:
            pywrap_tfe.TFE_ContextSetExecutorForThread(context()._handle, self._previous)
            pywrap_tfe.TFE_DeleteExecutor(self._previous)


def is_asynchronous() -> bool:
    """Whether this thread's eager operations go on in the background.

    tf.config.experimental.get_synchronous_execution would wait for all of them.
    """
    context().ensure_initialized()
    here = pywrap_tfe.TFE_ContextGetExecutorForThread(context()._handle)
    try:
        return pywrap_tfe.TFE_ExecutorIsAsync(here)
    finally:
        pywrap_tfe.TFE_DeleteExecutor(here)


@cache
def _synchronous() -> Any:
    """An executor for all threads; it has no queue."""
    return pywrap_tfe.TFE_NewExecutor(False, True, 0)
