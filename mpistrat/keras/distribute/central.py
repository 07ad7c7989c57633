"""What Keras' optimizers do otherwise under MPIStrategy(variables="central"), where their slots are on the chief only.

Gradients are reduced as in the mirrored mode, on all ranks and in the same order. What reads or writes a slot is left
out on all ranks but the chief, which then shares the variables that it has updated. As in _strategy_replacements.py,
each function takes the original and returns what takes its place.
"""

from typing import Any

import tensorflow as tf

from ...tensorflow.distribute import MPIStrategy
from ...tensorflow.distribute.central import Slots
from ._private import LossScaleOptimizer


def _slots_of(optimizer: Any) -> Slots | None:
    """The slots of an optimizer, if they are central."""
    strategy = optimizer._distribution_strategy
    return strategy.extended.slots if isinstance(strategy, MPIStrategy) and strategy.extended.slots.are_central \
        else None


def add_variable(original: Any) -> Any:
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        slots = _slots_of(self)
        # A loss is scaled on every rank, and every rank sums up its own gradients.
        if slots is None or isinstance(self, LossScaleOptimizer) \
                or str(kwargs.get("name")).endswith("_gradient_accumulator"):
            return original(self, *args, **kwargs)
        with slots.created():
            return original(self, *args, **kwargs)
    return replacement


def where_slots_are(original: Any) -> Any:
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        slots = _slots_of(self)
        return original(self, *args, **kwargs) if slots is None or slots.are_here else None
    return replacement


def apply(original: Any) -> Any:
    def replacement(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        result = original(self, grads, variables)
        slots = _slots_of(self)
        if slots is None or not grads:
            return result
        if self.ema_overwrite_frequency:  # This writes all variables, and has a rhythm of its own.
            slots.share(self._trainable_variables)
            return result
        variables = self._trainable_variables if variables is None else variables
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
    return replacement


def finalize_variable_values(original: Any) -> Any:
    def replacement(self: Any, var_list: Any) -> Any:
        result = original(self, var_list)
        slots = _slots_of(self)
        if slots is not None and self.use_ema:
            slots.share(list(var_list))
        return result
    return replacement


def keep_averages(original: Any) -> Any:
    def replacement(self: Any, optimizer: Any) -> None:
        slots = _slots_of(optimizer)
        if slots is None or slots.are_here:
            original(self, optimizer)
    return replacement


def swap_averages(original: Any) -> Any:
    swap_where_they_are = keep_averages(original)

    def replacement(self: Any, optimizer: Any) -> None:
        swap_where_they_are(self, optimizer)
        slots = _slots_of(optimizer)
        if slots is not None:
            slots.share(optimizer._trainable_variables)
    return replacement
