"""Parts: what one rank has of the variables and of the state of a sharded optimizer, and how it exchanges them.

A rank updates its parts in variables of its own, and all ranks gather the new weights. Whole variables are updated in
place. The optimizer's own variables for a part have the part's shape; those for a variable without a part here have no
elements. So all ranks have as many of them, in the order of the optimizer without sharding.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...api import ops as array_ops
from ...core.errors import InvalidRequestError
from ...core.request import Request, reducescatter_request, specs_of
from ...core.tuning import SUBMIT_WAIT_BYTES
from ...tensorflow import names
from ...tensorflow.async_op import call_site
from ...tensorflow.bridge import cpu
from ...tensorflow.bridge.reduce_spec import ReduceSpec
from ...tensorflow.bridge.submission import Submitted
from ...tensorflow.compression import Compressed, Compression
from ...tensorflow.gradients import GradientOptions, GradientReducer, label_of, observed_eagerly, reduce_gradients
from ...tensorflow.list_ops import broadcast_list, gather_list, reduce_slices
from ...tensorflow.types import OptionalGradient, Tensor, TensorLike, Variable
from ...tensorflow.xla import context as xla
from .plan import Part, plan_of
from .plan import Tensor as Planned

# The collectives of a state have so many bytes at most, so that a rank that does not keep it needs no more memory.
_STATE_BYTES = 64 * 1024 * 1024


class _Noting(list):
    """The variables for which an optimizer is built. It tells which of them build() looks at."""

    place: int | None = None

    def __iter__(self) -> Iterator[keras.Variable]:
        for self.place, variable in enumerate(super().__iter__()):
            yield variable
        self.place = None


class Parts:
    """This rank's parts. One thread at a time uses them, as it uses the optimizer.

    Args:
        variables: Those that the optimizer trains, the same on all ranks.
        reducer: What reduces the gradients; its process set has several ranks.
        is_split: Whether a variable may be divided.

    Attributes:
        variables: The variables.
        plan: The division.
        shards: For each variable what this rank updates: a variable with its part; the variable itself, if it is this
            rank's as a whole; or one without elements. Gradients overwrite some variables, on all ranks.
        noting: The same for build(), which makes the optimizer's variables for them: `note` is told of these.
        slots: The place of the trained variable by the id of each of the optimizer's variables for it.
    """

    def __init__(self, variables: Sequence[keras.Variable], reducer: GradientReducer, is_split: bool):
        self.variables, self._reducer = list(variables), reducer
        self._topology = reducer.process_set.group("ShardedOptimizer").topology
        self._number = reducer.process_set.process_set_id or 0
        divided = [i for i, v in enumerate(variables) if not getattr(v, "overwrite_with_gradient", False)]
        self.plan = plan_of([_planned(v) for v in variables], self._topology.size, is_split, divided)
        self._parts = self.plan.parts(self._topology.rank)
        with tf.init_scope():
            self.shards = [self._shard(i, v) for i, v in enumerate(variables)]
        self.noting = _Noting(self.shards)
        self.slots: dict[int, int] = {}
        self._whole: tuple[int, list[np.ndarray]] | None = None
        self._shown: list[Any] | None = None
        self._applied: list[int] = []
        self._places = {id(each): i for i, v in enumerate(self.variables) for each in (v, v.value)}
        self._shard_places = {id(each): i for i, v in enumerate(self.shards) for each in (v, v.value)}

    def _shard(self, place: int, variable: keras.Variable) -> keras.Variable:
        part = self._parts.get(place)
        if part is None or (not self.plan.is_split and part.size):
            return variable
        shape = part.shape if self.plan.is_split else (0, *variable.shape[1:])
        shard = keras.Variable(np.zeros(shape, _planned(variable).dtype), dtype=variable.dtype, trainable=False,
                               name=variable.name)
        shard._path = variable.path  # Slots are named after it.
        return shard

    def note(self, slot: keras.Variable, reference: object = None) -> None:
        """Begin: the optimizer has made a variable, for `reference` or for the one that build() looks at."""
        place = self._shard_places.get(id(reference), self.noting.place)
        if place is not None and place in self._parts:
            self.slots[id(slot)] = place

    def place_of(self, variable: Variable) -> int:
        """The place of a variable that the optimizer trains.

        Raises:
            InvalidRequestError: It was not built for this variable.
        """
        place = self._places.get(id(variable))
        if place is None:
            raise InvalidRequestError(f"a sharded optimizer was not built for {label_of(variable)}. Call "
                                      "optimizer.build(variables) with all variables that it is to train.")
        return place

    # -- a step --------------------------------------------------------------------------------------------------------

    def reduce(self, gradients: Sequence[OptionalGradient]) -> list[OptionalGradient]:
        """This rank's parts of the reduced gradients of all variables. None stays None. Collective."""
        return self._reducer.reduce(gradients, self.variables, self._reduce_to_owners)

    def read(self, places: Sequence[int]) -> None:
        """Set the parts to the present values of the variables. Local."""
        for i in places:
            if self.plan.is_split and i in self._parts:
                self.shards[i].assign(_cut(tf.convert_to_tensor(self.variables[i]), self._parts[i]))

    def updated(self, places: Sequence[int]) -> list[int]:
        """Those of the variables that have a part here; if there is none, the first, so that the step counts."""
        return [i for i in places if i not in self._parts or self._parts[i].size] or list(places[:1])

    def begin(self, shards: Sequence[Variable]) -> None:
        """Begin to apply gradients to some of the shards."""
        self._applied = [self._shard_places[id(shard)] for shard in shards]

    def original_of(self, shard: Variable) -> Variable:
        """The variable of which `shard` is a part; both are Keras' or both are TensorFlow's."""
        original = self.variables[self._shard_places[id(shard)]]
        return original if isinstance(shard, keras.Variable) else original.value

    def squares(self, gradients: Sequence[Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sum of the squares of each gradient that is applied here, as a whole, and that of all. Collective."""
        own = [tf.zeros([])] * len(self.variables)
        for i, gradient in zip(self._applied, gradients, strict=True):
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            own[i] = tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
        sums = self._reducer.sum(tf.stack(own), "norms")
        each = tf.unstack(sums)
        return [each[i] for i in self._applied], tf.reduce_sum(sums)

    def publish(self, places: Sequence[int]) -> None:
        """Set the variables to the new parts of all ranks. Collective."""
        changed = set(places)
        for bucket in self.plan.buckets:
            blocks = [block for block in bucket if changed.intersection(block.members)]
            if not blocks:
                continue
            own = [tf.reshape(_joined([tf.reshape(self.shards[i], [-1]) for i in block.members]),
                              [block.rows[self._topology.rank], *block.shape[1:]]) for block in blocks]
            name = names.of(f"{self._reducer.name}/weights", self._number)
            gathered = gather_list(own, name, self._number, shapes=[tf.TensorShape(block.shape) for block in blocks])
            for block, flat in zip(blocks, gathered, strict=True):
                for i, value in zip(block.members, tf.split(tf.reshape(flat, [-1]), block.sizes), strict=True):
                    if i in changed and self.shards[i] is not self.variables[i]:
                        self.variables[i].assign(tf.reshape(value, self.variables[i].shape))

    def _reduce_to_owners(self, gradients: Sequence[Tensor], spec: ReduceSpec, options: GradientOptions,
                          variables: Sequence[Variable]) -> list[OptionalGradient]:
        """As gradients.reduce_gradients, but this rank's parts only; None for a variable without a part here."""
        places = list(spec.places)
        casts = options.compression in (Compression.none, Compression.fp16, Compression.bf16)
        on_host = call_site.device_of(list(gradients), self._number) is None and not call_site.are_on_gpu(
            [g for g in gradients if not isinstance(g, tf.IndexedSlices)], self._number)
        if self.plan.is_split and casts and on_host and not options.sparse_as_dense and options.groups.is_one:
            return self._scatter(dict(zip(places, gradients, strict=True)), spec, options)
        reduced = reduce_gradients(gradients, spec, options, variables)
        return [self._own(i, gradient) for i, gradient in zip(places, reduced, strict=True)]

    def _scatter(self, gradients: dict[int, Tensor], spec: ReduceSpec,
                 options: GradientOptions) -> list[OptionalGradient]:
        """Reduce-scatter each bucket, and gather tf.IndexedSlices."""
        spec = observed_eagerly(list(gradients.values()), spec)
        own: dict[int, OptionalGradient] = {}
        for i, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                own[i] = self._own(i, reduce_slices(gradient, replace(spec, name=f"{spec.name}/{i}")))
                spec = replace(spec, observer=None)
        buckets = [(number, [block for block in blocks if not gradients.keys().isdisjoint(block.members)
                             and not own.keys() >= set(block.members)])
                   for number, blocks in enumerate(self.plan.buckets)]
        for number, blocks in [each for each in buckets if each[1]]:
            arrays = [tf.reshape(_joined([tf.reshape(gradients[i], [-1]) if i in gradients and i not in own else
                                          tf.zeros([size], self.variables[i].dtype)
                                          for i, size in zip(block.members, block.sizes, strict=True)]), block.shape)
                      for block in blocks]
            compressed = Compressed(arrays, options.compression, by_host=True)
            name = f"{spec.name}/scatter{number}"
            shapes = [tf.TensorShape([block.rows[self._topology.rank], *block.shape[1:]]) for block in blocks]
            is_small = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in arrays) <= SUBMIT_WAIT_BYTES
            is_last = number == buckets[-1][0]
            make = partial(self._request, name, spec)
            scattered = compressed.restored(cpu.run(
                name, make, compressed.tensors, shapes, self._number,
                cpu.Wait.ALWAYS if is_small and is_last else cpu.Wait.NEVER, spec.observer, times_rows=0))
            spec = replace(spec, observer=None)
            for block, array in zip(blocks, scattered, strict=True):
                parts = block.parts(self._topology.rank)
                flat = tf.split(tf.reshape(array, [-1]), [part.size for part in parts])
                for i, part, value in zip(block.members, parts, flat, strict=True):
                    own.setdefault(i, tf.reshape(value, part.shape))
        return [own[i] for i in gradients]

    def _request(self, name: str, spec: ReduceSpec, arrays: Submitted) -> Request:
        return reducescatter_request(name, specs_of(arrays), spec.scaled, process_set=self._number)

    def _own(self, place: int, gradient: Tensor) -> OptionalGradient:
        """This rank's part of a reduced gradient."""
        part = self._parts[place]
        if not self.plan.is_split:
            return gradient if part.size else None
        return _rows_of(gradient, part) if isinstance(gradient, tf.IndexedSlices) else _cut(gradient, part)

    # -- the whole state -----------------------------------------------------------------------------------------------

    def shown(self, variables: Sequence[keras.Variable]) -> list[Any]:
        """What an optimizer with these variables shows: those that all ranks have, or in `showing` the whole state."""
        if self._shown is not None:
            return self._shown
        return [v for v in variables if id(v) not in self.slots]

    @contextmanager
    def showing(self, variables: Sequence[keras.Variable], steps: keras.Variable, is_read: bool) -> Iterator[None]:
        """A context in which `shown` has the whole state. What is assigned to it is divided. Local.

        Args:
            variables: All variables of the optimizer.
            steps: The one that counts steps.
            is_read: Whether the state is read.

        Raises:
            InvalidRequestError: It is read, and this rank does not have it.
        """
        whole = self._whole[1] if self._whole is not None and self._whole[0] == int(steps) else None
        if is_read and whole is None:
            raise InvalidRequestError(
                "this rank does not have the whole state of the sharded optimizer, which is to be saved or copied. "
                "Call optimizer.consolidate_state() on all ranks before, for rank 0, or consolidate_state(to=None) for "
                "all ranks. fit does so for rank 0 at the end of each epoch; a step makes it necessary again.")
        shown = [Whole(v, None if whole is None else whole[i], self) if id(v) in self.slots else v
                 for i, v in enumerate(variables)]
        self._shown = shown
        try:
            yield
        finally:
            self._shown = None
        if not is_read and all(not isinstance(each, Whole) or each.value is not None for each in shown):
            self._whole = int(steps), [np.asarray(each) for each in shown]

    def consolidate(self, variables: Sequence[keras.Variable], steps: keras.Variable, to: int | None) -> None:
        """Gather the optimizer's state on a rank of the job; None: on all. Collective, eager.

        Args:
            variables: All variables of the optimizer.
            steps: The one that counts steps.
            to: That rank.
        """
        self._whole = None
        keeps = to is None or to == self._topology.job_ranks[self._topology.rank]
        shapes: list[Any] = [self._shape_of(v) for v in variables]
        if not self.plan.is_split:
            of_ranks = array_ops.allgather_object(shapes, f"{self._name}/shapes", self._reducer.process_set)
            shapes = [next(shape for shape in of_slot if shape is not None) for of_slot in zip(*of_ranks, strict=True)]
        whole: list[Any] = [None] * len(variables)
        chunk: list[int] = []
        for i, variable in enumerate(variables):
            if id(variable) not in self.slots:
                whole[i] = np.array(variable)
                continue
            chunk.append(i)
            if sum(math.prod(shapes[j]) for j in chunk) * 4 > _STATE_BYTES:
                self._gather(chunk, variables, shapes, whole if keeps else None)
                chunk = []
        self._gather(chunk, variables, shapes, whole if keeps else None)
        self._whole = (int(steps), whole) if keeps else None

    def save(self, variables: Sequence[keras.Variable], steps: keras.Variable) -> list[Any]:
        """The state for `load`: the whole state, if this rank has it, which is forgotten then; else its parts. Local.

        Args:
            variables: All variables of the optimizer.
            steps: The one that counts steps.
        """
        whole, self._whole = self._whole, None
        if whole is not None and whole[0] == int(steps):
            return whole[1]
        return [tf.convert_to_tensor(v) for v in variables]

    def load(self, variables: Sequence[keras.Variable], steps: keras.Variable, saved: Sequence[Any]) -> None:
        """Return to what `save` has saved, also in another process and with another number of ranks. Local."""
        if not isinstance(saved[0], np.ndarray):
            for variable, value in zip(variables, saved, strict=True):
                variable.assign(value)
            return
        self._set(variables, saved)
        self._whole = int(steps), list(saved)

    def _set(self, variables: Sequence[keras.Variable], whole: Sequence[Any]) -> None:
        for variable, value in zip(variables, whole, strict=True):
            if id(variable) in self.slots:
                self.assign(variable, value)
            else:
                variable.assign(value)

    def forget(self) -> None:
        """Free the memory of a state that was gathered or loaded. Local."""
        self._whole = None

    def assign(self, slot: keras.Variable, value: TensorLike) -> None:
        """Set one of the optimizer's variables to this rank's part of a whole value. Local."""
        part = self._parts[self.slots[id(slot)]]
        if not part.size:
            return
        if self.plan.is_split:
            value = np.reshape(np.reshape(value, -1)[part.start:part.stop], part.shape)
        slot.assign(value)

    def share(self, variables: Sequence[keras.Variable], steps: keras.Variable, root: int) -> None:
        """Give all ranks their parts of the state that `root` has loaded, if it has loaded one. Collective, eager.

        Args:
            variables: All variables of the optimizer.
            steps: The one that counts steps.
            root: A rank of the job.
        """
        own = self._whole[1] if self._whole is not None and self._whole[0] == int(steps) else None
        kinds = array_ops.broadcast_object(
            None if own is None else [(value.shape, value.dtype) for value in own], root, f"{self._name}/loaded",
            self._reducer.process_set)
        if kinds is None:
            return
        given = own or [np.zeros(shape, dtype) for shape, dtype in kinds]
        values = broadcast_list([tf.convert_to_tensor(value) for value in given], root, f"{self._name}/loaded",
                                process_set=self._number)
        self.load(variables, steps, [np.array(value) for value in values])

    @property
    def _name(self) -> str:
        return f"{self._reducer.name}/state"

    def _gather(self, chunk: Sequence[int], variables: Sequence[keras.Variable], shapes: Sequence[Any],
                whole: list[Any] | None) -> None:
        """Gather the variables at some places into `whole`, unless it is None."""
        if not chunk:
            return
        flat = [tf.reshape(tf.convert_to_tensor(variables[i]), [-1]) for i in chunk]
        # A variable for a factor of the state (Adafactor) has elements on a rank without a part.
        own = [values[:values.shape[0] if self._parts[self.slots[id(variables[i])]].size else 0]
               for i, values in zip(chunk, flat, strict=True)]
        for i, values in zip(chunk, gather_list(own, self._name, self._number), strict=True):
            if whole is not None:
                whole[i] = np.array(values).reshape(shapes[i])

    def _shape_of(self, slot: keras.Variable) -> tuple[int, ...] | None:
        """The shape of the whole state, as far as this rank knows it."""
        place = self.slots.get(id(slot))
        if place is not None and self.plan.is_split:
            return tuple(self.variables[place].shape)
        return tuple(slot.shape) if place is None or self._parts[place].size else None


class Whole:
    """Stands for a variable of a sharded optimizer, with the whole state in place of this rank's part.

    Attributes:
        path, name: Those of the variable.
        value: The whole state; None until it is assigned.
    """

    def __init__(self, variable: keras.Variable, value: np.ndarray | None, parts: Parts):
        self.path, self.name, self.value = variable.path, variable.name, value
        self._variable, self._parts = variable, parts

    def numpy(self) -> np.ndarray:
        assert self.value is not None
        return self.value

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.numpy(), *args, **kwargs)

    def assign(self, value: TensorLike) -> None:
        self.value = np.array(value)
        self._parts.assign(self._variable, self.value)


