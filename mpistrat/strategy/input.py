"""Datasets of a strategy: each rank reads its part of every global batch. TensorFlow's code shards and rebatches.

Here the auto-shard policy AUTO has a different meaning than in TensorFlow, because TensorFlow's AUTO may change rows.
It shards by files as far as possible. If it then finds a source without files, it also shards by rows: a zip of files
and arrays then pairs rows with wrong labels (TensorFlow 2.21, grappler/optimizers/data/auto_shard.cc). With sharding by
files, `take`, `skip` and `zip` also count only the rows of this rank. Here AUTO means FILE if FILE does not change
which rows the dataset has, and otherwise DATA.

The datasets of different ranks may end at different times. So TensorFlow runs a collective before each step, to find
out whether any rank has more data. No such collective runs if all ranks are known to have the same number of batches.
"""

import functools
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.input_lib import InputWorkers
from tensorflow.python.distribute.input_util import get_distributed_dataset, get_distributed_datasets_from_function
from tensorflow.python.eager.context import context, global_seed

from ..api import array_ops, runtime
from ..api.sharding import is_in_own_order
from ..core.errors import InvalidRequestError
from ..core.topology import Topology, describe_by_rank
from ..tensorflow.bridge import names
from ..tensorflow.consistency import ADVICE, difference, sources_of

logger = logging.getLogger(__name__)

InputOptions: TypeAlias = tf.distribute.InputOptions | None
_Policy = tf.data.experimental.AutoShardPolicy
# The kinds of datasets that TensorFlow shards by files.
_READERS = ("ArrayRecordDataset", "FixedLengthRecordDataset", "RecordIODataset", "SSTableDataset", "TextLineDataset",
            "TFRecordDataset")
# The kinds of datasets whose rows depend on other rows, so that sharding their inputs by files changes the rows. A
# cache in memory has all rows if the program has read the cache before, and keeps them when the dataset is sharded.
_OF_ALL_ROWS = ("Cache", "Shard", "Skip", "Take", "Window", "Zip")

_in_order: ContextVar[bool] = ContextVar("mpistrat_rows_in_order", default=False)


@contextmanager
def rows_in_order() -> Iterator[None]:
    """A context in which the shard policy AUTO keeps the order of rows: each step takes the next global batch."""
    before = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(before)


