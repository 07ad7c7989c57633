"""Keras' optimizers under MPIStrategy: gradients of uneven batches, clipping, loss scaling, and central slots.

Keras sums the gradients over the ranks and expects each rank to have the same number of rows. Where a global batch does
not divide evenly (the last one, or fewer rows than ranks) that is not the gradient of the global batch. So each rank's
gradients are weighted by its number of rows. The numbers are reduced together with the gradients, and when all ranks
have the usual number nothing is multiplied. Gradients that are accumulated are weighted in each step, after a
collective of its own.

With variables="central" the slots (momenta, averages) are on the chief only. Gradients are reduced as in the mirrored
mode, on all ranks and in the same order. Methods that read or write slots run on the chief only, which then broadcasts
the updated variables.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...api import ops as array_ops
from ...api import runtime
from ...core.errors import MismatchError
from ...core.request import Max
from ...keras._private import trained_by
from ...keras.fit.rates import rates_of, require_equal_rates
from ...keras.fit.training import StrategyTraining
from ...keras.nested_optimizers import parts_of
from ...keras.optimizer import agreements_on_finite
from ...keras.optimizer_state import OptimizerState
from ...keras.patches import Function
from ...keras.patches import replaces_for_strategy as replaces
from ...tensorflow.accumulators import is_accumulator
from ...tensorflow.consistency import FirstSteps
from ...tensorflow.equal_weights import require_equal_weights
from ...tensorflow.gradients import label_of
from ...tensorflow.names import OptimizerName, eager
from ...tensorflow.overwritten import places_of, with_largest
from ...tensorflow.types import OptionalGradient, Tensor
from .. import collectives
from ..central import Slots
from ..mpi_strategy import MPIStrategy
from . import step_state

GradientsAndVariables = list[tuple[OptionalGradient, tf.Variable]]

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


# -- optimizers that were made outside of the scope -------------------------------------------------------------------


def _belongs_to(optimizer: Optimizer, strategy: MPIStrategy) -> None:
    """Let an optimizer work with the strategy of the variables that it trains.

    Keras passes the strategy in whose scope an optimizer was made to the functions that update variables. TensorFlow's
    MirroredStrategy ignores that, and passes itself.
    """
    if not isinstance(optimizer._distribution_strategy, MPIStrategy):
        optimizer._distribution_strategy = strategy


@replaces(Optimizer, "add_variable_from_reference", "an optimizer made outside of the scope could not make its slots",
          "self._distribution_strategy.extended.colocate_vars_with(")
def add_variable_from_reference(original: Function, self: Optimizer, reference_variable: keras.Variable | tf.Variable,
                                *args: object, **kwargs: object) -> keras.Variable:
    variable = getattr(reference_variable, "value", reference_variable)
    strategy = getattr(variable, "distribute_strategy", None)
    if not isinstance(strategy, MPIStrategy):
        return original(self, reference_variable, *args, **kwargs)
    _belongs_to(self, strategy)
    with step_state.scope_of(strategy):
        return original(self, reference_variable, *args, **kwargs)


# -- gradients --------------------------------------------------------------------------------------------------------


@replaces(Optimizer, "_all_reduce_sum_gradients",
          "uneven batches would not have the gradient of the global batch, and errors would lack variable names",
          "tf.distribute.ReduceOp.SUM, grads")
def all_reduce_sum_gradients(original: Function, self: Optimizer,
                             grads_and_vars: GradientsAndVariables) -> GradientsAndVariables:
    strategy = step_state.strategy_here()
    if strategy is None:
        return original(self, grads_and_vars)
    pairs = list(grads_and_vars)
    strategy.extended.assigned_in_lockstep(self._iterations.value)
    present = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    own = state_of(self)
    if [id(pairs[i][0]) for i in present] != [id(gradient) for gradient in own.clipped]:
        reduced = reduce_gradients(self, [pairs[i][0] for i in present], [label_of(pairs[i][1]) for i in present])
        for i, gradient in zip(present, reduced, strict=True):
            pairs[i] = (gradient, pairs[i][1])
    own.clipped = []
    return pairs


@replaces(Optimizer, "_clip_gradients", "each rank would clip its own gradients, and not their average",
          "clip_by_global_norm(grads")
def clip_gradients(original: Function, self: Optimizer, grads: list[Tensor]) -> list[Tensor]:
    clips = any(getattr(self, name) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
    if not clips or step_state.strategy_here() is None:
        return original(self, grads)
    grads = list(grads)
    own = state_of(self)
    own.clipped = list(original(self, reduce_gradients(self, grads, [f"gradient {i}" for i in range(len(grads))])))
    return own.clipped


def _agree_on_finite(_: LossScaleOptimizer, finite: tf.Tensor) -> tf.Tensor:
    """Whether the gradients of all ranks are finite, in a replica of MPIStrategy; else `finite`."""
    if step_state.strategy_here() is None:
        return finite
    if step_state.state.rows is not None:
        finite = tf.logical_or(finite, step_state.state.rows == 0)  # Gradients without rows do not count.
    return collectives.all_true(finite, "finite")


agreements_on_finite.append(_agree_on_finite)


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


def _largest(values: list[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
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
    results = tf.cond(is_one, lambda: list(map(tf.identity, values)), lambda: [_scaled(v, factor) for v in values])
    return [tf.IndexedSlices(result, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else result
            for g, result in zip(gradients, results, strict=True)]


def _scaled(gradient: Tensor, factor: tf.Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
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


# -- central slots ----------------------------------------------------------------------------------------------------


def slots_of(optimizer: Optimizer) -> Slots | None:
    """The slots of an optimizer, or None if they are not central."""
    strategy = optimizer._distribution_strategy
    return strategy.extended.slots if isinstance(strategy, MPIStrategy) and strategy.extended.slots.are_central \
        else None


@replaces(Optimizer, "add_variable", "central slots would be on every rank", "variable = backend.Variable(")
def add_variable(original: Function, self: Optimizer, *args: object, **kwargs: object) -> keras.Variable:
    slots = slots_of(self)
    # Every rank scales its own loss and accumulates its own gradients.
    if slots is None or isinstance(self, LossScaleOptimizer) \
            or is_accumulator(str(kwargs.get("name"))):
        return original(self, *args, **kwargs)
    with slots.created():
        return original(self, *args, **kwargs)


@replaces(Optimizer, "_distributed_tf_update_step", "ranks would update with slots that they do not have",
          "self.update_step(grad, var, learning_rate)")
@replaces(Optimizer, "_update_model_variables_moving_average", "likewise", "average.assign(")
@replaces(Optimizer, "save_own_variables",
          "a file of another rank would have slots without elements, and could not be loaded", "variable.numpy()")
def only_where_slots_are(original: Function, self: Optimizer, *args: object, **kwargs: object) -> Any:
    slots = slots_of(self)
    return original(self, *args, **kwargs) if slots is None or slots.are_here else None


@replaces(Optimizer, "_overwrite_model_variables_with_average_value",
          "likewise; and only the chief's model would end with the averages", "self._model_variables_moving_average")
def overwrite(original: Function, self: Optimizer, trainable_variables: Iterable[keras.Variable]) -> None:
    variables, slots = list(trainable_variables), slots_of(self)
    only_where_slots_are(original, self, variables)
    if slots is not None and tf.distribute.in_cross_replica_context():  # at the end of training; in a step `apply` does
        slots.share(variables)


@replaces(Optimizer, "apply", "only the chief would have the new values",
          "self._backend_apply_gradients(grads, trainable_variables)")
def apply(original: Function, self: Optimizer, grads: Iterable[OptionalGradient],
          trainable_variables: Iterable[keras.Variable] | None = None) -> tf.Tensor | None:
    grads = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    strategy = step_state.strategy_here()
    if strategy is not None:
        _belongs_to(self, strategy)
        trained = trained_by(self) if variables is None else variables
        compare_in_loop(self, trained)
        overwritten = places_of(trained)
        # The sum of several steps' gradients has no single number of rows.
        if self.gradient_accumulation_steps and step_state.state.weight is not None:
            factor = step_state.share()
            grads = [gradient if gradient is None or i in overwritten else _scaled(gradient, factor)
                     for i, gradient in enumerate(grads)]
        if overwritten and len(grads) == len(trained):  # Otherwise Keras says what is wrong.
            grads = with_largest(grads, trained, overwritten, _largest)
    result = original(self, grads, variables)
    slots = slots_of(self)
    if slots is None or not grads:
        return result
    if self.ema_overwrite_frequency:  # Every so many steps it overwrites all variables.
        slots.share(trained_by(self))
        return result
    variables = trained_by(self) if variables is None else variables
    updated = [v for v, gradient in zip(variables, grads, strict=True) if gradient is not None]
    if not self.gradient_accumulation_steps:
        slots.share(updated)
        return result

    def share() -> tf.Tensor:
        slots.share(updated)
        return tf.constant(0)

    complete = self._iterations % self.gradient_accumulation_steps == 0
    tf.cond(complete, share, lambda: tf.constant(0))
    return result
