"""Plan: which rank updates which part of each variable. Parts: this rank's parts, and the collectives of a step.

As in ZeRO-1 (Rajbhandari et al., arXiv 1910.02054) each rank has the optimizer's state for its parts only.

A rank updates copies of its parts (shards), and all ranks gather the new weights. Variables that stay whole are updated
in place. A slot, an optimizer variable such as a momentum, has the shape of its shard. Without a part on this rank,
shard and slot have no elements. So all ranks have as many slots, in the same order, as the optimizer without sharding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, SupportsIndex

import keras
import numpy as np
import tensorflow as tf

from ...core.errors import InvalidRequestError
from ...core.fusion import buckets_from_last
from ...core.request import reducescatter_request, specs_of
from ...core.rows import rows_of_ranks
from ...core.tuning import BUCKET_BYTES, JOINED_TENSOR_BYTES, SUBMIT_WAIT_BYTES
from ...tensorflow.async_op import call_site
from ...tensorflow.bridge import names
from ...tensorflow.bridge.program_order import HOST
from ...tensorflow.bridge.types import OptionalGradient, Tensor, Variable
from ...tensorflow.compression import Compressed, Compression
from ...tensorflow.gradients import GradientOptions, GradientReducer, observed_eagerly, reduce_gradients
from ...tensorflow.graph import cpu
from ...tensorflow.graph.buckets import ReduceSpec, limits_of, submission_order
from ...tensorflow.kerases import label_of
from ...tensorflow.list_ops import gather_list, reduce_slices
from ...tensorflow.xla import context as xla

# -- the plan: the same on all ranks, balanced by bytes. Pure ----------------------------------------------------------

# A matrix is divided between rows if each rank gets at least so many: the gradient of an embedding has only some rows.
_LEAST_ROWS = 64


@dataclass(frozen=True)
class Planned:
    """A variable as the plan sees it: its shape, its dtype and the bytes of an element."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class Part:
    """The part of a variable that one rank updates: elements `start` to `stop` of the flat variable."""

    start: int
    stop: int
    width: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,) if self.width == 1 else (self.size // self.width, self.width)


@dataclass(frozen=True)
class Block:
    """Variables of one dtype, concatenated to one array for a collective, and how many of its rows each rank gets."""

    members: tuple[int, ...]  # The indices of the variables
    sizes: tuple[int, ...]  # The number of elements of each variable
    width: int  # The number of elements of a row of the array
    rows: tuple[int, ...]  # The number of rows of each rank, in rank order

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.rows),) if self.width == 1 else (sum(self.rows), self.width)

    def parts(self, rank: int) -> list[Part]:
        """Return a rank's part of each variable in the block. A part may be empty."""
        stop = sum(self.rows[:rank + 1]) * self.width
        start = stop - self.rows[rank] * self.width
        found = []
        for end, size in zip(accumulate(self.sizes), self.sizes, strict=True):
            first = min(max(start - end + size, 0), size)
            found.append(Part(first, max(min(stop - end + size, size), first), self.width))
        return found


@dataclass(frozen=True)
class Plan:
    """The division of the variables among the ranks."""

    # The blocks of each collective, in the order in which the backward pass computes gradients.
    buckets: tuple[tuple[Block, ...], ...]
    is_split: bool  # Whether a rank may have a part of a variable; False: whole variables only
    size: int  # The number of ranks

    def parts(self, rank: int) -> dict[int, Part]:
        """Return a rank's part of each variable, by the index of the variable."""
        return {member: part for bucket in self.buckets for block in bucket
                for member, part in zip(block.members, block.parts(rank), strict=True)}


