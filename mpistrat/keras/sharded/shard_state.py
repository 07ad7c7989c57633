"""OptimizerState: what mpistrat knows of an optimizer. WholeState: the whole state of a sharded optimizer on a rank.

A WholeState has the variables in the order of the optimizer without sharding, so files load with any number of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...api import array_ops
from ...api.process_sets import ProcessSet
from ...core.errors import InvalidRequestError
from ...core.request import ReduceOp
from ...tensorflow import files
from ...tensorflow.bridge import names
from ...tensorflow.bridge.types import TensorLike
from ...tensorflow.gradients import GradientOptions, GradientReducer
from ...tensorflow.list_ops import broadcast_list, gather_list
from .parts import Parts

# A collective gathers at most so many elements, so that a rank that does not keep the state needs little memory.
_MOST_ELEMENTS = 16 * 1024 * 1024
_VALUE = "VARIABLE_VALUE"  # TensorFlow's name of a variable's value in a checkpoint


class WholeState:
    """The whole state of a sharded optimizer, if this rank has it. `steps` is its step counter. Not thread-safe."""

    variables: Sequence[keras.Variable] = ()  # All variables of the optimizer on this rank, once it is built

    def __init__(self, parts: Parts, steps: keras.Variable):
        self._parts, self._steps = parts, steps
        self._known: tuple[int, list[np.ndarray]] | None = None  # (number of steps, state after them)
        self._shown: list[Any] | None = None

    def shown(self) -> list[Any]:
        """Return what `optimizer.variables` has: variables equal on all ranks, or within showing() the whole state."""
        if self._shown is not None:
            return self._shown
        return [v for v in self.variables if id(v) not in self._parts.slots]

    @contextmanager
    def showing(self, is_read: bool) -> Iterator[None]:
        """Return a context in which shown() returns the whole state. `is_read`: Whether values are read. Local."""
        whole = self._read() if is_read else self._now()
        shown = self._shown = [Shown(v, None if whole is None else whole[i], self) if id(v) in self._parts.slots else v
                               for i, v in enumerate(self.variables)]
        try:
            yield
        finally:
            self._shown = None
        if not is_read and all(not isinstance(each, Shown) or each.value is not None for each in shown):
            self._know([np.asarray(each) for each in shown])

    def checkpointed(self, slot: keras.Variable) -> dict[str, Any]:
        """Return methods by which tf.train.Checkpoint saves and restores the whole value of `slot`."""
        def to_tensors() -> dict[str, tf.Tensor]:
            # A rank that writes a checkpoint does so alone. A rank that restores one needs only the names.
            found = [value for v, value in zip(self.variables, self._read(), strict=True) if v is slot] \
                if files.in_alone() else [slot]
            return {_VALUE: tf.convert_to_tensor(found[0])}

        def from_tensors(tensors: dict[str, tf.Tensor]) -> None:
            self.forget()
            self.assign(slot, tensors[_VALUE])

        return {"_serialize_to_tensors": to_tensors, "_restore_from_tensors": from_tensors}

    def consolidate(self, to: int | None) -> None:
        """Gather the state on the rank `to` of the job, or on all ranks if `to` is None. Collective, eager."""
        parts, name = self._parts, self._name
        self._known = None
        keeps = to is None or to == parts.topology.job_ranks[parts.topology.rank]
        shapes: list[Any] = [self._shape_of(v) for v in self.variables]
        if not parts.plan.is_split:
            of_ranks = array_ops.allgather_object(shapes, f"{name}/shapes", parts.reducer.process_set)
            shapes = [next(shape for shape in of_slot if shape is not None) for of_slot in zip(*of_ranks, strict=True)]
        whole: list[Any] = [np.array(v) if keeps and id(v) not in parts.slots else None for v in self.variables]
        left = [i for i, v in enumerate(self.variables) if id(v) in parts.slots]
        while left:
            chunk = [left.pop(0)]
            while left and math.prod(shapes[left[0]]) + sum(math.prod(shapes[i]) for i in chunk) <= _MOST_ELEMENTS:
                chunk.append(left.pop(0))
            gathered = gather_list([self._flat_part(self.variables[i]) for i in chunk], name, parts.number)
            for i, value in zip(chunk if keeps else (), gathered, strict=False):
                whole[i] = np.array(value).reshape(shapes[i])
        if keeps:
            self._know(whole)

    def share(self, root_rank: int) -> None:
        """Broadcast the whole state of the rank `root_rank` of the job, if that rank has it. Collective, eager."""
        parts, own = self._parts, self._now()
        kinds = array_ops.broadcast_object(None if own is None else [(value.shape, value.dtype) for value in own],
                                           root_rank, f"{self._name}/loaded", parts.reducer.process_set)
        if kinds is not None:
            given = own or [np.zeros(shape, dtype) for shape, dtype in kinds]
            self.load([np.array(value) for value in broadcast_list(
                [tf.convert_to_tensor(value) for value in given], root_rank, f"{self._name}/loaded",
                process_set=parts.number)])

    def save(self) -> list[Any]:
        """Return a value for `load`: the whole state, or else this rank's parts. Frees the whole state. Local."""
        whole = self._now()
        self.forget()
        return whole or [tf.convert_to_tensor(v) for v in self.variables]

    def load(self, saved: Sequence[Any]) -> None:
        """Restore a result of `save`. If it is a whole state, the number of ranks may have changed since. Local."""
        is_whole = isinstance(saved[0], np.ndarray)
        for variable, value in zip(self.variables, saved, strict=True):
            if is_whole and id(variable) in self._parts.slots:
                self.assign(variable, value)
            else:
                variable.assign(value)
        if is_whole:
            self._know(list(saved))

    def assign(self, slot: keras.Variable, value: TensorLike) -> None:
        """Assign this rank's part of `value`, which is the whole value, to an optimizer variable. Local."""
        part = self._parts.of_index[self._parts.slots[id(slot)]]
        if part.size and self._parts.plan.is_split:
            slot.assign(np.reshape(np.reshape(value, -1)[part.start:part.stop], part.shape))
        elif part.size:
            slot.assign(value)

    def forget(self) -> None:
        """Free the memory of the whole state. Local."""
        self._known = None

    def _know(self, whole: list[np.ndarray]) -> None:
        self._known = int(self._steps), whole

    def _now(self) -> list[np.ndarray] | None:
        """Return the whole state after the last step, or None if this rank does not have it."""
        return self._known[1] if self._known is not None and self._known[0] == int(self._steps) else None

    def _read(self) -> list[np.ndarray]:
        whole = self._now()
        if whole is None:
            raise InvalidRequestError(
                "this rank cannot save or copy the sharded optimizer, since it does not have the whole state. First "
                "call optimizer.consolidate_state() on all ranks to gather the state on rank 0, or "
                "optimizer.consolidate_state(to=None) to gather it on each rank, and again after each further step. "
                "fit gathers the state on rank 0 at the end of each epoch.")
        return whole

    @property
    def _name(self) -> str:
        return f"{self._parts.reducer.name}/state"

    def _flat_part(self, slot: keras.Variable) -> tf.Tensor:
        flat = tf.reshape(tf.convert_to_tensor(slot), [-1])
        # A rank without a part has elements of a factor of the state too (Adafactor).
        return flat if self._parts.of_index[self._parts.slots[id(slot)]].size else flat[:0]

    def _shape_of(self, slot: keras.Variable) -> tuple[int, ...] | None:
        """Return the shape of `slot` in the whole state, or None if this rank does not know it."""
        index = self._parts.slots.get(id(slot))
        if index is not None and self._parts.plan.is_split:
            return tuple(self._parts.variables[index].shape)
        return tuple(slot.shape) if index is None or self._parts.of_index[index].size else None


