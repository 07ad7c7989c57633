"""The variables in which Keras' optimizers sum gradients until an update, by the names that Keras gives them. Local.

Each rank sums the gradients of its own rows. Averaging the sums over the ranks does not change the update.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from .identity_set import IdentitySet
from .kerases import Optimizer, accumulated_passes, is_built, is_keras2

_ENDING = "_gradient_accumulator"  # of a name, after the path of the weight


def is_accumulator(name: str) -> bool:
    """Whether an optimizer's variable of this name sums gradients."""
    return name.endswith(_ENDING)


def accumulators_of(optimizer: Optimizer) -> list[Any]:
    """The variables in which `optimizer` itself, without its inner optimizers, sums gradients; [] before it is built.

    A sharded optimizer itself has no such variables: each rank sums its part of the reduced gradients.
    """
    if not (accumulated_passes(optimizer) and is_built(optimizer)):
        return []
    if is_keras2(optimizer):  # optimizer.variables does not contain them.
        return list(optimizer._accumulated_gradients)
    shown = IdentitySet(optimizer.variables)
    return [variable for variable in optimizer._accumulated_gradients if variable in shown]


def accumulators_among(variables: Iterable[Any], weights: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of a weight and the variable among `variables` that sums the weight's gradients."""
    named = {f"{weight.path.replace('/', '_')}{_ENDING}": weight for weight in weights if hasattr(weight, "path")}
    return ((named[variable.name], variable) for variable in variables if variable.name in named)
