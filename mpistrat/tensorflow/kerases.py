"""Functions that work with optimizers and weights of both Keras 3 and Keras 2 (tf_keras), whose attributes differ.

The functions recognize classes and attributes by name, so this module imports neither Keras 3 nor Keras 2. Local.
"""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import tensorflow as tf

from .bridge.types import Variable

T = TypeVar("T")

KERASES = ("keras", "tf_keras")  # The packages. tf.keras is one of them.


class IdentitySet(Generic[T]):
    """An ordered set that compares its members by identity, for objects that cannot be hashed, such as variables.

    The set keeps its members alive, because the id of a deleted object may be reused. Not thread-safe.
    """

    def __init__(self, members: Iterable[T] = ()):
        self._members = {id(member): member for member in members}

    def add(self, member: T) -> None:
        self._members[id(member)] = member

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(self._members.values())

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._members


class Optimizer(Protocol):
    """The attributes of optimizers of Keras 3 and Keras 2 that mpistrat uses. No class has all of them."""

    built: bool
    variables: Any
    iterations: Variable
    learning_rate: object
    gradient_accumulation_steps: int | None
    _accumulated_gradients: list[Variable]
    _iterations: Variable
    _variables: list[Variable]

    def build(self, variables: list[Variable]) -> None:
        """Create the optimizer's variables for these weights."""

    def _decayed_lr(self, dtype: tf.DType) -> object:
        """Return the learning rate of the next step. Only `legacy` optimizers have this method."""

    def _create_all_weights(self, variables: list[Variable]) -> None:
        """Do the same as build. Only `legacy` optimizers have this method."""


def is_keras2_in_use() -> bool:
    """Return whether tf.keras is Keras 2: TF_USE_LEGACY_KERAS is set, and the package tf_keras is installed."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1") \
        and importlib.util.find_spec("tf_keras") is not None


def is_of_keras(value: object, *names: str) -> bool:
    """Return whether a value is an instance of a class of Keras 3 or Keras 2 that has one of these names."""
    return any(base.__name__ in names and package_of(base) in KERASES for base in type(value).__mro__)


def is_keras2(value: object) -> bool:
    """Return whether `value` is a class of Keras 2 or an object of one. Derived classes count too."""
    cls = value if isinstance(value, type) else type(value)
    return any(package_of(base) == "tf_keras" for base in cls.__mro__)


def package_of(cls: type) -> str:
    """Return the name of the top-level package that defines a class."""
    return cls.__module__.partition(".")[0]


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer of Keras 3 or Keras 2, also a `legacy` optimizer (OptimizerV2)."""
    return is_of_keras(value, "Optimizer", "OptimizerV2")


