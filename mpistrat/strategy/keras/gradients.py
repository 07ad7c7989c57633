"""The gradients of the global batch, under MPIStrategy: weighted by rows.

Keras sums the gradients over the ranks and expects each rank to have the same number of rows. Where a global batch does
not divide evenly (the last one, or fewer rows than ranks) that is not the gradient of the global batch. So each rank's
gradients are weighted by its number of rows. The numbers are reduced together with the gradients, and when all ranks
have the usual number nothing is multiplied. Gradients that are accumulated are weighted in each step, after a
collective of its own.

The functions run in a replica, in TensorFlow's thread.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...api import ops as array_ops
from ...api import runtime
from ...core.errors import MismatchError
from ...core.request import Max
from ...keras.fit.rates import rates_of, require_equal_rates
from ...keras.fit.training import StrategyTraining
from ...keras.nested_optimizers import parts_of
from ...keras.optimizer_state import OptimizerState
from ...tensorflow.consistency import FirstSteps
from ...tensorflow.equal_weights import require_equal_weights
from ...tensorflow.gradients import label_of
from ...tensorflow.names import OptimizerName, eager
from ...tensorflow.types import Tensor
from .. import collectives
from . import step_state

_HALVES = (tf.float16, tf.bfloat16)
OWN_ROWS = ("dataset.shard(context.num_input_pipelines, context.input_pipeline_id) in the function of "
            "distribute_datasets_from_function; other datasets are sharded, so their rows are equal")


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer. The first call gives it its name, on all ranks in the same order."""
    if "_mpistrat" not in vars(optimizer):
        checks = FirstSteps(OptimizerName(0)(), way_out=OWN_ROWS)
        # By plain assignment Keras would track it.
        object.__setattr__(optimizer, "_mpistrat", OptimizerState(type(optimizer).__name__, strategys_checks=checks))
    state: OptimizerState = optimizer._mpistrat
    return state


def reduce_gradients(optimizer: Optimizer, gradients: list[Tensor], labels: list[str]) -> list[Tensor]:
    """Return the gradients of the global batch. Collective, in a replica of MPIStrategy.

    `gradients` has no None; `labels` are users' names of the variables, for error messages.
    """
    if not gradients:
        return []
    strategy, checks = tf.distribute.get_strategy(), state_of(optimizer).strategys_checks
    weight = step_state.state.weight
    if weight is None or optimizer.gradient_accumulation_steps:  # Accumulated gradients have been weighted.
        return strategy.extended.reduce_gradients(gradients, labels, checks, {})
    weighted = scaled_unless(weight == 1, gradients, weight)
    *summed, total = strategy.extended.reduce_gradients(weighted, labels, checks, {"rows": weight})
    step_state.state.total = total
    size = tf.cast(strategy.num_replicas_in_sync, tf.float32)
    return scaled_unless(total == size, summed, size / total)


def largest(values: list[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The maxima over the ranks of the values that overwrite variables. Collective."""
    return collectives.all_reduce(list(map(counted, values)), Max, "overwritten", list(map(label_of, variables)))


def counted(value: tf.Tensor) -> tf.Tensor:
    """A value of which the ranks take the largest; that of a rank without rows may be anything, also NaN."""
    rows = step_state.state.rows
    return value if rows is None else tf.where(rows == 0, value.dtype.min, value)


def scaled_unless(is_one: tf.Tensor, gradients: Sequence[Tensor], factor: tf.Tensor) -> list[Tensor]:
    """The gradients times a factor, or as they are if it is one. A multiplication takes longer than the branch."""
    # Only the values go through the branch. A shape that came out of it would not be known to XLA.
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    results = tf.cond(is_one, lambda: list(map(tf.identity, values)), lambda: [scaled(v, factor) for v in values])
    return [tf.IndexedSlices(result, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else result
            for g, result in zip(gradients, results, strict=True)]


def scaled(gradient: Tensor, factor: tf.Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.cast(gradient, tf.float32) if gradient.dtype in _HALVES else gradient
    # The gradient of a rank without rows may be anything, also NaN, and must not spoil the sum.
    return tf.cast(tf.math.multiply_no_nan(wide, tf.cast(factor, wide.dtype)), gradient.dtype)


def compare_in_loop(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Raise MismatchError unless all ranks begin a loop of the user's with the same weights. Collective; once."""
    if step_state.state.rows is not None or state_of(optimizer).is_compared:
        return
    state_of(optimizer).is_compared = True
    if not runtime.current().settings.is_checked or runtime.current().topology.size == 1:
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        place, rates = f"in the first step of {optimizer.name}", rates_of(parts_of(optimizer))

        def compare_rates() -> None:
            require_equal_rates(array_ops.allgather_object(rates, eager("strategy/rates")), place)

        try:
            require_equal_weights(variables, eager("strategy/weights"), place, causes=StrategyTraining.causes,
                                  rates=(repr(rates).encode(), compare_rates))
        except MismatchError as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph would raise a StagingError instead.
            raise
