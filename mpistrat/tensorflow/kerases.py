"""One set of functions for the optimizers and weights of Keras 3 and Keras 2 (tf_keras), whose attributes differ.

Classes and attributes are compared by name, so that this module imports neither Keras. Local.
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
    """A set of objects that cannot be hashed, such as variables, compared by identity, in the order of their addition.

    The set keeps its members alive, since the id of a deleted object may be reused. For one thread at a time.
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
    """The attributes of optimizers of Keras 3 and Keras 2."""

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
        """Return the learning rate of the next step. Only of `legacy` optimizers."""

    def _create_all_weights(self, variables: list[Variable]) -> None:
        """As build. Only of `legacy` optimizers."""


def is_keras2_in_use() -> bool:
    """Whether tf.keras is Keras 2 in this process. TensorFlow decides it by the same variable and package."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1") \
        and importlib.util.find_spec("tf_keras") is not None


def is_of_keras(value: object, *names: str) -> bool:
    """Whether the class of a value, or a base class, is a class of either Keras with one of these names."""
    return any(base.__name__ in names and package_of(base) in KERASES for base in type(value).__mro__)


def is_keras2(value: object) -> bool:
    """Whether the class of a value, or `value` itself if it is a class, is one of Keras 2 or derived from one."""
    cls = value if isinstance(value, type) else type(value)
    return any(package_of(base) == "tf_keras" for base in cls.__mro__)


def package_of(cls: type) -> str:
    """The package that a class is defined in."""
    return cls.__module__.partition(".")[0]


def is_optimizer(value: object) -> bool:
    """Whether a value is an optimizer of either Keras. OptimizerV2 is the base of Keras 2's `legacy` optimizers."""
    return is_of_keras(value, "Optimizer", "OptimizerV2")


def is_built(optimizer: Optimizer) -> bool:
    """Whether an optimizer has the variables for the weights that it trains."""
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
    """The variables of an optimizer (a method if it is `legacy`), and the loss scale, which Keras 2 leaves out."""
    found = optimizer.variables
    state: Any = vars(optimizer).get("_loss_scale")
    scale = [state.current_loss_scale, state.counter] if hasattr(state, "current_loss_scale") else []
    return [*(found() if callable(found) else found), *scale]


def steps_of(optimizer: Optimizer) -> Variable:
    """The variable that counts an optimizer's steps: in Keras 3 all calls, in Keras 2 calls that update weights."""
    # Where gradients are accumulated, `iterations` of Keras 3 is a quotient. In its first versions it is the variable.
    is_variable = is_keras2(optimizer) or not hasattr(optimizer, "_iterations")
    return optimizer.iterations if is_variable else optimizer._iterations


def accumulated_passes(optimizer: Optimizer) -> int:
    """The number of passes that an optimizer accumulates for one update; 0 or 1 if it does not accumulate."""
    return getattr(optimizer, "gradient_accumulation_steps", None) or 0


def velocities_of(optimizer: Optimizer) -> list[Variable]:
    """The velocities of SGD or RMSprop, if it has a momentum; [] before the first step, and of other optimizers."""
    if not getattr(optimizer, "momentum", 0.0):
        return []
    if not is_keras2(optimizer):
        # A sharded optimizer does not show its slots as `variables`.
        return [variable for variable in optimizer._variables if variable.name.endswith("momentum")]
    own = vars(optimizer)
    slots = [each["momentum"] for each in own.get("_slots", {}).values() if "momentum" in each]
    return [*own.get("momentums", ()), *own.get("_momentums", ()), *slots]


def label_of(variable: Variable) -> str:
    """The user's name of a variable: its Keras path, or its name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def aggregation_of(variable: Variable) -> str:
    """How the replicas of a strategy add to a variable: "sum", "mean", "only_first_replica" or "none"."""
    found = getattr(variable, "aggregation", "none")
    return found if isinstance(found, str) else str(found.name).lower()


def learning_rate_of(optimizer: Optimizer) -> object:
    """The learning rate of the next step; None if it is a user-defined function."""
    hyper = vars(optimizer).get("_hyper")  # of a `legacy` one
    rate = getattr(optimizer, "_learning_rate", None) if hyper is None else hyper.get("learning_rate")
    if callable(rate) and not is_of_keras(rate, "LearningRateSchedule"):
        return None
    return optimizer.learning_rate if hyper is None else optimizer._decayed_lr(tf.float32)


def slots_of(optimizer: Optimizer, weight: tf.Variable) -> list[Variable]:
    """The variables that an optimizer of Keras 2 has for a weight."""
    own = vars(optimizer)
    if "_slots" in own:
        return list(own["_slots"].get(weight._unique_id, {}).values())
    place = own.get("_index_dict", {}).get(weight._unique_id)
    lists = [each for name, each in own.items() if isinstance(each, list) and name != "_variables"]
    known = IdentitySet(variables_of(optimizer))
    return [] if place is None else [each[place] for each in lists if len(each) > place and each[place] in known]


def calls_of(optimizer: Optimizer) -> int:
    """The number of times that gradients were passed to an optimizer."""
    calls = vars(optimizer).get("_mpistrat_passes", steps_of(optimizer))
    return int(tf.convert_to_tensor(calls))  # int() of a variable of Keras 3.0 is an error.


# -- accumulated gradients --------------------------------------------------------------------------------------------

# Keras' optimizers sum gradients in these variables until an update. Each rank sums the gradients of its own rows.
# Averaging the sums over the ranks does not change the update.

_ENDING = "_gradient_accumulator"  # The ending of the name of such a variable, after the path of its weight.


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
