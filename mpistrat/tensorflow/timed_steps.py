"""Counts averagings of gradients as steps for `mpistrat run --efficiency`, outside of fit: process/step_timer.py.

The optimizers, the tape and the strategy call it where they average gradients, with one rank too.
"""

import functools

import tensorflow as tf

from ..api.waits import waits_between
from ..core.errors import InvalidRequestError
from ..process import step_timer
from ..process.step_timer import StepTimer
from .bridge.private_names import AtomicFunction
from .bridge.program_order import session_graph
from .xla.context import is_compiled


def count_step(is_global: bool) -> None:
    """Count a step now, or in a graph each time the graph runs. Does nothing without `--efficiency` or in fit. Local.

    Args:
        is_global: Whether the script's batches are those of all ranks together.

    Raises:
        InvalidRequestError: In the graph of a session, or in a function that XLA compiles.
    """
    timer = step_timer.current()
    if timer is None or timer.is_in_fit:
        return
    if tf.executing_eagerly():
        timer.end_step(1, None, is_global, waits_between)
        timer.end_script()
        return
    if session_graph() is not None:
        raise InvalidRequestError("mpistrat run --efficiency cannot count steps in the graph of a session. Leave out "
                                  "--efficiency, or put the step into a tf.function.")
    if is_compiled():
        raise InvalidRequestError("mpistrat run --efficiency cannot count steps in a function that XLA compiles. Leave "
                                  "out jit_compile=True while you measure, or train with fit.")
    _end_after_calls(timer)
    tf.numpy_function(lambda: timer.end_step(1, None, is_global, waits_between), [], [])


@functools.cache
def _end_after_calls(timer: StepTimer) -> None:
    """End the script after a call of a graph from Python. A node cannot: TensorFlow would replace its exception.

    Every call of a graph goes through AtomicFunction.call_flat, see bridge/calls.py.
    """
    call = AtomicFunction.call_flat

    @functools.wraps(call)
    def call_flat(function: AtomicFunction, *args: tf.Tensor) -> object:
        result = call(function, *args)
        if tf.executing_eagerly():
            timer.end_script()
        return result

    AtomicFunction.call_flat = call_flat
