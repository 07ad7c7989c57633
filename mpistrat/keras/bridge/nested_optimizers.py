"""The parts of a Keras optimizer: the optimizers inside of a LossScaleOptimizer or a MultiOptimizer.

Called by what mpistrat adds to optimizers, to fit and to compile; local.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from keras.optimizers import Optimizer

from ...tensorflow.kerases import is_optimizer


def parts_of(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """`optimizer`, and then the optimizers inside of it; nothing for None.

    A MultiOptimizer that chooses optimizers by a function has no parts before it is built.
    """
    if optimizer is None:
        return
    yield optimizer
    for inside in (getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())):
        yield from parts_of(inside)


def passes_on(optimizer: Optimizer) -> bool:
    """Whether `optimizer` passes gradients on to optimizers inside of it, also if it has none yet."""
    return hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")


def distributed_in(optimizer: Optimizer | None) -> list[Any]:
    """The parts of `optimizer` that average gradients over the ranks."""
    return [part for part in parts_of(optimizer) if getattr(part, "is_distributed", False)]


def states_in(optimizers: Iterable[Optimizer | None]) -> list[Any]:
    """The WholeState of each of the optimizers, and of those in them, whose state is divided among the ranks now."""
    found = {id(part): getattr(vars(part).get("_mpistrat"), "whole", None)
             for optimizer in optimizers for part in parts_of(optimizer)}
    return [state for state in found.values() if state is not None]


def optimizers_in(value: object) -> Iterator[Optimizer]:
    """An optimizer, or those in lists, tuples and dicts, which may be nested, also in themselves."""
    seen, left = set(), [value]
    while left:
        each = left.pop()
        if is_optimizer(each):
            yield each
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            left += reversed(each.values() if isinstance(each, dict) else each)
