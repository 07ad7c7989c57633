"""Running statistics: variables that layers such as BatchNormalization update from each rank's own rows.

Called by what mpistrat adds to fit, and under a strategy; averaging is collective.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ..core.request import Average, ScaledOp
from ..tensorflow.bridge.buckets import reduce_list
from ..tensorflow.gradients import label_of
from ..tensorflow.identity import IdentitySet
from ..tensorflow.lists import number_of
from ._private import non_trainable_variables
from .fit_optimizers import FitOptimizers

# Takes variables and their labels, and returns the ranks' mean of each. Collective.
Mean = Callable[[list[keras.Variable], list[str]], list[tf.Tensor]]


def running_statistics(model: keras.Model) -> list[keras.Variable]:
    """The running statistics of all layers, those of a frozen layer included."""
    return [variable for variable in IdentitySet(non_trainable_variables(model))
            if keras.backend.is_float_dtype(variable.dtype)]


def average(variables: list[keras.Variable], mean: Mean) -> None:
    """Set variables on all ranks to their mean. Collective."""
    for variable, value in zip(variables, mean(variables, [label_of(v) for v in variables]), strict=True):
        variable.assign(value)


class AverageStatistics(keras.callbacks.Callback):
    """Averages the running statistics over the ranks when an epoch ends. Collective; fit adds it.

    It comes before callbacks that save the model. Validation in fit comes before it, with each rank's own statistics.

    Args:
        optimizers: Those of the model. Their local variables stay as they are.
    """

    def __init__(self, optimizers: FitOptimizers):
        super().__init__()
        self._name, self._optimizers = f"{optimizers.name}/statistics", optimizers

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.average()

    def average(self) -> None:
        """Average the running statistics of the model. Collective."""
        average(self._optimizers.shared(running_statistics(self.model)), self._mean)

    def _mean(self, variables: list[keras.Variable], labels: list[str]) -> list[tf.Tensor]:
        return reduce_list([tf.convert_to_tensor(v) for v in variables], self._name, ScaledOp(Average), labels=labels,
                           process_set=number_of(self._optimizers.process_set, self._name))