def plan_of(tensors: Sequence[Planned], size: int, is_split: bool, indices: Sequence[int] | None = None,
            bucket_bytes: int = BUCKET_BYTES, first_bytes: int | None = None,
            small_bytes: int = JOINED_TENSOR_BYTES, owner: int | None = None) -> Plan:
    """Return the division of variables among `size` ranks, in buckets from the last variable to the first.

    Args:
        is_split: True: each rank gets an equal part of each large variable, and of the small variables together. False:
            variables stay whole. Each, the largest first, goes to the rank with the fewest bytes so far.
        indices: The indices of the variables to divide, in rising order; None: all.
        bucket_bytes, first_bytes: The most bytes of a bucket, and of the first bucket (None: `bucket_bytes`).
        small_bytes: Variables with fewer bytes are small, and are concatenated.
        owner: The rank that gets all variables as a whole; None: all ranks get some.
    """
    indices = range(len(tensors)) if indices is None else indices
    groups = buckets_from_last([tensors[index].nbytes for index in indices], bucket_bytes, first_bytes)
    owners = dict.fromkeys(indices, owner) if owner is not None else {} if is_split else _owners(tensors, indices, size)
    return Plan(tuple(tuple(_blocks(tensors, [indices[i] for i in group], size, owners, small_bytes))
                      for group in groups), is_split, size)