class Pipelines:
    """Creates the distributed datasets of a strategy. `topology`: Returns the current topology."""

    def __init__(self, strategy: tf.distribute.Strategy, topology: Callable[[], Topology], device: str):
        self._strategy, self._topology, self._device = strategy, topology, device

    @property
    def _rank(self) -> int:
        return self._topology().rank

    @property
    def _size(self) -> int:
        return self._topology().size

    def distribute(self, dataset: tf.data.Dataset, options: InputOptions) -> tf.distribute.DistributedDataset:
        """Return this rank's part of a dataset of global batches. Collective.

        Raises NotImplementedError: For InputReplicationMode.PER_REPLICA. ValueError: On every rank, if the elements
        differ among the ranks in structure, dtype or shape (except the number of rows), or if the policy is FILE and
        TensorFlow cannot shard by files, for example because there are fewer files than ranks.
        """
        if options is not None and _is_per_replica(options):
            raise NotImplementedError("InputReplicationMode.PER_REPLICA is only supported in "
                                      "`distribute_datasets_from_function`.")
        policy = dataset.options().experimental_distribute.auto_shard_policy
        compares = policy != _Policy.OFF and runtime.current().settings.is_checked
        batches, most, same = self._agree(dataset, sources_of(dataset) if compares and self._size > 1 else [])
        if self._size > 1:
            dataset = _with_own_memory(dataset)
            if policy == _Policy.OFF and self._rank == 0:
                _say_once(f"AutoShardPolicy.OFF: each rank reads its whole dataset, and a batch of B rows becomes "
                          f"{self._size} steps with B / {self._size} rows on each rank. So B is the size of the global "
                          "batch, as with the other policies.")
        if self._size > 1 and policy in (_Policy.AUTO, _Policy.FILE) and any(map(_has_reader, _parts_of(dataset))):
            by_files, problem = self._by_files(dataset, policy, options)
            if by_files is not None:
                return by_files
            if policy == _Policy.FILE:
                raise InvalidRequestError(f"{problem} Write options.experimental_distribute.auto_shard_policy = "
                                          "tf.data.experimental.AutoShardPolicy.DATA, or make more files.")
            if self._rank == 0:
                _say_once(f"AutoShardPolicy.AUTO: {problem} So each rank reads all files and takes its share of the "
                          "rows.")
            if not _reads_generator(dataset):  # A generator may end at another time on each rank.
                policy = _Policy.DATA
        if self._size > 1 and policy in (_Policy.AUTO, _Policy.DATA):
            # Each rank reads all rows, which must have one order on all ranks.
            if self._rank == 0 and any(getattr(part, "_deterministic", "") == "false" for part in _parts_of(dataset)):
                _say_once("a part of the dataset has deterministic=False. The order of rows may differ among the "
                          "ranks, so rows may be left out or read twice. Leave out deterministic=False.")
            dataset = _with_policy(dataset, _Policy.DATA)
        if policy != _Policy.OFF:
            self._warn_of_own_order([dataset])
        distributed = self._distributed(dataset, options)
        if same and (policy == _Policy.DATA or batches != tf.data.UNKNOWN_CARDINALITY):
            distributed._enable_get_next_as_optional = False  # the collective before each step
        if self._size > 1 and policy == _Policy.OFF:
            # Each rank reads all parts of its batches, and goes on until the last rank has finished. Keras counts the
            # batches before they are split, and gets the number of steps from this attribute.
            distributed.mpistrat_steps = most * self._size if most >= 0 else None
        return distributed

    def _warn_of_own_order(self, divided: list[tf.data.Dataset]) -> None:
        """Log a warning on rank 0 if the ranks divide datasets that have a random order without a seed. Local."""
        is_checked = self._size > 1 and self._rank == 0 and runtime.current().settings.is_checked
        if is_checked and any(map(is_in_own_order, divided)):
            _say_once("mpistrat: each rank shuffles the dataset in a different order before it takes its part, so rows "
                      "may be read by several ranks, or by none. Make the strategy before the dataset, because the "
                      "strategy seeds TensorFlow on all ranks, or pass a seed to shuffle().")

    def _distributed(self, dataset: tf.data.Dataset, options: InputOptions) -> tf.distribute.DistributedDataset:
        is_split = self._size > 1 and any(map(_is_split_by_rows, tf.nest.flatten(dataset.element_spec)))
        distributed = get_distributed_dataset(
            _sparse_by_rows(dataset) if is_split else dataset, self._workers(options), self._strategy,
            num_replicas_in_sync=self._size, input_context=self._context(), options=self._iteration(options))
        if is_split:
            part, = _datasets_of(distributed)
            return self._of_function(lambda _: _sparse_again(part, dataset.element_spec), options)
        return self._read_ahead(distributed, options)

    def _of_function(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
                     options: InputOptions) -> tf.distribute.DistributedDataset:
        return self._read_ahead(get_distributed_datasets_from_function(
            dataset_fn, self._workers(options), [self._context()], self._strategy, self._iteration(options)), options)

    def _by_files(self, dataset: tf.data.Dataset, policy: tf.data.experimental.AutoShardPolicy,
                  options: InputOptions) -> tuple[tf.distribute.DistributedDataset | None, str]:
        """Return (the dataset sharded by files, ""), or (None, the reason why not), the same on all ranks. Collective.

        With the policy AUTO the dataset is also None if sharding by files would change the rows or their order.
        """
        distributed, own, names_of_files = None, "", _names_of_files(dataset)
        if policy == _Policy.AUTO and _in_order.get():
            own = "sharding by files would change the order of the rows."
        elif policy == _Policy.AUTO and names_of_files is None:
            own = ("sharding by files would change the rows of a dataset that zips, caches or counts rows (take, skip, "
                   "window, shard), or also has rows in memory.")
        else:
            try:
                distributed = self._distributed(_with_policy(dataset, _Policy.FILE), options)
                counts = [int(names.cardinality()) for names in names_of_files or ()]
                if not counts or tf.data.UNKNOWN_CARDINALITY in counts:
                    # TensorFlow raises the error with the first element, and not on every rank.
                    for _ in _datasets_of(distributed)[0].take(1):
                        break
                elif any(0 <= count < self._size for count in counts):
                    own = f"rank {self._rank}: the dataset has fewer files than the {self._size} ranks."
            except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
                if "FILE based sharding" in str(error):
                    own = f"rank {self._rank}: the dataset has fewer files than the {self._size} ranks."
                elif distributed is None:
                    own = f"TensorFlow cannot shard the dataset by files ({error.message.split(':')[0]})."
                else:
                    raise
        everybody = array_ops.allgather_object(own, names.eager("strategy/files_of_input"))
        problem = next((problem for problem in everybody if problem), "")
        if problem:
            return None, problem
        self._warn_of_own_order(names_of_files or [dataset])
        return distributed, ""

    def distribute_from_function(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
                                 options: InputOptions) -> tf.distribute.DistributedDataset:
        """Return the dataset of `dataset_fn` as a distributed dataset. It is not sharded or rebatched. Collective."""
        if options is not None and _is_per_replica(options):
            raise NotImplementedError("MPIStrategy has one replica per process, so InputReplicationMode.PER_REPLICA "
                                      "has no meaning. Leave it out.")
        distributed = self._of_function(dataset_fn, options)
        batches, _, same = self._agree(_datasets_of(distributed)[0], [])
        if same and batches != tf.data.UNKNOWN_CARDINALITY:
            distributed._enable_get_next_as_optional = False
        return distributed

    def _context(self) -> tf.distribute.InputContext:
        return tf.distribute.InputContext(self._size, self._rank, self._size)

    def _workers(self, options: InputOptions) -> InputWorkers:
        return InputWorkers([("/device:CPU:0", ("/device:CPU:0" if self._reads_on_host(options) else self._device,))])

    def _reads_on_host(self, options: InputOptions) -> bool:
        return "GPU" not in self._device or (options is not None and not options.experimental_fetch_to_device)

    def _iteration(self, options: InputOptions) -> InputOptions:
        """If the input is read on the host, return options for a plain iterator; else return `options`.

        TensorFlow's usual iterator is for several GPUs. On the host it would add two threads per epoch. One of these
        threads (C++) has crashed twice in some thousands of epochs (TensorFlow 2.21), while Keras deleted an iterator.
        """
        if not self._reads_on_host(options):
            return options
        return tf.distribute.InputOptions(  # With one replica PER_REPLICA has no other effect.
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)

    def _read_ahead(self, distributed: tf.distribute.DistributedDataset,
                    options: InputOptions) -> tf.distribute.DistributedDataset:
        """If the input is read on the host, add a prefetch buffer, which the plain iterator (`_iteration`) lacks."""
        size = 1 if options is None else options.experimental_per_replica_buffer_size
        if self._reads_on_host(options) and size:
            datasets = _datasets_of(distributed)
            datasets[:] = [dataset.prefetch(size) for dataset in datasets]
        return distributed

    def _agree(self, dataset: tf.data.Dataset, sources: list[str]) -> tuple[int, int, bool]:
        """Return this rank's number of batches, the ranks' largest number, and whether all ranks have the same number.

        Collective. The largest number is UNKNOWN_CARDINALITY if any rank's number is unknown or infinite. Rank 0 logs a
        warning if the ranks have different `sources` of data.
        """
        if not tf.executing_eagerly():
            return tf.data.UNKNOWN_CARDINALITY, tf.data.UNKNOWN_CARDINALITY, False
        batches = int(dataset.cardinality())
        kind = str(tf.nest.map_structure(_kind, dataset.element_spec))
        everybody = array_ops.allgather_object((batches, kind, sources), names.eager("strategy/input"))
        kinds = [other for _, other, _ in everybody]
        if len(set(kinds)) > 1:
            raise ValueError(f"the ranks' datasets differ in structure, dtype or shape: {describe_by_rank(kinds)}")
        differs = difference([sources for *_, sources in everybody])
        if differs and self._rank == 0:
            _say_once(f"mpistrat: the ranks have different data: {differs}. {ADVICE}")
        counts = [other for other, *_ in everybody]
        return batches, max(counts) if min(counts) >= 0 else tf.data.UNKNOWN_CARDINALITY, len(set(counts)) == 1


