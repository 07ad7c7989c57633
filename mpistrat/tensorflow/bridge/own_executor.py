"""Run eager operations of a thread synchronously, outside of the asynchronous queue that all threads share."""

from functools import cache
from types import TracebackType
from typing import Any

import tensorflow as tf

from ._private import EXECUTOR_NAMES, Executors, executors, without_names


class SynchronousExecution:
    """A context in which this thread runs each of its eager operations before the next statement.

    After tf.config.experimental.set_synchronous_execution(False), eager operations go into the queue of the thread's
    executor, and all threads have the same executor. In that queue, a function that waits for a collective may be ahead
    of the operation that completes the collective or wakes the function.

    TensorFlow's executor_scope does not work here: it wraps the thread's executor in an object that waits for the whole
    queue when it is deleted.

    Where TensorFlow lacks a private function that this needs, it does nothing, and is_asynchronous raises an error.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        self._previous = None
        if executors is None:
            return
        previous = executors.of_thread()
        if executors.is_asynchronous(previous):
            executors.set_for_thread(_synchronous(executors))
            self._previous = previous
        else:
            executors.delete(previous)  # Deletes this reference only.

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if executors is not None and self._previous is not None:
            executors.set_for_thread(self._previous)
            executors.delete(self._previous)


def is_asynchronous() -> bool:
    """Whether this thread's eager operations run in the background.

    tf.config.experimental.get_synchronous_execution would wait for all of them.

    Raises:
        MissingDependencyError: They do, and TensorFlow lacks a private function that SynchronousExecution needs.
    """
    if executors is None:
        if tf.config.experimental.get_synchronous_execution():
            return False
        raise without_names("mpistrat.tensorflow, with asynchronous execution,", EXECUTOR_NAMES,
                            "Leave out tf.config.experimental.set_synchronous_execution(False)")
    here = executors.of_thread()
    try:
        return executors.is_asynchronous(here)
    finally:
        executors.delete(here)


@cache
def _synchronous(executors: Executors) -> Any:
    """A synchronous executor, which has no queue; one for all threads."""
    return executors.create(False, True, 0)
