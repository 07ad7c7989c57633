"""The variables in which Keras' optimizers sum gradients until an update, by the names that Keras gives them. Local.

Each rank has sums of its own rows. Their mean, on all ranks, does not change the update.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from .identity_set import IdentitySet
from .kerases import Optimizer, accumulated_passes, is_built, is_keras2

_ENDING = "_gradient_accumulator"  # of a name, after the path of the weight


def is_accumulator(name: str) -> bool:
    """Whether an optimizer's variable of that name sums gradients."""
    return name.endswith(_ENDING)


def accumulators_of(optimizer: Optimizer) -> list[Any]:
    """The variables in which one optimizer, without those inside of it, sums gradients; [] before it is built.

    A sharded optimizer has none of its own: each rank sums its part of gradients that are reduced.
    """
    if not (accumulated_passes(optimizer) and is_built(optimizer)):
        return []
    if is_keras2(optimizer):  # They are none of its variables.
        return list(optimizer._accumulated_gradients)
    shown = IdentitySet(optimizer.variables)
    return [variable for variable in optimizer._accumulated_gradients if variable in shown]


def accumulators_among(variables: Iterable[Any], weights: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Each weight whose gradients one of the optimizers' variables sums, and that variable."""
    named = {f"{weight.path.replace('/', '_')}{_ENDING}": weight for weight in weights if hasattr(weight, "path")}
    return ((named[variable.name], variable) for variable in variables if variable.name in named)
