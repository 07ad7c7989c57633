"""Keras' optimizers under MPIStrategy: reduction, clipping, loss scaling, and central slots.

With variables="central" the slots (momenta, averages) are on the chief only. Gradients are reduced as in the mirrored
mode, on all ranks and in the same order. Methods that read or write slots run on the chief only, which then broadcasts
the updated variables.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...keras._private import trained_by
from ...keras.optimizer import agreements_on_finite
from ...keras.patches import Function
from ...keras.patches import replaces_for_strategy as replaces
from ...tensorflow import files
from ...tensorflow.accumulators import is_accumulator
from ...tensorflow.gradients import label_of
from ...tensorflow.overwritten import places_of, with_largest
from ...tensorflow.types import OptionalGradient, Tensor
from .. import collectives
from ..central import Slots
from ..mpi_strategy import MPIStrategy
from . import step_state
from .gradients import compare_in_loop, largest, reduce_gradients, scaled, state_of
from .sharded import shard

GradientsAndVariables = list[tuple[OptionalGradient, tf.Variable]]


# -- optimizers that were made outside of the scope -------------------------------------------------------------------


def _belongs_to(optimizer: Optimizer, strategy: MPIStrategy) -> None:
    """Let an optimizer work with the strategy of the variables that it trains.

    Keras passes the strategy in whose scope an optimizer was made to the functions that update variables. TensorFlow's
    MirroredStrategy ignores that, and passes itself.
    """
    if not isinstance(optimizer._distribution_strategy, MPIStrategy):
        optimizer._distribution_strategy = strategy


@replaces(Optimizer, "__init__", "sharded slots would be on every rank", "tf.distribute.get_strategy()")
def make(original: Function, self: Optimizer, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    # One without an update_step may have others in it, which it does not know yet.
    if not files.in_alone() and type(self).update_step is not Optimizer.update_step:
        shard(self, tf.distribute.get_strategy())


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
    if shard(self, strategy):
        return self.apply(grads, variables)
    if strategy is not None:
        _belongs_to(self, strategy)
        trained = trained_by(self) if variables is None else variables
        compare_in_loop(self, trained)
        overwritten = places_of(trained)
        # The sum of several steps' gradients has no single number of rows.
        if self.gradient_accumulation_steps and step_state.state.weight is not None:
            factor = step_state.share()
            grads = [gradient if gradient is None or i in overwritten else scaled(gradient, factor)
                     for i, gradient in enumerate(grads)]
        if overwritten and len(grads) == len(trained):  # Otherwise Keras says what is wrong.
            grads = with_largest(grads, trained, overwritten, largest)
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
