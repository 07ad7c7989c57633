"""Numbers of executions: they give the collectives of each execution of a gradient their own names.

If a function is called several times, its gradient is too, and the collectives in all calls have the same names.
TensorFlow runs the calls of the function in program order, but those of the gradient in any order. So a collective in a
graph that has a gradient returns the number of its execution. The number is the same on all ranks, because they run the
executions in the same order. The names of the gradient's collectives end with the number, which is never reused: any
number of executions of a gradient may be in flight, and the ranks may start them in different orders.
"""

from contextvars import ContextVar
from dataclasses import dataclass

import tensorflow as tf


@dataclass
class Execution:
    """The execution that the collectives being traced belong to."""

    # Its number, a tensor of this graph or of the graph that this is the gradient of. None until the first collective
    # has created it.
    number: tf.Tensor | None = None
    is_past: bool = False  # Whether the collectives are the gradient of the execution with this number.


# The execution of the collectives that are being traced; None if its number is not needed. The first of them creates
# the number if there is none.
current: ContextVar[Execution | None] = ContextVar("mpistrat_execution", default=None)
