"""Eager operations of threads that must not stand in line with the program's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context


@contextmanager
def at_once() -> Iterator[None]:
    """Let eager operations of this thread be executed on the CPU, in this thread and before the next statement.

    After tf.config.experimental.set_synchronous_execution(False) an eager operation is put into the queue of its
    thread's executor, which is the same one for all threads. There a function that waits for a collective may be in
    front of the operation that is to complete the collective or to wake the function.

    TensorFlow's executor_scope does not serve: it reads the thread's executor as an object that, when it is deleted,
    waits for all that is in the queue.
    """
    own = _executor()
    here = context()._handle
    previous = pywrap_tfe.TFE_ContextGetExecutorForThread(here)
    pywrap_tfe.TFE_ContextSetExecutorForThread(here, own)
    try:
        yield
    finally:
        pywrap_tfe.TFE_ContextSetExecutorForThread(here, previous)
        pywrap_tfe.TFE_DeleteExecutor(previous)  # this reference to it


@cache
def _executor() -> Any:
    """One for all threads: a synchronous executor has no queue."""
    context().ensure_initialized()
    return pywrap_tfe.TFE_NewExecutor(False, True, 0)
