"""The gradients of the global batch under MPIStrategy, weighted by rows.

Keras sums the gradients over the ranks and expects each rank to have the same number of rows. If a global batch does
not divide evenly (the last batch, or fewer rows than ranks), the sum is not the gradient of the global batch. So each
rank's gradients are weighted by its number of rows. The row numbers are reduced together with the gradients, and if all
ranks have the usual number nothing is multiplied.

The functions run in a replica, in TensorFlow's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...api import array_ops, runtime
from ...core.errors import MismatchError
from ...core.request import Sum
from ...keras.bridge.compared import rates_of, require_equal_rates
from ...keras.bridge.private_names import parts_of
from ...keras.bridge.training import StrategyTraining
from ...tensorflow.bridge.names import OptimizerName, eager
from ...tensorflow.bridge.types import OptionalGradient, Tensor, Variable
from ...tensorflow.consistency import FirstSteps
from ...tensorflow.equal_weights import require_equal_weights
from ...tensorflow.gradients import GradientOptions, GradientReducer, reduce_gradients
from ...tensorflow.graph.reduce_spec import ReduceSpec
from ..mpi_strategy import MPIStrategy
from . import step_state

_HALVES = (tf.float16, tf.bfloat16)
_OWN_ROWS = ("iterate over strategy.experimental_distribute_dataset(dataset); in the function of "
             "distribute_datasets_from_function, dataset.shard(context.num_input_pipelines, context.input_pipeline_id)")


class RowReducer(GradientReducer):
    """Sums an optimizer's gradients over the ranks of a strategy, weighted by rows.

    Attributes:
        is_compared: Whether the ranks have compared the weights before the first step of a user-defined loop.
    """

    checks_weights = is_compared = False  # fit or compare_in_loop compares the weights.
    is_global = True

    def __init__(self, strategy: MPIStrategy):
        super().__init__(OptimizerName(0), strategy.extended.gradient_options, Sum)
        self._bucket_bytes = strategy.extended.bucket_bytes()

    @cached_property
    def checks(self) -> FirstSteps:
        return FirstSteps(self.name, way_out=_OWN_ROWS)

    def require_no_strategy(self) -> None:
        """Do nothing: this reducer belongs to a strategy."""

    def reduce(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
               reduce_shared: Callable[..., list[Tensor]] = reduce_gradients) -> list[OptionalGradient]:
        if step_state.state.reducer is not self:  # Outside of a replica, or applied by another optimizer.
            return list(gradients)
        weight = step_state.state.weight

        def weighted(gradients: Sequence[Tensor], spec: ReduceSpec, options: GradientOptions,
                     variables: Sequence[Variable]) -> list[Tensor]:
            spec = replace(spec, bucket_bytes=self._bucket_bytes)
            if weight is None or not gradients:
                return reduce_shared(gradients, spec, options, variables)
            *summed, total = reduce_shared(scaled_unless(weight == 1, gradients, weight), spec, options, variables,
                                           exact={"rows": weight})
            step_state.state.total = total
            size = tf.cast(self.process_set.size(), tf.float32)
            return scaled_unless(total == size, summed, size / total)

        return super().reduce(gradients, variables, weighted)

    def reduce_overwritten(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
                           places: Sequence[int]) -> list[OptionalGradient]:
        if step_state.state.reducer is not self:
            return list(gradients)
        rows = step_state.state.rows  # A rank without rows may have any gradient, also NaN.
        return super().reduce_overwritten(
            [tf.where(rows == 0, g.dtype.min, g) if rows is not None and g is not None and i in places else g
             for i, g in enumerate(gradients)], variables, places)

    def all_true(self, value: tf.Tensor, purpose: str) -> tf.Tensor:
        if step_state.strategy_here() is None:
            return value
        rows = step_state.state.rows  # Gradients without rows do not count.
        return super().all_true(value if rows is None else tf.logical_or(value, rows == 0), purpose)


def scaled_unless(is_one: tf.Tensor, gradients: Sequence[Tensor], factor: tf.Tensor) -> list[Tensor]:
    """Multiply gradients by `factor` unless `is_one`. The branch takes less time than a multiplication."""
    # Only the values go through the branch: XLA would not know a shape that came out of it.
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
    """Raise MismatchError unless all ranks begin a user-defined loop with the same weights. Collective; once."""
    reducer: RowReducer = optimizer._mpistrat.reducer
    if step_state.state.rows is not None or reducer.is_compared:
        return
    reducer.is_compared = True
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
