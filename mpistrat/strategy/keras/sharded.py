"""variables="sharded" and "central": Keras' optimizers whose state is divided among the ranks of a strategy.

An optimizer that is made in the scope gets a class with the mix-in of keras/sharded, which makes a step as for a
ShardedOptimizer: without the strategy, so that neither Keras nor what is replaced in Keras for strategies reduces
gradients. Here is what differs under a strategy: gradients are summed and weighted by rows, variables are the
strategy's, and all ranks save.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...core.errors import InvalidRequestError
from ...core.request import Sum
from ...keras.applying import Applying
from ...keras.clone import original_class
from ...keras.nested_optimizers import passes_on
from ...keras.optimizer import class_with
from ...keras.optimizer_state import OptimizerState
from ...keras.sharded.optimizer import Sharded, require_update_step
from ...tensorflow.consistency import FirstSteps
from ...tensorflow.gradients import GradientReducer, reduce_gradients
from ...tensorflow.names import OptimizerName
from ...tensorflow.overwritten import places_of
from ...tensorflow.types import OptionalGradient
from ..mpi_strategy import MPIStrategy
from ..replica_context import without_strategy
from . import step_state
from .gradients import OWN_ROWS, compare_in_loop, counted, scaled_unless


class _Reducer(GradientReducer):
    """Sums gradients over the ranks of a strategy, weighted by rows. Its collectives have the optimizer's name."""

    checks_weights = False  # That is done before.
    is_global = True

    @cached_property
    def checks(self) -> FirstSteps:
        return FirstSteps(self.name, way_out=OWN_ROWS)

    def reduce(self, gradients: Sequence[OptionalGradient], variables: Sequence[keras.Variable],
               reduce_shared: Callable[..., Sequence[OptionalGradient]] = reduce_gradients) -> list[OptionalGradient]:
        weight, overwritten = step_state.state.weight, places_of(variables)
        gradients = [counted(g) if g is not None and i in overwritten else g for i, g in enumerate(gradients)]
        if weight is None:
            return super().reduce(gradients, variables, reduce_shared)
        total = step_state.total_weight()
        size = tf.cast(self.process_set.size(), tf.float32)

        def multiplied(is_one: tf.Tensor, values: Sequence[OptionalGradient],
                       factor: tf.Tensor) -> list[OptionalGradient]:
            results = list(values)
            places = [i for i, value in enumerate(values) if value is not None and i not in overwritten]
            for i, result in zip(places, scaled_unless(is_one, [values[i] for i in places], factor), strict=True):
                results[i] = result
            return results

        reduced = super().reduce(multiplied(weight == 1, gradients, weight), variables, reduce_shared)
        return multiplied(total == size, reduced, size / total)


class UnderStrategy:
    """A mix-in before Sharded: an optimizer that a replica applies."""

    is_distributed = False
    _mpistrat: OptimizerState

    def build(self, variables: Sequence[keras.Variable]) -> None:
        strategy: MPIStrategy = self._distribution_strategy  # type: ignore[attr-defined]
        with tf.init_scope(), step_state.scope_of(strategy), strategy.extended.slots.created():
            super().build(variables)  # type: ignore[misc]

    def _mpistrat_apply(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                        variables: list[keras.Variable]) -> tf.Tensor | None:
        if step_state.strategy_here() is None:
            option = self._distribution_strategy.extended.slots.option  # type: ignore[attr-defined]
            raise InvalidRequestError(f"{option}: an optimizer reduces gradients, so it is applied in a replica. Call "
                                      "optimizer.apply in a function for strategy.run.")
        compare_in_loop(self, variables)
        if not self.built:  # type: ignore[attr-defined]
            self.build(variables)
        with without_strategy():
            return super()._mpistrat_apply(grads, given, variables)  # type: ignore[misc]

    def _track_variable(self, variable: keras.Variable) -> None:
        if self._mpistrat.whole is not None:  # Before it is tracked: that is when a checkpoint may be restored.
            vars(variable).update(self._mpistrat.whole.checkpointed(variable))
        super()._track_variable(variable)  # type: ignore[misc]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: object) -> Any:
        # All ranks call tf.train.Checkpoint, which gathers the state before one writes.
        return super(Sharded, self)._trackable_children(save_type, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], **arguments: object) -> Optimizer:
        """As the original class' from_config. It is sharded if it is made in the scope."""
        return original_class(cls).from_config(config, **arguments)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """What pickle and copy call. They find the original class by its name."""
        how: Any = super().__reduce_ex__(protocol)
        load, *rest = how
        return getattr(original_class(load.__self__), load.__name__), *rest


def shard(optimizer: Optimizer, strategy: tf.distribute.Strategy | None) -> bool:
    """Divide the state of an optimizer among the ranks, if the strategy is one that does. Local.

    Returns whether the optimizer was not sharded before, and is now. Of one with others in it these are sharded.

    Raises:
        InvalidRequestError: The state cannot be divided, or all ranks have it already.
    """
    cls = type(optimizer)
    if not isinstance(strategy, MPIStrategy) or not strategy.extended.slots.are_sharded \
            or hasattr(cls, "is_distributed") or passes_on(optimizer):
        return False
    require_update_step(cls)
    if optimizer.built:
        raise InvalidRequestError(f"{cls.__name__} was built outside of strategy.scope(), so every rank has its whole "
                                  f"state. With {strategy.extended.slots.option} make it in the scope.")
    reducer = _Reducer(OptimizerName(0), strategy.extended.gradient_options, Sum)
    vars(optimizer).update(_mpistrat=OptimizerState(cls.__name__, reducer, owner=strategy.extended.slots.owner),
                           _distribution_strategy=strategy)
    optimizer.__class__ = class_with((UnderStrategy, Sharded, Applying), cls)
    return True
