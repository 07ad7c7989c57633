"""The variables of a strategy, and which ranks have the slots of its optimizers. extended.py calls this module.

A variable is a distributed variable of TensorFlow with one component per process, and with rank 0's initial value. The
subclasses here differ from TensorFlow's classes where TensorFlow assumes that one process has all replicas.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.distribute_utils import create_mirrored_variable
from tensorflow.python.distribute.values import DistributedVariable, MirroredVariable, SyncOnReadVariable

from ..api import runtime
from ..tensorflow import files
from ..tensorflow.bridge.types import TensorLike
from . import collectives

# The value of a variable, or a function that returns it.
Initial: TypeAlias = TensorLike | Callable[[], TensorLike] | None


class _Number:
    """A mix-in: float() and int(), which TensorFlow's distributed variables lack, and np.array() for scalars too."""

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # For a scalar TensorFlow's method returns a numpy scalar, which numpy refuses.
        array = np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]
        return array.copy() if copy else array


class RankMirroredVariable(_Number, MirroredVariable):
    """A variable with equal values on all ranks, unless a replica assigns to it without aggregation."""

    is_in_lockstep = False  # Whether all ranks assign equal values; see RankExtended.assigned_in_lockstep.

    def _update_replica(self, update_fn: Callable, value: TensorLike, **kwargs: Any) -> Any:
        # TensorFlow does not aggregate Python numbers: when each rank adds 1, it would add 1 instead of the sum.
        if self.aggregation == tf.VariableAggregation.SUM and not isinstance(value, tf.Tensor | tf.IndexedSlices):
            value = tf.convert_to_tensor(value, dtype=self.dtype)
        return super()._update_replica(update_fn, value, **kwargs)


class RankSyncOnReadVariable(_Number, SyncOnReadVariable):
    """A variable to which each rank assigns locally. A read outside of a replica aggregates the ranks' values."""

    def _get_cross_replica(self) -> tf.Tensor:
        if files.in_alone():
            known = files.known_value(self)  # If there is none, this rank's own value is used.
            return self._get_replica(0).read_value() if known is None else known
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return collectives.broadcast_from_first(self._get_replica(0).read_value(), "read", self.name)
        return super()._get_cross_replica()

    def assign(self, value: TensorLike, use_locking: bool = False, name: str | None = None,
               read_value: bool = True) -> Any:
        """Assign like SyncOnReadVariable.assign, but do not read the new value outside of a replica.

        Reading would be a collective for each metric variable that Keras resets, and Keras does not use the result.
        """
        in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        if tf.executing_eagerly() and not in_replica:
            super().assign(value, use_locking, name, read_value=False)
            return self if read_value else None
        return super().assign(value, use_locking, name, read_value)


_CLASSES = {tf.VariableSynchronization.ON_WRITE: RankMirroredVariable,
            tf.VariableSynchronization.ON_READ: RankSyncOnReadVariable}


def create(strategy: tf.distribute.Strategy, device: str, next_creator: Callable, **kwargs: Any) -> DistributedVariable:
    """Create a variable in the strategy's scope. Collective: all ranks create the same variables in the same order.

    The call is local while one rank writes a file without the others, because Keras then creates a temporary optimizer
    on that rank, to list the attributes of its class.
    """
    if not files.in_alone():
        kwargs["initial_value"] = _of_first_rank(kwargs["initial_value"], kwargs.get("dtype"), kwargs.get("name"))
    return create_alone(strategy, device, next_creator, **kwargs)


def create_alone(strategy: tf.distribute.Strategy, device: str, next_creator: Callable,
                 **kwargs: Any) -> DistributedVariable:
    """Create a variable like `create`, but with this rank's own initial value. Local."""
    def component(**kwargs: Any) -> list[tf.Variable]:
        with tf.device(device):
            return [next_creator(**kwargs)]

    return create_mirrored_variable(strategy, component, _CLASSES, {}, **kwargs)


def _of_first_rank(initial: Initial, dtype: tf.DType | None, name: str | None) -> Initial:
    """Return rank 0's initial value: a function that broadcasts it, or for a graph tensor the broadcast tensor."""
    if initial is None:  # A SavedModel is being loaded, and each variable gets its value later, from the file.
        return None
    if isinstance(initial, tf.Tensor) and not hasattr(initial, "numpy"):
        return _broadcast(initial, name)

    def fetch() -> tf.Tensor:
        # In a function, the variable and its value are created once for all calls.
        with tf.init_scope():
            value = initial() if callable(initial) else initial
            return _broadcast(tf.convert_to_tensor(value, dtype=dtype), name)

    return fetch


def _broadcast(value: tf.Tensor, name: str | None) -> tf.Tensor:
    if not np.issubdtype(value.dtype.as_numpy_dtype, np.generic) or value.dtype in (tf.string, tf.resource, tf.variant):
        return value
    return collectives.broadcast_from_first(value, "variable", name or "")


# -- the placement of optimizer slots on the ranks, for variables="sharded" and "central" ------------------------------

_MARK = "_mpistrat_is_slot"


def is_everywhere(variable: tf.Variable) -> bool:
    """Return whether all ranks have the variable. Slots (optimizer state) may be divided among the ranks. Local."""
    return _MARK not in vars(variable)  # Not by hasattr, which may run a collective; see checkpoints.


class Slots:
    """Creates the slots (momenta and so on) of a strategy's optimizers. `variables`: The argument of MPIStrategy."""

    def __init__(self, strategy: tf.distribute.Strategy, variables: str):
        topology = runtime.current().topology
        self._strategy, self._creates_slots = strategy, False
        self.option = f'MPIStrategy(variables="{variables}")'  # What the user has written
        # Whether the slots are divided among the ranks. With one rank they are not.
        self.are_sharded = variables != "mirrored" and topology.size > 1
        self.owner = 0 if variables == "central" else None  # The rank that has all slots
        if self.are_sharded:
            owners, what = (range(topology.size), "its part of the") if self.owner is None else ([self.owner], "the")
            runtime.current().losses.irreplaceable.update(
                dict.fromkeys(owners, f"Only it had {what} optimizers' slots: {self.option}."))

    @contextmanager
    def created(self) -> Iterator[None]:
        """A context in which `create` creates slots."""
        before, self._creates_slots = self._creates_slots, self.are_sharded
        try:
            yield
        finally:
            self._creates_slots = before

    def create(self, device: str, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        """Create a variable (collective). In the context `created`, create a slot (local if slots are divided)."""
        if not self._creates_slots:
            return create(self._strategy, device, next_creator, **kwargs)
        slot = create_alone(self._strategy, device, next_creator, **kwargs)
        setattr(slot, _MARK, True)
        return slot