@functools.cache  # Each evaluation distributes its data again.
def _say_once(text: str) -> None:
    logger.warning("%s", text)


def _kind(spec: tf.TypeSpec) -> str:
    """Return the part of a spec that must be equal on all ranks, as text: everything but the number of rows."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None:
        return str(spec)
    return f"{spec.dtype.name}{[None, *shape.as_list()[1:]] if shape.rank else []}"


def _parts_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all its direct and indirect inputs."""
    yield dataset
    for other in dataset._inputs():
        yield from _parts_of(other)


def _operations(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yield the class name of a dataset, and the operation types in its functions; nothing of its inputs."""
    yield type(dataset).__name__
    for wrapper in dataset._functions():
        graph_def = wrapper.function.graph.as_graph_def()
        for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
            yield from (node.op for node in nodes)


def _has_reader(dataset: tf.data.Dataset) -> bool:
    return any(reader in operation for operation in _operations(dataset) for reader in _READERS)


def _names_of_files(dataset: tf.data.Dataset) -> list[tf.data.Dataset] | None:
    """Return the datasets of file names that policy FILE divides among the ranks; None if FILE would change the rows.

    FILE keeps the rows of all ranks together if every row comes from a file, and no later dataset mixes rows.
    """
    if _has_reader(dataset):
        return list(getattr(dataset, "_impl", dataset)._inputs())
    found = [_names_of_files(other) for other in dataset._inputs()]
    if not found or None in found or type(dataset).__name__.strip("_").removesuffix("Dataset") in _OF_ALL_ROWS:
        return None
    return [names for part in found for names in part or ()]


def _with_policy(dataset: tf.data.Dataset, policy: tf.data.experimental.AutoShardPolicy) -> tf.data.Dataset:
    """Return the dataset with a policy. DATA also makes the order of rows deterministic, so equal on all ranks."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    if policy == _Policy.DATA and dataset.options().deterministic is False:
        options.deterministic = True
    return dataset.with_options(options)


def _datasets_of(distributed: tf.distribute.DistributedDataset) -> list[tf.data.Dataset]:
    """Return TensorFlow's list of the datasets of this process' workers. A process has one worker."""
    found: list[tf.data.Dataset] = getattr(distributed, "_cloned_datasets", None) or distributed._datasets
    return found


def takes_from_generator(distributed: tf.distribute.DistributedDataset) -> bool:
    """Return whether a distributed dataset reads a Python generator, which may yield each element only once."""
    return any(map(_reads_generator, _datasets_of(distributed)))


def _reads_generator(dataset: tf.data.Dataset) -> bool:
    return any(operation == "GeneratorDataset" for part in _parts_of(dataset) for operation in _operations(part))


def _with_own_memory(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that copies each element, if Python code makes the elements; else return `dataset`.

    TensorFlow does not copy the arrays that a generator yields, and writes results into their memory after it has split
    an element into the parts of the ranks: the user's arrays would change. (TensorFlow 2.21 itself has this fault.)
    """
    if not any(operation in ("PyFunc", "EagerPyFunc", "PyFuncStateless")
               for part in _parts_of(dataset) for operation in _operations(part)):
        return dataset
    # The spec keeps an element's structure, also a tuple of one.
    return dataset.map(lambda *element: tf.nest.pack_sequence_as(dataset.element_spec, [
        tf.raw_ops.DeepCopy(x=x) if isinstance(x, tf.Tensor) and x.dtype != tf.string else x
        for x in tf.nest.flatten(element)]))


def _is_split_by_rows(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.SparseTensorSpec) and bool(spec.shape.rank)


def _sparse_by_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset with ragged indices, ragged values and the shape of each row in place of each sparse tensor.

    TensorFlow can split ragged tensors into the parts of the ranks. For sparse tensors it fails if a part has no rows
    ("Serialized sparse should have at least 1 serialized tensor"), or if the indices are not sorted. scipy's matrices
    may have column order or no order.
    """
    def by_rows(x: tf.Tensor) -> tf.Tensor | tuple[tf.Tensor, ...]:
        if not isinstance(x, tf.SparseTensor):
            return x
        x = tf.sparse.reorder(x)
        row, nrows = x.indices[:, 0], x.dense_shape[0]
        return (tf.RaggedTensor.from_value_rowids(x.indices[:, 1:], row, nrows, validate=False),
                tf.RaggedTensor.from_value_rowids(x.values, row, nrows, validate=False),
                tf.broadcast_to(x.dense_shape[1:], [nrows, len(x.shape) - 1]))

    return dataset.map(lambda *element: tuple(by_rows(leaf) for leaf in tf.nest.flatten(element)))


def _sparse_again(dataset: tf.data.Dataset, spec: object) -> tf.data.Dataset:
    """Undo `_sparse_by_rows`. `spec`: The element spec of the original dataset."""
    def sparse(of: tf.TypeSpec, indices: tf.RaggedTensor, values: tf.RaggedTensor, shapes: tf.Tensor) -> tf.Tensor:
        # In a part without rows the sizes that the spec does not know are lost, and become 0.
        known = tf.constant([0 if size is None else size for size in of.shape[1:]], tf.int64)
        rest = tf.reduce_max(tf.concat([shapes, known[tf.newaxis]], 0), 0)
        # Without rows a ragged tensor loses the shape of its values.
        columns = tf.reshape(indices.values, [tf.size(values.values), len(of.shape) - 1])
        whole = tf.concat([values.value_rowids()[:, tf.newaxis], columns], 1)
        result = tf.SparseTensor(whole, values.values, tf.concat([[values.nrows()], rest], 0))
        result.set_shape([None, *of.shape[1:]])
        return result

    leaves = tf.nest.flatten(spec)
    return dataset.map(lambda *parts: tf.nest.pack_sequence_as(
        spec, [sparse(of, *part) if _is_split_by_rows(of) else part for part, of in zip(parts, leaves, strict=True)]))


def _is_per_replica(options: tf.distribute.InputOptions) -> bool:
    return options.experimental_replication_mode == tf.distribute.InputReplicationMode.PER_REPLICA


# -- equal random states on all ranks: the ranks shuffle the data in the same order, and then each takes its part ------

_VERSION = random.getstate()[0]  # The version of the state of Python's `random`, the same on all ranks


def seed_alike() -> None:
    """Seed TensorFlow on all ranks with the seed of rank 0, or with a random seed if rank 0 has none. Collective."""
    seed = _drawn() if global_seed() is None else global_seed()
    tf.random.set_seed(int(array_ops.broadcast(np.int64(seed), 0, name=names.eager("strategy/seed"))))


@contextmanager
def state_of_first_rank() -> Iterator[None]:
    """A context in which all ranks shuffle with the random state of rank 0. Collective.

    At the end all ranks but rank 0 restore their random states of TensorFlow. Python's `random` keeps the state of rank
    0 on all ranks, because Keras shuffles a PyDataset with it later, in another thread.
    """
    own = _state()
    if own[0] is None:
        tf.random.set_seed(_drawn())
    seed, numbers, python = _from_array(array_ops.broadcast(_as_array(_state()), 0, names.eager("strategy/random")))
    _set(seed, numbers)
    random.setstate(python)
    try:
        yield
    finally:
        if runtime.current().topology.rank != 0:  # Rank 0 keeps its new state, as a single process would.
            _set(own[0], own[1])


def _drawn() -> int:
    return int.from_bytes(os.urandom(4), "little") % 2**31


def _state() -> tuple[int | None, tuple, tuple]:
    """Return the global seed, the state of TensorFlow's generator of operation seeds, and the state of `random`."""
    return global_seed(), context()._rng.getstate(), random.getstate()


def _as_array(state: tuple[int | None, tuple, tuple]) -> np.ndarray:
    """Return a state as 64-bit numbers: the seed, and of both generators the words and `gauss_next` (NaN for None)."""
    seed, *generators = state
    parts = [np.array([seed], np.int64)]
    for _, words, normal in generators:
        parts += [np.array(words, np.int64), np.array([np.nan if normal is None else normal]).view(np.int64)]
    return np.concatenate(parts)


def _from_array(array: np.ndarray) -> tuple[int, tuple, tuple]:
    def generator(part: np.ndarray) -> tuple:
        normal = float(part[-1:].view(np.float64)[0])
        return _VERSION, tuple(part[:-1].tolist()), None if np.isnan(normal) else normal

    first, second = np.split(array[1:], 2)
    return int(array[0]), generator(first), generator(second)


def _set(seed: int | None, numbers: tuple) -> None:
    tf.random.set_seed(seed)
    context()._rng.setstate(numbers)  # _rng exists, since a global seed has been set.
