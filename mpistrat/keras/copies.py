"""Copies of optimizers: new ones with the same configuration and without state. Called by optimizer.py; local.

A configuration of Keras has plain values only, from which Keras makes objects if it knows their classes. So learning
rates that are schedules or functions are handed over as they are, and the optimizers in an optimizer are copied here.
"""

from collections.abc import Mapping
from typing import Any

from keras.optimizers import Optimizer

from ._private import config_without, decay_exclusions_of, objects_given_to


def copy_of(optimizer: Optimizer, cls: type[Optimizer] | None = None, changes: Mapping[str, object] | None = None,
            copies: dict[int, Optimizer] | None = None) -> Any:
    """An optimizer with the configuration of `optimizer`, which is not changed.

    A MultiOptimizer that gets its optimizers from a function shares the function, and so the optimizers, with its copy.

    Args:
        optimizer: The original.
        cls: The class of the copy, a subclass of the original's; None: the original's.
        changes: Values of the configuration that are others in the copy.
        copies: The copies of optimizers that have been made, by the id of the original.
    """
    cls, copies = cls or type(optimizer), {} if copies is None else copies
    if id(optimizer) in copies:
        return copies[id(optimizer)]
    given = objects_given_to(optimizer)
    config = config_without(optimizer, given) | {
        name: _copied(value, copies) for name, value in given.items()} | dict(changes or {})
    # Keras' own from_config reads optimizers from plain values only. A class of the user may have its own from_config.
    copied = cls(**config) if set(given) - {"learning_rate"} else type(optimizer).from_config.__func__(cls, config)
    for name, value in decay_exclusions_of(optimizer).items():
        setattr(copied, name, value)
    copies[id(optimizer)] = copied
    return copied


def _copied(value: object, copies: dict[int, Optimizer]) -> object:
    """An optimizer or an OptimizerMap with new optimizers; anything else as it is."""
    if isinstance(value, Optimizer):
        return copy_of(value, copies=copies)
    if isinstance(value, Mapping) and hasattr(value, "default_optimizer"):
        cls: Any = type(value)
        return cls(copy_of(value.default_optimizer, copies=copies),
                   {name: copy_of(each, copies=copies) for name, each in value.items()})
    return value
