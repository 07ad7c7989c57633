"""Momentum correction, for callbacks that change the learning rate within training. Local.

Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1: an optimizer whose velocity v = m v - rate g includes
the learning rate multiplies the momentum m by new / old rate in the step of the change. The momentum of a Keras
optimizer is a number, hence a constant of the compiled step. So v is multiplied instead, once, which is the same step.
"""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from .optimizer_parts import parts_of


class MomentumCorrection:
    """Scales the velocities of an optimizer, in one graph.

    Args:
        optimizer: Without momentum nothing is changed. Its velocities are variables whose names end in "momentum".
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._scale: Callable[[tf.Tensor], None] | None = None

    def rate_changed(self, ratio: float) -> None:
        """Correct for a learning rate that is `ratio` times the one before."""
        if ratio == 1.0:
            return
        if self._scale is None:
            velocities = velocities_of(self._optimizer)
            if not velocities:
                return  # It has none, or they are created in the first step, as zeros.
            self._scale = _scaler(velocities)
        self._scale(tf.constant(ratio, tf.float64))


def velocities_of(optimizer: Optimizer) -> list[keras.Variable]:
    """The variables in which SGD and RMSprop accumulate their steps, if they have a momentum."""
    return [variable for part in parts_of(optimizer) if getattr(part, "momentum", 0.0)
            for variable in part.variables if variable.name.endswith("momentum")]


def _scaler(variables: list[keras.Variable]) -> Callable[[tf.Tensor], None]:
    @tf.function(autograph=False)
    def scale(ratio: tf.Tensor) -> None:
        for variable in variables:
            value = tf.convert_to_tensor(variable)
            if value.shape.num_elements() != 0:  # Under MPIStrategy(variables="central") rank 0 alone has it.
                variable.assign(value * tf.cast(ratio, value.dtype))

    return scale