def _planned(variable: keras.Variable) -> Planned:
    dtype = tf.as_dtype(variable.dtype)
    return Planned(tuple(variable.shape), dtype.name, dtype.size)


def _joined(flat: Sequence[tf.Tensor]) -> tf.Tensor:
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def _cut(tensor: tf.Tensor, part: Part) -> tf.Tensor:
    """A part of a dense tensor."""
    rows = tf.reshape(tensor, [-1] if part.width == 1 else [-1, part.width])
    return rows[part.start // part.width:part.stop // part.width]


def _rows_of(slices: tf.IndexedSlices, part: Part) -> tf.IndexedSlices:
    """The rows of tf.IndexedSlices that are in a part, in their order. Their values may be finer rows than slices."""
    each = slices.values.shape[1:].num_elements() // part.width
    values = tf.reshape(slices.values, [-1] if part.width == 1 else [-1, part.width])
    indices = tf.reshape(slices.indices[:, tf.newaxis] * each + tf.range(each, dtype=slices.indices.dtype), [-1])
    first, end = part.start // part.width, part.stop // part.width
    is_inside = tf.logical_and(indices >= first, indices < end)
    shape = tf.constant(part.shape, tf.int64)
    if not xla.is_compiled():
        return tf.IndexedSlices(tf.boolean_mask(values, is_inside), tf.boolean_mask(indices - first, is_inside), shape)
    # XLA must know how many rows there are: those of other ranks add nothing to the first row.
    mask = is_inside if part.width == 1 else is_inside[:, tf.newaxis]
    return tf.IndexedSlices(tf.where(mask, values, tf.zeros_like(values)),
                            tf.where(is_inside, indices - first, tf.zeros_like(indices)), shape)
