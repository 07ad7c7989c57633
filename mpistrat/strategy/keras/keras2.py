"""The logs of user-defined steps of Keras 2 (tf_keras) under MPIStrategy. Imported only if Keras 2 is in use."""

import tensorflow as tf
import tf_keras
from tf_keras.src.engine import compile_utils, training
from tf_keras.src.utils import tf_utils

from ...core.request import Average, Sum
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...tensorflow.bridge.types import Structure
from .. import collectives
from ..mpi_strategy import MPIStrategy
from .losses import mark_scaled, unscaled
from .step_state import strategy_here


@replaces(compile_utils.LossesContainer, "__call__",
          "a loss that a step returns would be logged divided by the number of ranks",
          "losses_utils.scale_loss_for_distribution(")
def compiled_loss(original: Function, self: compile_utils.LossesContainer, *args: object,
                  **kwargs: object) -> tf.Tensor:
    loss = original(self, *args, **kwargs)
    return mark_scaled(loss) if strategy_here() is not None else loss


@replaces(training, "reduce_per_replica", "what a step returns, such as a share, would be summed over the ranks",
          'reduction = "first" if backend.is_tpu_strategy(strategy) else "sum"')
def reduce_per_replica(original: Function, values: Structure, strategy: tf.distribute.Strategy,
                       reduction: str) -> Structure:
    """Return the logs of a step: means over the ranks, but sums of integer logs, because integers are counts."""
    if not isinstance(strategy, MPIStrategy) or strategy.num_replicas_in_sync == 1 or reduction != "auto":
        return original(values, strategy, reduction)
    logs = [tf.convert_to_tensor(unscaled(log, "a log of a step")) for log in tf.nest.flatten(values)]
    for op in (Average, Sum):
        places = [i for i, log in enumerate(logs) if log.dtype.is_floating == (op is Average)]
        for i, log in zip(places, collectives.all_reduce([logs[i] for i in places], op, "logs"), strict=True):
            logs[i] = log
    return tf.nest.pack_sequence_as(values, logs)


@replaces(tf_keras.Model, "_validate_and_get_metrics_result",
          "a metric among other logs of a step of the user's would be the mean of those of the ranks", "return logs")
def metrics_or_logs(original: Function, self: tf_keras.Model, logs: object) -> object:
    found = original(self, logs)
    if not isinstance(self.distribute_strategy, MPIStrategy) or found is not logs or not isinstance(logs, dict):
        return found
    metrics = tf_utils.sync_to_numpy_or_python_type(self.get_metrics_result())
    return {name: metrics.get(name, log) for name, log in logs.items()}
