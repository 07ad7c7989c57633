"""The parts of a Keras optimizer: the optimizers inside of a LossScaleOptimizer or a MultiOptimizer.

mpistrat's additions to optimizers, fit and compile call these functions. Local.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from keras.optimizers import Optimizer

from ...tensorflow.kerases import is_optimizer


def parts_of(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """Yield `optimizer`, and then its inner optimizers. Yield nothing for None.

    A MultiOptimizer that gets its optimizers from a function has no inner optimizers before it is built.
    """
    if optimizer is None:
        return
    yield optimizer
    for inside in (getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())):
        yield from parts_of(inside)


def passes_on(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` passes gradients on to inner optimizers, even if it has none yet."""
    return hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")


def distributed_in(optimizer: Optimizer | None) -> list[Any]:
    """The parts of `optimizer` that average gradients over the ranks."""
    return [part for part in parts_of(optimizer) if getattr(part, "is_distributed", False)]


def states_in(optimizers: Iterable[Optimizer | None]) -> list[Any]:
    """Return the WholeStates of the optimizers and inner optimizers whose state is divided among the ranks now."""
    found = {id(part): getattr(vars(part).get("_mpistrat"), "whole", None)
             for optimizer in optimizers for part in parts_of(optimizer)}
    return [state for state in found.values() if state is not None]


def optimizers_in(value: object) -> Iterator[Optimizer]:
    """Yield an optimizer, or the optimizers in lists, tuples and dicts, which may be nested or contain themselves."""
    seen, left = set(), [value]
    while left:
        each = left.pop()
        if is_optimizer(each):
            yield each
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            left += reversed(each.values() if isinstance(each, dict) else each)