def is_built(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has created its variables for the weights that it trains."""
    if not is_keras2(optimizer):
        return bool(optimizer.built)
    if hasattr(optimizer, "inner_optimizer"):
        return is_built(optimizer.inner_optimizer)
    return bool(vars(optimizer).get("_built", vars(optimizer).get("_slots")))  # A `legacy` one has slots.


def build(optimizer: Optimizer, weights: list[Variable]) -> None:
    """Create an optimizer's variables for these weights, unless they exist."""
    if is_built(optimizer):
        return
    with tf.init_scope():
        if hasattr(optimizer, "build"):
            optimizer.build(weights)
        else:
            optimizer._create_all_weights(weights)


def variables_of(optimizer: Optimizer) -> list[Variable]:
    """Return the variables of an optimizer, and its loss scale, which Keras 2 does not list among them."""
    found = optimizer.variables
    state: Any = vars(optimizer).get("_loss_scale")
    scale = [state.current_loss_scale, state.counter] if hasattr(state, "current_loss_scale") else []
    return [*(found() if callable(found) else found), *scale]


def steps_of(optimizer: Optimizer) -> Variable:
    """Return the variable that counts steps of an optimizer: all calls in Keras 3, updates of weights in Keras 2."""
    # Where gradients are accumulated, `iterations` of Keras 3 is a quotient. In its first versions it is the variable.
    is_variable = is_keras2(optimizer) or not hasattr(optimizer, "_iterations")
    return optimizer.iterations if is_variable else optimizer._iterations


def accumulated_passes(optimizer: Optimizer) -> int:
    """Return how many gradients an optimizer sums for one update; 0 or 1 if it does not accumulate gradients."""
    return getattr(optimizer, "gradient_accumulation_steps", None) or 0


def velocities_of(optimizer: Optimizer) -> list[Variable]:
    """Return the velocities of SGD or RMSprop with momentum; [] before the first step, and for other optimizers."""
    if not getattr(optimizer, "momentum", 0.0):
        return []
    if not is_keras2(optimizer):
        # A sharded optimizer does not show its slots as `variables`.
        return [variable for variable in optimizer._variables if variable.name.endswith("momentum")]
    own = vars(optimizer)
    slots = [each["momentum"] for each in own.get("_slots", {}).values() if "momentum" in each]
    return [*own.get("momentums", ()), *own.get("_momentums", ()), *slots]


def label_of(variable: Variable) -> str:
    """Return the name of a variable for messages to users: its Keras path, or else its name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def aggregation_of(variable: Variable) -> str:
    """Return how a variable combines the updates of replicas: "sum", "mean", "only_first_replica" or "none"."""
    found = getattr(variable, "aggregation", "none")
    return found if isinstance(found, str) else str(found.name).lower()


def learning_rate_of(optimizer: Optimizer) -> object:
    """Return the learning rate of the next step; None if a user-defined function computes it."""
    hyper = vars(optimizer).get("_hyper")  # of a `legacy` one
    rate = getattr(optimizer, "_learning_rate", None) if hyper is None else hyper.get("learning_rate")
    if callable(rate) and not is_of_keras(rate, "LearningRateSchedule"):
        return None
    return optimizer.learning_rate if hyper is None else optimizer._decayed_lr(tf.float32)


def slots_of(optimizer: Optimizer, weight: tf.Variable) -> list[Variable]:
    """Return the variables that an optimizer of Keras 2 has for a weight."""
    own = vars(optimizer)
    if "_slots" in own:
        return list(own["_slots"].get(weight._unique_id, {}).values())
    place = own.get("_index_dict", {}).get(weight._unique_id)
    lists = [each for name, each in own.items() if isinstance(each, list) and name != "_variables"]
    known = IdentitySet(variables_of(optimizer))
    return [] if place is None else [each[place] for each in lists if len(each) > place and each[place] in known]


def calls_of(optimizer: Optimizer) -> int:
    """Return how many times gradients were passed to an optimizer."""
    calls = vars(optimizer).get("_mpistrat_passes", steps_of(optimizer))
    return int(tf.convert_to_tensor(calls))  # int() of a variable of Keras 3.0 is an error.


# -- accumulated gradients --------------------------------------------------------------------------------------------

# Keras' optimizers sum gradients in these variables until an update. Each rank sums the gradients of its own rows.
# Averaging the sums over the ranks does not change the update.

_ENDING = "_gradient_accumulator"  # The ending of the name of such a variable, after the path of its weight.


def is_accumulator(name: str) -> bool:
    """Return whether a variable of an optimizer with this name sums gradients."""
    return name.endswith(_ENDING)


def accumulators_of(optimizer: Optimizer) -> list[Any]:
    """Return the variables in which an optimizer sums local gradients; [] before it is built. Local.

    The variables of inner optimizers are not included. A sharded optimizer has none: it sums gradients after the
    reduction, and only this rank's part of them.
    """
    if not (accumulated_passes(optimizer) and is_built(optimizer)):
        return []
    if is_keras2(optimizer):  # optimizer.variables does not contain them.
        return list(optimizer._accumulated_gradients)
    shown = IdentitySet(optimizer.variables)
    return [variable for variable in optimizer._accumulated_gradients if variable in shown]


def accumulators_among(variables: Iterable[Any], weights: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Return (weight, variable) for each of `variables` that sums the gradients of one of the model's `weights`."""
    named = {f"{weight.path.replace('/', '_')}{_ENDING}": weight for weight in weights if hasattr(weight, "path")}
    return ((named[variable.name], variable) for variable in variables if variable.name in named)
