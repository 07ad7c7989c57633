"""The numbers of an optimizer that must be equal on all ranks: learning rate, weight decay, loss scale, momentum.

The callbacks that mpistrat adds to fit call these functions. Local.
"""

import inspect
import math
from collections.abc import Iterable, Sequence

import keras
from keras.optimizers import Optimizer

from ...core.errors import MismatchError
from ...core.topology import describe_by_rank
from ...tensorflow.kerases import learning_rate_of
from .nested_optimizers import passes_on

# A schedule is computed on each rank, and processors may round differently.
_RELATIVE = 1e-5


def number(value: object) -> float:
    """Return a number or the value of a variable as a float. A variable of Keras 3.0 has no __float__."""
    return float(keras.ops.convert_to_numpy(value))


def rates_of(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, float], ...]:
    """Return a label and the current value for each rate of the optimizers, in order.

    Learning rates that are user-defined functions are left out, since a call may have side effects.
    """
    return tuple((f"{name} of {type(optimizer).__name__}", value)
                 for optimizer in optimizers for name, value in _rates_of_one(optimizer).items())


def are_equal(a: float, b: float) -> bool:
    """Return whether two ranks' numbers are equal up to rounding. NaN equals NaN."""
    return math.isclose(a, b, rel_tol=_RELATIVE) or (math.isnan(a) and math.isnan(b))


def different_rate(of_ranks: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return a message on the first rate that differs between the ranks; "" if none differs."""
    for values in zip(*of_ranks, strict=False):
        label, numbers = values[0][0], [value for _, value in values]
        if not all(are_equal(value, numbers[0]) for value in numbers):
            found = describe_by_rank([f"{value:.6g}" for value in numbers])
            return f"the ranks have different values of the {label}: {found}. Their weights would drift apart."
    return ""


def require_equal_rates(of_ranks: Sequence[Sequence[tuple[str, float]]], place: str) -> None:
    """Raise MismatchError if the ranks have different rates. `place` begins the text: "fit: at the end of epoch 3"."""
    different = different_rate(of_ranks)
    if different:
        raise MismatchError(f"{place} {different} Set the same value on all ranks, and give all ranks the same "
                            "callbacks.")


def _rates_of_one(optimizer: Optimizer) -> dict[str, float]:
    hyper = {name: value for name, value in vars(optimizer).get("_hyper", {}).items() if not callable(value)}
    found = {name: number(value) for name, value in hyper.items()}  # of a `legacy` optimizer of Keras 2
    rate = learning_rate_of(optimizer) if not passes_on(optimizer) else None
    if rate is not None:
        found["learning_rate"] = number(rate)
    arguments = {name for cls in type(optimizer).__mro__ if "__init__" in vars(cls)
                 for name in inspect.signature(vars(cls)["__init__"]).parameters}
    for name in sorted(arguments):
        value = vars(optimizer).get(name)
        if isinstance(value, int | float):
            found[name] = float(value)
    scale = getattr(optimizer, "dynamic_scale", None)
    return found if scale is None else found | {"dynamic_scale": number(scale)}
