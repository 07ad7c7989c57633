"""Keras' optimizers under MPIStrategy: each gets a class that reduces gradients, as for a DistributedOptimizer.

An optimizer gets the class when it is made in the scope, built for variables of the strategy, or applied in a replica.
The class has the mix-ins of mpistrat/keras. Differences under a strategy: gradients are summed and weighted by rows,
variables belong to the strategy, and all ranks save. With "sharded" and "central" the state is divided among the ranks.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...core.errors import InvalidRequestError
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import passes_on
from ...keras.clone import original_class
from ...keras.optimizers.optimizer import Applying, class_with
from ...keras.sharded.shard_state import OptimizerState
from ...keras.sharded.sharded_optimizer import Sharded, require_update_step
from ...tensorflow import files
from ...tensorflow.bridge.types import OptionalGradient
from ...tensorflow.overwritten import indices_of
from ..mpi_strategy import MPIStrategy
from . import step_state
from .gradients import RowReducer, compare_in_loop, scaled


class UnderStrategy:
    """A mix-in for optimizers that a replica applies. It comes before the mix-ins that reduce gradients."""

    is_distributed = False  # Not by itself
    _mpistrat: OptimizerState
    _distribution_strategy: MPIStrategy

    def __init__(self, *args: object, **kwargs: object):
        # A program calls the class of an optimizer to make another optimizer. Keras forbids plain assignment so early.
        object.__setattr__(self, "__class__", original_class(type(self)))
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        strategy = self._distribution_strategy
        with tf.init_scope(), step_state.scope_of(strategy), strategy.extended.slots.created():
            super().build(variables)  # type: ignore[misc]

    def add_variable_from_reference(self, *args: object, **kwargs: object) -> keras.Variable:
        with step_state.scope_of(self._distribution_strategy):  # An optimizer may get this class while it is built.
            return super().add_variable_from_reference(*args, **kwargs)  # type: ignore[misc]

    def _mpistrat_apply(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                        variables: list[keras.Variable]) -> tf.Tensor | None:
        slots, state = self._distribution_strategy.extended.slots, step_state.state
        if step_state.strategy_here() is None or state.reducer is not None:  # An outer optimizer has reduced.
            if slots.are_sharded:
                raise InvalidRequestError(f"{slots.option}: optimizer.apply reduces gradients, so it must run in a "
                                          "replica. Call optimizer.apply in a function that strategy.run runs.")
            return original_class(type(self)).apply(self, grads, given)
        compare_in_loop(self, variables)
        state.reducer = self._mpistrat.reducer
        try:
            return super()._mpistrat_apply(grads, given, variables)  # type: ignore[misc]
        finally:
            state.reducer = None

    def _mpistrat_apply_accumulated(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                                    variables: list[keras.Variable]) -> tf.Tensor | None:
        state, weight, overwritten = step_state.state, step_state.state.weight, indices_of(variables)
        if weight is not None:
            # The sum of several steps' gradients has no single number of rows.
            factor, state.weight = step_state.share(), None
            grads = [gradient if gradient is None or i in overwritten else scaled(gradient, factor)
                     for i, gradient in enumerate(grads)]
        try:
            return super()._mpistrat_apply_accumulated(grads, given, variables)  # type: ignore[misc]
        finally:
            state.weight = weight

    def _all_reduce_sum_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]]
                                  ) -> list[tuple[OptionalGradient, tf.Variable]]:
        return list(grads_and_vars)

    def _track_variable(self, variable: keras.Variable) -> None:
        if self._mpistrat.whole is not None:  # Before tracking, which may restore a checkpoint.
            vars(variable).update(self._mpistrat.whole.checkpointed(variable))
        super()._track_variable(variable)  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], **arguments: object) -> Optimizer:
        """Call the original class' from_config. In the scope the new optimizer gets this class again."""
        return original_class(cls).from_config(config, **arguments)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Let pickle and copy use the original class, which they find by its name."""
        how: Any = super().__reduce_ex__(protocol)
        load, *rest = how
        return getattr(original_class(load.__self__), load.__name__), *rest


def adopt(optimizer: Optimizer, strategy: tf.distribute.Strategy | None) -> bool:
    """Give an optimizer the class that reduces gradients, if the strategy is an MPIStrategy. Local.

    Return True if the optimizer gets the class now. If it passes gradients on, adopt the inner optimizers instead.

    Raises:
        InvalidRequestError: The state must be divided, but cannot be, or all ranks have it already.
    """
    cls = type(optimizer)
    if not isinstance(strategy, MPIStrategy) or hasattr(cls, "is_distributed") or passes_on(optimizer):
        return False
    slots = strategy.extended.slots
    if slots.are_sharded:
        require_update_step(cls)
        if optimizer.built:
            raise InvalidRequestError(f"{cls.__name__} was built outside of strategy.scope(), so every rank has the "
                                      f"whole state. With {slots.option}, create the optimizer in the scope.")
    strategy.extended.assigned_in_lockstep(optimizer._iterations.value)
    vars(optimizer).update(_mpistrat=OptimizerState(cls.__name__, RowReducer(strategy), owner=slots.owner),
                           _distribution_strategy=strategy)
    optimizer.__class__ = class_with((UnderStrategy, *((Sharded,) if slots.are_sharded else ()), Applying), cls)
    return True


@replaces(Optimizer, "__init__", "each rank would apply its own gradients, with slots on every rank",
          "tf.distribute.get_strategy()")
def make(original: Function, self: Optimizer, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    # An optimizer without an update_step may get inner optimizers later.
    if not files.in_alone() and type(self).update_step is not Optimizer.update_step:
        adopt(self, tf.distribute.get_strategy())


@replaces(Optimizer, "build", "an optimizer made outside of the scope could not make its slots",
          "self._trainable_variables = variables[:]")
def build(original: Function, self: Optimizer, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    if not hasattr(type(self), "is_distributed") and variables:
        first = variables[0].value if isinstance(variables[0], keras.Variable) else variables[0]
        strategy = getattr(first, "_distribute_strategy", None)
        # Divided slots are made for parts of the variables, so the optimizer needs its class from the beginning.
        if isinstance(strategy, MPIStrategy) and not strategy.extended.slots.are_sharded:
            adopt(self, strategy)
    original(self, variables)


@replaces(Optimizer, "apply", "each rank would apply its own gradients",
          "self._backend_apply_gradients(grads, trainable_variables)")
def apply(original: Function, self: Optimizer, grads: Iterable[OptionalGradient],
          trainable_variables: Iterable[keras.Variable] | None = None) -> tf.Tensor | None:
    if not adopt(self, step_state.strategy_here()):
        return original(self, grads, trainable_variables)
    cls = original_class(type(self))
    if cls.apply is not Optimizer.apply:
        raise InvalidRequestError(f"{cls.__name__} defines its own apply(), so it must be created in strategy.scope() "
                                  "and have an update_step().")
    return self.apply(grads, trainable_variables)