class Shown:
    """A stand-in for an optimizer variable in a file or copy. `value`: the whole value; None until it is assigned."""

    def __init__(self, variable: keras.Variable, value: np.ndarray | None, state: WholeState):
        self.path, self.name, self.value = variable.path, variable.name, value
        self._variable, self._state = variable, state

    def numpy(self) -> np.ndarray | None:
        return self.value

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def assign(self, value: TensorLike) -> None:
        self.value = np.array(value)
        self._state.assign(self._variable, self.value)


# -- mpistrat's state of any Keras optimizer whose gradients are averaged ----------------------------------------------


@dataclass
class Arguments:
    """The arguments of DistributedOptimizer that are not in a Keras configuration. Copies get the same arguments."""

    name: names.OptimizerName  # The prefix of the names of collectives, also of copies
    factor: float  # The factor for the mean of accumulated gradients
    options: GradientOptions
    op: ReduceOp
    gradient_predivide_factor: float
    process_set: ProcessSet | None  # None: all ranks
    scale_local_gradients: bool
    average_statistics: bool
    uneven: str
    check_weights: bool
    shard_state: bool
    passes: int  # The number of passes that a Keras 2 optimizer accumulates. Keras 3 has it in the configuration.


@dataclass
class OptimizerState:
    """What mpistrat knows of an optimizer that is distributed or under a strategy, as its attribute `_mpistrat`."""

    class_name: str  # The class of the optimizer
    reducer_or_none: GradientReducer | None = None  # None: the optimizer cannot train, but be loaded, copied and saved
    arguments: Arguments | None = None  # The arguments of a distributed optimizer
    is_copy: bool = False  # Whether Keras has made the optimizer from the original
    # This rank's parts of the variables, and the whole state, if the state is divided among the ranks.
    parts: Parts | None = None
    whole: WholeState | None = None
    owner: int | None = None  # The rank that has all parts; None: the parts are divided
    called: set[str] = field(default_factory=set)  # The hooks that Keras has called
    accumulating: list[keras.Variable] | None = None  # The variables of accumulated gradients while these are applied

    @property
    def reducer(self) -> GradientReducer:
        """The reducer of the gradients. Raises InvalidRequestError if the optimizer cannot train."""
        if self.reducer_or_none is None:
            raise InvalidRequestError(
                f"this {self.class_name} cannot average gradients. It was made by calling the class of a distributed "
                "optimizer, or by copying an optimizer with something that a copy loses: local variables "
                "(register_local_var), variable groups, a process set, or inner optimizers that are not distributed. "
                f"Write hvd.DistributedOptimizer(keras.optimizers.{self.class_name}(...)) instead.")
        return self.reducer_or_none

    @property
    def factor(self) -> float:
        """The factor by which the mean of accumulated gradients is multiplied before it is applied."""
        return 1.0 if self.arguments is None else self.arguments.factor
