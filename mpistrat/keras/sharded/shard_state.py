"""WholeState: the state of a sharded optimizer as files have it, on a rank that has gathered or loaded it.

The order is that of the optimizer without sharding, so a file loads with any number of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...api import array_ops
from ...core.errors import InvalidRequestError
from ...tensorflow import files
from ...tensorflow.bridge.types import TensorLike
from ...tensorflow.list_ops import broadcast_list, gather_list
from .parts import Parts

# The collectives of a state have so many elements at most, so that a rank that does not keep it needs little memory.
_MOST_ELEMENTS = 16 * 1024 * 1024
_VALUE = "VARIABLE_VALUE"  # TensorFlow's name of a variable's value in a checkpoint


class WholeState:
    """The whole state of an optimizer, where it is known. One thread at a time uses it, as it uses the optimizer.

    Args:
        parts: This rank's parts.
        steps: The variable in which the optimizer counts steps.
    """

    variables: Sequence[keras.Variable] = ()  # All variables of the optimizer on this rank, once it is built

    def __init__(self, parts: Parts, steps: keras.Variable):
        self._parts, self._steps = parts, steps
        self._known: tuple[int, list[np.ndarray]] | None = None  # after so many steps
        self._shown: list[Any] | None = None

    def shown(self) -> list[Any]:
        """The variables that the optimizer shows: those that all ranks have, or in `showing` the whole state."""
        if self._shown is not None:
            return self._shown
        return [v for v in self.variables if id(v) not in self._parts.slots]

    @contextmanager
    def showing(self, is_read: bool) -> Iterator[None]:
        """A context in which `shown` has the whole state; this rank takes its parts of what is assigned to it. Local.

        Raises:
            InvalidRequestError: The state is read, and this rank does not have it.
        """
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
        """The methods of one of the optimizer's variables that tf.train.Checkpoint calls, with the whole state."""
        def to_tensors() -> dict[str, tf.Tensor]:
            # A rank that restores a checkpoint asks for the names only; one that writes is alone.
            found = [value for v, value in zip(self.variables, self._read(), strict=True) if v is slot] \
                if files.in_alone() else [slot]
            return {_VALUE: tf.convert_to_tensor(found[0])}

        def from_tensors(tensors: dict[str, tf.Tensor]) -> None:
            self.forget()
            self.assign(slot, tensors[_VALUE])

        return {"_serialize_to_tensors": to_tensors, "_restore_from_tensors": from_tensors}

    def consolidate(self, to: int | None) -> None:
        """Gather the state on a rank of the job; None: on all. Collective, eager."""
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
        """Give all ranks the state that a rank of the job has loaded, if it has. Collective, eager."""
        parts, own = self._parts, self._now()
        kinds = array_ops.broadcast_object(None if own is None else [(value.shape, value.dtype) for value in own],
                                           root_rank, f"{self._name}/loaded", parts.reducer.process_set)
        if kinds is not None:
            given = own or [np.zeros(shape, dtype) for shape, dtype in kinds]
            self.load([np.array(value) for value in broadcast_list(
                [tf.convert_to_tensor(value) for value in given], root_rank, f"{self._name}/loaded",
                process_set=parts.number)])

    def save(self) -> list[Any]:
        """What `load` takes: the whole state, if this rank has it, which is forgotten then; else its parts. Local."""
        whole = self._now()
        self.forget()
        return whole or [tf.convert_to_tensor(v) for v in self.variables]

    def load(self, saved: Sequence[Any]) -> None:
        """Return to what `save` has returned; whole also in another process, with another number of ranks. Local."""
        is_whole = isinstance(saved[0], np.ndarray)
        for variable, value in zip(self.variables, saved, strict=True):
            if is_whole and id(variable) in self._parts.slots:
                self.assign(variable, value)
            else:
                variable.assign(value)
        if is_whole:
            self._know(list(saved))

    def assign(self, slot: keras.Variable, value: TensorLike) -> None:
        """Set one of the optimizer's variables for a part to this rank's part of a whole value. Local."""
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
        """The state after the last step, if this rank has it."""
        return self._known[1] if self._known is not None and self._known[0] == int(self._steps) else None

    def _read(self) -> list[np.ndarray]:
        whole = self._now()
        if whole is None:
            raise InvalidRequestError(
                "this rank does not have the whole state of the sharded optimizer, which is to be saved or copied. "
                "Call optimizer.consolidate_state() on all ranks before, for rank 0, or consolidate_state(to=None) for "
                "all ranks. fit does so for rank 0 at the end of each epoch; a step makes it necessary again.")
        return whole

    @property
    def _name(self) -> str:
        return f"{self._parts.reducer.name}/state"

    def _flat_part(self, slot: keras.Variable) -> tf.Tensor:
        flat = tf.reshape(tf.convert_to_tensor(slot), [-1])
        # A factor of the state (Adafactor) has elements also on a rank without a part.
        return flat if self._parts.of_index[self._parts.slots[id(slot)]].size else flat[:0]

    def _shape_of(self, slot: keras.Variable) -> tuple[int, ...] | None:
        """The shape in the whole state, as far as this rank knows it."""
        index = self._parts.slots.get(id(slot))
        if index is not None and self._parts.plan.is_split:
            return tuple(self._parts.variables[index].shape)
        return tuple(slot.shape) if index is None or self._parts.of_index[index].size else None


class Shown:
    """Stands for a variable of a sharded optimizer, with the whole state in place of this rank's part.

    Attributes:
        path, name: Those of the variable.
        value: The whole state; None until it is assigned.
    """

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