def _blocks(tensors: Sequence[Planned], group: Sequence[int], size: int, owners: dict[int, int],
            small_bytes: int) -> list[Block]:
    joined: dict[str, list[int]] = {}
    blocks = []
    for index in group:
        tensor = tensors[index]
        if owners or tensor.nbytes < small_bytes:
            joined.setdefault(tensor.dtype, []).append(index)
            continue
        width = tensor.shape[-1] if len(tensor.shape) == 2 and tensor.shape[0] >= _LEAST_ROWS * size else 1
        blocks.append(Block((index,), (tensor.size,), width, tuple(rows_of_ranks(tensor.size // width, size))))
    for members in joined.values():
        if owners:
            members.sort(key=lambda index: (owners[index], index))
            rows = [sum(tensors[index].size for index in members if owners[index] == rank) for rank in range(size)]
        else:
            rows = rows_of_ranks(sum(tensors[index].size for index in members), size)
        blocks.append(Block(tuple(members), tuple(tensors[index].size for index in members), 1, tuple(rows)))
    return blocks


def _owners(tensors: Sequence[Planned], indices: Sequence[int], size: int) -> dict[int, int]:
    """Return the rank that gets each variable as a whole, by the index of the variable."""
    loads, owners = [0] * size, {}
    for index in sorted(indices, key=lambda index: (-tensors[index].nbytes, index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += tensors[index].nbytes
    return owners


# -- a rank's parts, and the exchanges of a step -----------------------------------------------------------------------


class _Noting(list):
    """A list of shards to pass to an optimizer's build(). `current`: the index of the shard that build()'s loop is at.

    Slices have the trained variables, not the shards: build() stores a slice as the variables that it was built for.
    """

    def __init__(self, shards: Sequence[keras.Variable], variables: Sequence[keras.Variable]):
        super().__init__(shards)
        self.current: int | None = None
        self._variables = list(variables)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        return self._variables[key] if isinstance(key, slice) else super().__getitem__(key)

    def __iter__(self) -> Iterator[keras.Variable]:
        for self.current, variable in enumerate(super().__iter__()):
            yield variable
        self.current = None


class Parts:
    """This rank's parts of the variables of a sharded optimizer. Not thread-safe, like the optimizer.

    Attributes:
        variables: The variables that the optimizer trains, the same on all ranks.
        reducer: The reducer of the gradients, with a process set of several ranks.
        topology, number: The topology and the id of this process set.
        of_index: This rank's part of each variable, by the index in `variables`.
        shards: What this rank updates for each variable: a variable with this rank's part; the variable itself, if this
            rank has the whole variable or gradients overwrite it; or a variable without elements.
        noting: The list of shards to pass to build(). `note` records the optimizer's variables that build() makes.
        slots: The index of the trained variable to which an optimizer variable belongs, by the optimizer variable's id.
    """

    def __init__(self, variables: Sequence[keras.Variable], reducer: GradientReducer, is_split: bool,
                 owner: int | None = None):
        self.variables, self.reducer = list(variables), reducer
        self.topology = reducer.process_set.group("ShardedOptimizer").topology
        self.number = reducer.process_set.process_set_id or 0
        divided = [i for i, v in enumerate(variables) if not getattr(v, "overwrite_with_gradient", False)]
        self.plan = plan_of([_planned(v) for v in variables], self.topology.size, is_split, divided,
                            *limits_of(0, None), owner=owner)
        self.of_index = self.plan.parts(self.topology.rank)
        with tf.init_scope():
            self.shards = [self._shard(i, v) for i, v in enumerate(variables)]
        self.noting = _Noting(self.shards, self.variables)
        self.slots: dict[int, int] = {}
        self._applied: list[int] = []
        self._indices = {id(each): i for i, v in enumerate(self.variables) for each in (v, v.value)}
        self._shard_indices = {id(each): i for i, v in enumerate(self.shards) for each in (v, v.value, _component(v))}

    def _shard(self, index: int, variable: keras.Variable) -> keras.Variable:
        part = self.of_index.get(index)
        if part is None or (not self.plan.is_split and part.size):
            return variable
        # Not (0, 3): keras.ops.add takes such a value for a bias, and fails.
        shape = part.shape if self.plan.is_split else (0, *(1 for _ in variable.shape[1:]))
        shard = keras.Variable(np.zeros(shape, _planned(variable).dtype), dtype=variable.dtype, trainable=False,
                               name=variable.name)
        shard._path = variable.path  # Slots are named after this path.
        return shard

    @contextmanager
    def made_for(self, reference: object) -> Iterator[None]:
        """Return a context in which new variables of the optimizer belong to the shard `reference`."""
        before, self.noting.current = self.noting.current, self._shard_indices.get(id(reference), self.noting.current)
        try:
            yield
        finally:
            self.noting.current = before

    def note(self, slot: keras.Variable) -> None:
        """Record the shard of `slot`, a new optimizer variable: that of made_for(), or else that of build()'s loop."""
        index = self.noting.current
        if index is not None and index in self.of_index:
            self.slots[id(slot)] = index

    def index_of(self, variable: Variable) -> int:
        """Return the index of a variable. Raises InvalidRequestError if the optimizer was not built for it."""
        index = self._indices.get(id(variable))
        if index is None:
            raise InvalidRequestError(f"the sharded optimizer was not built for the variable {label_of(variable)}. "
                                      "Call optimizer.build(variables) with all variables to train.")
        return index

    # -- a step --------------------------------------------------------------------------------------------------------

    def reduce(self, gradients: Sequence[OptionalGradient]) -> list[OptionalGradient]:
        """Reduce the gradients of all variables, and return this rank's part of each. None stays None. Collective."""
        return self.reducer.reduce(gradients, self.variables, self._reduce_to_owners)

    def read(self, indices: Sequence[int]) -> None:
        """Copy the present values of these variables into this rank's shards. Local."""
        for i in indices:
            if self.plan.is_split and i in self.of_index:
                self.shards[i].assign(_cut(tf.convert_to_tensor(self.variables[i]), self.of_index[i]))

    def updated(self, indices: Sequence[int]) -> list[int]:
        """Return those of `indices` that this rank updates; if none, the first one, so that Keras counts the step."""
        return [i for i in indices if i not in self.of_index or self.of_index[i].size] or list(indices[:1])

    def begin(self, shards: Sequence[Variable]) -> None:
        """Remember the shards to which gradients are about to be applied. `squares` needs them."""
        self._applied = [self._shard_indices[id(shard)] for shard in shards]

    def original_of(self, shard: Variable) -> Variable:
        """Return the variable of which `shard` is a part: a Keras variable or a tf.Variable, as `shard` is."""
        original = self.variables[self._shard_indices[id(shard)]]
        return original if isinstance(shard, keras.Variable) else original.value

    def squares(self, gradients: Sequence[Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the squared norm of each whole gradient, from its parts, and of all gradients together. Collective."""
        dtype = tf.float64 if any(v.dtype == "float64" for v in self.variables) else tf.float32
        own = [tf.zeros([], dtype)] * len(self.variables)
        for i, gradient in zip(self._applied, gradients, strict=True):
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            own[i] = tf.reduce_sum(tf.square(tf.cast(values, dtype)))
        sums = self.reducer.sum(tf.stack(own), "norms")
        each = tf.unstack(sums)
        return [each[i] for i in self._applied], tf.reduce_sum(sums)

    def publish(self, indices: Sequence[int]) -> None:
        """Gather the updated parts of all ranks, and assign them to these variables. Collective."""
        changed, assigned = set(indices), list[list[tf.Operation]]()
        for bucket in self.plan.buckets:
            blocks = [block for block in bucket if changed.intersection(block.members)]
            if not blocks:
                continue
            own = [tf.reshape(_joined([tf.reshape(self.shards[i], [-1]) for i in block.members]),
                              [block.rows[self.topology.rank], *block.shape[1:]]) for block in blocks]
            name = names.of(f"{self.reducer.name}/weights", self.number)
            # At most two buckets are in flight: the results of all buckets would need the memory of a second model.
            with tf.control_dependencies(assigned.pop(0) if len(assigned) == 2 else []):
                gathered = gather_list(own, name, self.number, shapes=[tf.TensorShape(block.shape) for block in blocks])
            assigned.append([])
            for block, flat in zip(blocks, gathered, strict=True):
                for i, value in zip(block.members, tf.split(tf.reshape(flat, [-1]), block.sizes), strict=True):
                    if i in changed and self.shards[i] is not self.variables[i]:
                        assignment = _component(self.variables[i]).assign(
                            tf.reshape(value, self.variables[i].shape), read_value=False)
                        assigned[-1] += [] if assignment is None else [assignment]

    def _reduce_to_owners(self, gradients: Sequence[Tensor], spec: ReduceSpec, options: GradientOptions,
                          variables: Sequence[Variable],
                          exact: Mapping[str, tf.Tensor] = MappingProxyType({})) -> list[Tensor]:
        """Return this rank's parts of the reduced gradients, then the reduced scalars of `exact`, never compressed."""
        indices = list(spec.indices)
        casts = options.compression in (Compression.none, Compression.fp16, Compression.bf16)
        dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
        on_gpu = call_site.are_on_gpu(dense, self.number) if tf.executing_eagerly() else \
            call_site.device_of(dense, self.number) or xla.device_here() != HOST
        has_one = not options.sparse_as_dense and options.groups.is_one
        if dense and self.plan.is_split and casts and not on_gpu and has_one:
            return self._scatter(dict(zip(indices, gradients, strict=True)), spec, options, list(exact.values()))
        reduced = reduce_gradients(gradients, spec, options, variables, exact)
        return [self._own(i, gradient) for i, gradient in zip(indices, reduced, strict=False)] + reduced[len(indices):]

    def _scatter(self, gradients: dict[int, Tensor], spec: ReduceSpec, options: GradientOptions,
                 exact: list[tf.Tensor]) -> list[Tensor]:
        """Reduce-scatter the buckets, and gather tf.IndexedSlices. `exact` is summed together with the last bucket."""
        spec = observed_eagerly(list(gradients.values()), spec)
        own: dict[int, Tensor] = {}
        for i, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                own[i] = self._own(i, reduce_slices(gradient, replace(spec, name=f"{spec.name}/{i}")))
                spec = replace(spec, observer=None)
        buckets = [(number, [block for block in blocks if not gradients.keys().isdisjoint(block.members)
                             and not own.keys() >= set(block.members)])
                   for number, blocks in enumerate(self.plan.buckets)]
        buckets = [each for each in buckets if each[1]]
        order = submission_order([[gradients[i] for block in blocks for i in block.members
                                   if i in gradients and i not in own] for _, blocks in buckets])
        for index in order:
            number, blocks = buckets[index]
            arrays = [tf.reshape(_joined([tf.reshape(gradients[i], [-1]) if i in gradients and i not in own else
                                          tf.zeros([size], self.variables[i].dtype)
                                          for i, size in zip(block.members, block.sizes, strict=True)]), block.shape)
                      for block in blocks]
            compressed = Compressed(arrays, options.compression, is_scattered=True, process_set=self.number)
            name = f"{spec.name}/scatter{number}"
            shapes = [tf.TensorShape([block.rows[self.topology.rank], *block.shape[1:]]) for block in blocks]
            is_small = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in arrays) <= SUBMIT_WAIT_BYTES
            is_last = index == order[-1]
            make = partial(lambda name, scaled, arrays: reducescatter_request(
                name, specs_of(arrays), scaled, process_set=self.number), name, spec.scaled)
            more = [tf.fill([self.topology.size], value) for value in exact] if is_last else []
            sent = cpu.run(name, make, [*compressed.tensors, *more], [*shapes, *(tf.TensorShape([1]) for _ in more)],
                           self.number, cpu.Wait.ALWAYS if is_small and is_last else cpu.Wait.NEVER, spec.observer,
                           times_rows=0)
            scattered, totals = compressed.restored(sent[:len(arrays)]), sent[len(arrays):]
            spec = replace(spec, observer=None)
            for block, array in zip(blocks, scattered, strict=True):
                parts = block.parts(self.topology.rank)
                flat = tf.split(tf.reshape(array, [-1]), [part.size for part in parts])
                for i, part, value in zip(block.members, parts, flat, strict=True):
                    own.setdefault(i, tf.reshape(value, part.shape))
        return [*(own[i] for i in gradients), *map(tf.squeeze, totals)]

    def _own(self, index: int, gradient: Tensor) -> Tensor:
        """Return this rank's part of a reduced gradient."""
        part = self.of_index[index]
        if not self.plan.is_split:
            # A rank without a part makes the step too, for the first variable and without elements.
            return gradient if part.size else tf.zeros(self.shards[index].shape, gradient.dtype)
        return _rows_of(gradient, part) if isinstance(gradient, tf.IndexedSlices) else _cut(gradient, part)


def _component(variable: keras.Variable) -> tf.Variable:
    """Return the tf.Variable in a Keras variable. Under a strategy it is inside the strategy's own variable."""
    return getattr(variable.value, "values", [variable.value])[0]


def _planned(variable: keras.Variable) -> Planned:
    dtype = tf.as_dtype(variable.dtype)
    return Planned(tuple(variable.shape), dtype.name, dtype.size)


def _joined(flat: Sequence[tf.Tensor]) -> tf.Tensor:
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def _cut(tensor: tf.Tensor, part: Part) -> tf.Tensor:
    """Return a part of a dense tensor."""
    rows = tf.reshape(tensor, [-1] if part.width == 1 else [-1, part.width])
    return rows[part.start // part.width:part.stop // part.width]


def _rows_of(slices: tf.IndexedSlices, part: Part) -> tf.IndexedSlices:
    """Return the rows of tf.IndexedSlices that are in a part, in order. A slice may contain several rows of a part."""
    each = slices.values.shape[1:].num_elements() // part.width
    values = tf.reshape(slices.values, [-1] if part.width == 1 else [-1, part.width])
    indices = tf.reshape(slices.indices[:, tf.newaxis] * each + tf.range(each, dtype=slices.indices.dtype), [-1])
    first, end = part.start // part.width, part.stop // part.width
    is_inside = tf.logical_and(indices >= first, indices < end)
    shape = tf.constant(part.shape, tf.int64)
    if not xla.is_compiled():
        return tf.IndexedSlices(tf.boolean_mask(values, is_inside), tf.boolean_mask(indices - first, is_inside), shape)
    # XLA needs a fixed number of rows: the rows of other ranks become zeros, which are added to the first row.
    mask = is_inside if part.width == 1 else is_inside[:, tf.newaxis]
    return tf.IndexedSlices(tf.where(mask, values, tf.zeros_like(values)),
                            tf.where(is_inside, indices - first, tf.zeros_like(indices)), shape)
