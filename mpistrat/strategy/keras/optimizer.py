"""Keras' optimizers under MPIStrategy: reduction, clipping and loss scaling.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...keras._private import trained_by
from ...keras.optimizer import agreements_on_finite
from ...keras.patches import Function
from ...keras.patches import replaces_for_strategy as replaces
from ...tensorflow import files
from ...tensorflow.gradients import label_of
from ...tensorflow.overwritten import places_of, with_largest
from ...tensorflow.types import OptionalGradient, Tensor
from .. import collectives
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


@replaces(Optimizer, "apply", "uneven batches would not count by rows, and loops would not be checked",
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
    return original(self, grads, variables)
