"""Keras' optimizers under MPIStrategy: each gets a class that reduces gradients, as for a DistributedOptimizer.

That is when it is made in the scope, or built for variables of the strategy, or applied in a replica. The class has the
mix-ins of mpistrat/keras. Here is what differs under a strategy: gradients are summed and weighted by rows, variables
are the strategy's, and all ranks save. With variables="sharded" and "central" the state is divided among the ranks.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...core.errors import InvalidRequestError
from ...keras.bridge.nested_optimizers import passes_on
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.clone import original_class
from ...keras.optimizers.applying import Applying
from ...keras.optimizers.optimizer import class_with
from ...keras.sharded.optimizer_state import OptimizerState
from ...keras.sharded.sharded_optimizer import Sharded, require_update_step
from ...tensorflow import files
from ...tensorflow.bridge.types import OptionalGradient
from ...tensorflow.overwritten import indices_of
from ..mpi_strategy import MPIStrategy
from . import step_state
from .gradients import RowReducer, compare_in_loop, scaled


class UnderStrategy:
    """A mix-in before those that reduce gradients: an optimizer that a replica applies."""

    is_distributed = False  # Not by itself
    _mpistrat: OptimizerState
    _distribution_strategy: MPIStrategy

    def __init__(self, *args: object, **kwargs: object):
        # A program calls the class of an optimizer, to make another one. Keras does not let it be assigned so early.
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
        if step_state.strategy_here() is None or state.reducer is not None:  # An optimizer around it has reduced them.
            if slots.are_sharded:
                raise InvalidRequestError(f"{slots.option}: an optimizer reduces gradients, so it is applied in a "
                                          "replica. Call optimizer.apply in a function for strategy.run.")
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
        if self._mpistrat.whole is not None:  # Before it is tracked: that is when a checkpoint may be restored.
            vars(variable).update(self._mpistrat.whole.checkpointed(variable))
        super()._track_variable(variable)  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], **arguments: object) -> Optimizer:
        """As the original class' from_config. It gets this class too if it is made in the scope."""
        return original_class(cls).from_config(config, **arguments)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """What pickle and copy call. They find the original class by its name."""
        how: Any = super().__reduce_ex__(protocol)
        load, *rest = how
        return getattr(original_class(load.__self__), load.__name__), *rest


def adopt(optimizer: Optimizer, strategy: tf.distribute.Strategy | None) -> bool:
    """Give an optimizer the class that reduces gradients, if the strategy is an MPIStrategy. Local.

    Returns whether it has not had that class before, and has it now. Of one with others in it these get theirs.

    Raises:
        InvalidRequestError: The state is to be divided, and cannot be, or all ranks have it already.
    """
    cls = type(optimizer)
    if not isinstance(strategy, MPIStrategy) or hasattr(cls, "is_distributed") or passes_on(optimizer):
        return False
    slots = strategy.extended.slots
    if slots.are_sharded:
        require_update_step(cls)
        if optimizer.built:
            raise InvalidRequestError(f"{cls.__name__} was built outside of strategy.scope(), so every rank has its "
                                      f"whole state. With {slots.option} make it in the scope.")
    strategy.extended.assigned_in_lockstep(optimizer._iterations.value)
    vars(optimizer).update(_mpistrat=OptimizerState(cls.__name__, RowReducer(strategy), owner=slots.owner),
                           _distribution_strategy=strategy)
    optimizer.__class__ = class_with((UnderStrategy, *((Sharded,) if slots.are_sharded else ()), Applying), cls)
    return True


@replaces(Optimizer, "__init__", "each rank would apply its own gradients, with slots on every rank",
          "tf.distribute.get_strategy()")
def make(original: Function, self: Optimizer, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    # One without an update_step may have others in it, which it does not know yet.
    if not files.in_alone() and type(self).update_step is not Optimizer.update_step:
        adopt(self, tf.distribute.get_strategy())


@replaces(Optimizer, "build", "an optimizer made outside of the scope could not make its slots",
          "self._trainable_variables = variables[:]")
def build(original: Function, self: Optimizer, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    if not hasattr(type(self), "is_distributed") and variables:
        first = variables[0].value if isinstance(variables[0], keras.Variable) else variables[0]
        strategy = getattr(first, "_distribute_strategy", None)
        # Slots that are divided are made for parts of the variables, in a class that has them from the beginning.
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
        raise InvalidRequestError(f"{cls.__name__} has an apply() of its own, so it reduces gradients only if it is "
                                  "made in strategy.scope(), with an update_step().")
    return self.apply(grads, trainable_variables)
