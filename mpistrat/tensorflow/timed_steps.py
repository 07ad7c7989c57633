"""Counts the averagings of gradients for `mpistrat run --efficiency`, where no fit counts steps: process/step_timer.py.

Called where the optimizers, the tape and the strategy average gradients, with one rank too.
"""

import functools

import tensorflow as tf

from ..api.waits import waits_between
from ..core.errors import InvalidRequestError
from ..process import step_timer
from ..process.step_timer import StepTimer
from .bridge.private_names import AtomicFunction
from .bridge.session_graph import session_graph
from .xla.context import is_compiled


def count_step(is_global: bool) -> None:
    """Count a step: now, or in a graph each time that it runs there. Does nothing outside of `--efficiency`. Local.

    Args:
        is_global: Whether the script's batches are those of all ranks together.

    Raises:
        InvalidRequestError: While a function is traced that XLA compiles, or in the graph of a session.
    """
    timer = step_timer.current()
    if timer is None or timer.is_in_fit:
        return
    if tf.executing_eagerly():
        timer.end_step(1, None, is_global, waits_between)
        timer.end_script()
        return
    if session_graph() is not None:
        raise InvalidRequestError("mpistrat run --efficiency cannot count the steps of a session. Measure without it, "
                                  "or put the step into a tf.function.")
    if is_compiled():
        raise InvalidRequestError("mpistrat run --efficiency cannot count the steps of a loop that XLA compiles. Leave "
                                  "out jit_compile=True while you measure, or train with fit.")
    _end_after_calls(timer)
    tf.numpy_function(lambda: timer.end_step(1, None, is_global, waits_between), [], [])


@functools.cache
def _end_after_calls(timer: StepTimer) -> None:
    """End the script when a call of a graph from Python returns: the exception of a node is an error of TensorFlow.

    Every call goes through this method, see bridge/calls.py.
    """
    call = AtomicFunction.call_flat

    @functools.wraps(call)
    def call_flat(function: AtomicFunction, *args: tf.Tensor) -> object:
        result = call(function, *args)
        if tf.executing_eagerly():
            timer.end_script()
        return result

    AtomicFunction.call_flat = call_flat
