"""Datasets of a strategy: each rank reads its part of every global batch. TensorFlow shards and rebatches.

What the policy AUTO means is decided here. TensorFlow's AUTO shards by files as far as it can, and if it finds a source
without files after that, it shards the graph that it has changed by rows: a zip of files and memory then pairs rows of
a rank's files with other labels (TensorFlow 2.21, grappler/optimizers/data/auto_shard.cc). And where it can, `take`,
`skip` or `zip` count the rows of a rank's files, and not those of the dataset. So AUTO is FILE here where each rank has
rows of the dataset then, and else DATA of the unchanged dataset.

Datasets may end at different times on different ranks. For that, TensorFlow runs a collective before each step, which
finds out whether any rank has data left. It is switched off where all ranks are known to have the same number of
batches.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python.distribute.input_lib import InputWorkers
from tensorflow.python.distribute.input_util import get_distributed_dataset, get_distributed_datasets_from_function

from ..api import array_ops, runtime
from ..core.errors import InvalidRequestError
from ..core.topology import Topology, describe_by_rank
from ..tensorflow.bridge import names
from ..tensorflow.same_data import ADVICE, difference, sources_of

logger = logging.getLogger(__name__)

InputOptions: TypeAlias = tf.distribute.InputOptions | None
_Policy = tf.data.experimental.AutoShardPolicy
# The kinds of datasets that TensorFlow shards by files.
_READERS = ("ArrayRecordDataset", "FixedLengthRecordDataset", "RecordIODataset", "SSTableDataset", "TextLineDataset",
            "TFRecordDataset")
# The kinds of datasets, of those that TensorFlow shards by files, whose rows depend on the rows before, or beside. A
# cache in memory has all rows if the program has read it before, and keeps them when it is sharded.
_OF_ALL_ROWS = ("Cache", "Shard", "Skip", "Take", "Window", "Zip")

_in_order: ContextVar[bool] = ContextVar("mpistrat_rows_in_order", default=False)


@contextmanager
def rows_in_order() -> Iterator[None]:
    """A context in which AUTO keeps the order of rows: in each step, the ranks' parts make up the next global batch."""
    before = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(before)


class Pipelines:
    """Creates the distributed datasets of a strategy, whose replica computes on `device`. `topology` returns the ranks
    that there are now.
    """

    def __init__(self, strategy: tf.distribute.Strategy, topology: Callable[[], Topology], device: str):
        self._strategy, self._topology, self._device = strategy, topology, device

    @property
    def _rank(self) -> int:
        return self._topology().rank

    @property
    def _size(self) -> int:
        return self._topology().size

    def distribute(self, dataset: tf.data.Dataset, options: InputOptions) -> tf.distribute.DistributedDataset:
        """This rank's part of a dataset that has global batches. Collective.

        Raises:
            NotImplementedError: For InputReplicationMode.PER_REPLICA.
            ValueError: On every rank, when the ranks' elements differ in structure, dtype or shape (except for the
                number of rows), or the policy is FILE and TensorFlow cannot shard by files, as with fewer files than
                ranks.
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
                _warn_of_policy_off(self._size)
        if self._size > 1 and policy in (_Policy.AUTO, _Policy.FILE) and _reads_files(dataset):
            by_files, problem = self._by_files(dataset, policy, options)
            if by_files is not None:
                return by_files
            if policy == _Policy.FILE:
                raise InvalidRequestError(f"{problem} Write options.experimental_distribute.auto_shard_policy = "
                                          "tf.data.experimental.AutoShardPolicy.DATA, or make more files.")
            if self._rank == 0:
                _say_once(f"AutoShardPolicy.AUTO: {problem} So each rank reads all files and takes its share of the "
                          "rows.")
            if not _reads_generator(dataset):  # One may end at another time on each rank.
                policy = _Policy.DATA
        if self._size > 1 and policy in (_Policy.AUTO, _Policy.DATA):
            dataset = self._by_rows(dataset)
        distributed = self._distributed(dataset, options)
        if same and (policy == _Policy.DATA or batches != tf.data.UNKNOWN_CARDINALITY):
            _end_on_all_ranks_together(distributed)
        if self._size > 1 and policy == _Policy.OFF:
            # Each rank reads all parts of its batches, and goes on until the last rank has finished. For Keras, which
            # counts the batches before they are split.
            distributed.mpistrat_steps = most * self._size if most >= 0 else None
        return distributed

    def _distributed(self, dataset: tf.data.Dataset, options: InputOptions) -> tf.distribute.DistributedDataset:
        is_split = self._size > 1 and any(map(_is_split_by_rows, tf.nest.flatten(dataset.element_spec)))
        distributed = get_distributed_dataset(
            _sparse_by_rows(dataset) if is_split else dataset, self._workers(options), self._strategy,
            num_replicas_in_sync=self._size, input_context=self._context(), options=self._iteration(options))
        if is_split:
            part, = _datasets_of(distributed)
            distributed = get_distributed_datasets_from_function(
                lambda _: _sparse_again(part, dataset.element_spec), self._workers(options), [self._context()],
                self._strategy, self._iteration(options))
        self._read_ahead(distributed, options)
        return distributed

    def _by_files(self, dataset: tf.data.Dataset, policy: tf.data.experimental.AutoShardPolicy,
                  options: InputOptions) -> tuple[tf.distribute.DistributedDataset | None, str]:
        """The dataset sharded by files and ""; or None and why not. Collective; the same on all ranks.

        With the policy AUTO it is None too if the ranks would have other rows than the dataset.
        """
        distributed, own, names_of_files = None, "", _names_of_files(dataset)
        if policy == _Policy.AUTO and _in_order.get():
            own = "sharded by files, a dataset would have another order."
        elif policy == _Policy.AUTO and names_of_files is None:
            own = ("sharded by files, a dataset would have other rows if it zips, caches or counts them (take, skip, "
                   "window, shard), or has rows in memory too.")
        else:
            try:
                distributed = self._distributed(_with_policy(dataset, _Policy.FILE), options)
                counts = [int(names.cardinality()) for names in names_of_files or ()]
                if not counts or tf.data.UNKNOWN_CARDINALITY in counts:
                    # TensorFlow raises the error with the first element, and not on every rank.
                    for _ in _datasets_of(distributed)[0].take(1):
                        break
                elif any(0 <= count < self._size for count in counts):
                    own = f"rank {self._rank}: there are fewer files than the {self._size} ranks."
            except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
                if "FILE based sharding" in str(error):
                    own = f"rank {self._rank}: there are fewer files than the {self._size} ranks."
                elif distributed is None:
                    own = f"TensorFlow cannot shard the dataset by files ({error.message.split(':')[0]})."
                else:
                    raise
        everybody = array_ops.allgather_object(own, names.eager("strategy/files_of_input"))
        problem = next((problem for problem in everybody if problem), "")
        return (None if problem else distributed), problem

    def _by_rows(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset with the policy DATA. Each rank reads all rows, so they must have one order on all ranks."""
        if self._rank == 0 and any(getattr(part, "_deterministic", "") == "false" for part in _parts_of(dataset)):
            _say_once("a part of the dataset has deterministic=False: each rank may have another order of rows, and "
                      "leave out rows or read them twice. Leave deterministic out.")
        return _with_policy(dataset, _Policy.DATA)

    def distribute_from_function(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
                                 options: InputOptions) -> tf.distribute.DistributedDataset:
        """The dataset that `dataset_fn` returns, without sharding or rebatching. Collective."""
        if options is not None and _is_per_replica(options):
            raise NotImplementedError("InputReplicationMode.PER_REPLICA has no meaning with one replica per process; "
                                      "leave it out.")
        distributed = get_distributed_datasets_from_function(
            dataset_fn, self._workers(options), [self._context()], self._strategy, self._iteration(options))
        self._read_ahead(distributed, options)
        batches, _, same = self._agree(_datasets_of(distributed)[0], [])
        if same and batches != tf.data.UNKNOWN_CARDINALITY:
            _end_on_all_ranks_together(distributed)
        return distributed

    def _context(self) -> tf.distribute.InputContext:
        return tf.distribute.InputContext(self._size, self._rank, self._size)

    def _workers(self, options: InputOptions) -> InputWorkers:
        return InputWorkers([("/device:CPU:0", ("/device:CPU:0" if self._reads_on_host(options) else self._device,))])

    def _reads_on_host(self, options: InputOptions) -> bool:
        return "GPU" not in self._device or (options is not None and not options.experimental_fetch_to_device)

    def _iteration(self, options: InputOptions) -> InputOptions:
        """Options that make TensorFlow use a plain iterator where the input is read on the host.

        Its iterator for several devices is for GPUs. On the host it adds two threads per epoch. Twice in some thousands
        of epochs (TensorFlow 2.21) one of its C++ threads crashed while Keras deleted such an iterator.
        """
        if not self._reads_on_host(options):
            return options
        return tf.distribute.InputOptions(  # With one replica PER_REPLICA has no other effect.
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)

    def _read_ahead(self, distributed: tf.distribute.DistributedDataset, options: InputOptions) -> None:
        """Add the prefetch buffer that TensorFlow's iterator for devices has."""
        size = 1 if options is None else options.experimental_per_replica_buffer_size
        if self._reads_on_host(options) and size:
            datasets = _datasets_of(distributed)
            datasets[:] = [dataset.prefetch(size) for dataset in datasets]

    def _agree(self, dataset: tf.data.Dataset, sources: list[str]) -> tuple[int, int, bool]:
        """The number of batches on this rank, the largest one, and whether all ranks have the same. Collective.

        The largest one is UNKNOWN_CARDINALITY if a rank does not know its own.

        Rank 0 logs a warning if the ranks have different sources.
        """
        if not tf.executing_eagerly():
            return tf.data.UNKNOWN_CARDINALITY, tf.data.UNKNOWN_CARDINALITY, False
        batches = int(dataset.cardinality())
        kind = str(tf.nest.map_structure(_kind, dataset.element_spec))
        everybody = array_ops.allgather_object((batches, kind, sources), names.eager("strategy/input"))
        kinds = [other for _, other, _ in everybody]
        if len(set(kinds)) > 1:
            raise ValueError(f"the ranks' datasets have different elements: {describe_by_rank(kinds)}")
        differs = difference([sources for *_, sources in everybody])
        if differs and self._rank == 0:
            _warn_of_different_data(differs)
        counts = [other for other, *_ in everybody]
        return batches, max(counts) if min(counts) >= 0 else tf.data.UNKNOWN_CARDINALITY, len(set(counts)) == 1


@functools.cache  # Each evaluation distributes its data again.
def _warn_of_different_data(differs: str) -> None:
    logger.warning("mpistrat: the ranks have different data: %s. %s", differs, ADVICE)


@functools.cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)


@functools.cache
def _warn_of_policy_off(size: int) -> None:
    logger.warning("AutoShardPolicy.OFF: each rank reads the whole dataset that it has, and a batch of B rows becomes "
                   "%d steps with B / %d rows on each rank. So batch(...) is the size of the global batch here too.",
                   size, size)


def _kind(spec: tf.TypeSpec) -> str:
    """The part of a spec that must be equal on all ranks: everything but the number of rows."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank is None:
        return str(spec)
    return f"{spec.dtype.name}{[None, *shape.as_list()[1:]] if shape.rank else []}"


def _parts_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset, its inputs, and theirs."""
    yield dataset
    for other in dataset._inputs():
        yield from _parts_of(other)


def _operations(dataset: tf.data.Dataset) -> Iterator[str]:
    """The class name of a dataset, without its inputs, and the types of the operations in its functions."""
    yield type(dataset).__name__
    for wrapper in dataset._functions():
        graph_def = wrapper.function.graph.as_graph_def()
        for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
            yield from (node.op for node in nodes)


def _has_reader(dataset: tf.data.Dataset) -> bool:
    return any(reader in operation for operation in _operations(dataset) for reader in _READERS)


def _reads_files(dataset: tf.data.Dataset) -> bool:
    return any(map(_has_reader, _parts_of(dataset)))


def _names_of_files(dataset: tf.data.Dataset) -> list[tf.data.Dataset] | None:
    """The datasets that TensorFlow shards under the policy FILE; None if the ranks' rows would not be the dataset's.

    They are if each row comes from a file, and what follows on the files takes each row alone.
    """
    if _has_reader(dataset):
        return list(getattr(dataset, "_impl", dataset)._inputs())
    found = [_names_of_files(other) for other in dataset._inputs()]
    if not found or None in found or type(dataset).__name__.strip("_").removesuffix("Dataset") in _OF_ALL_ROWS:
        return None
    return [names for part in found for names in part or ()]


def _with_policy(dataset: tf.data.Dataset, policy: tf.data.experimental.AutoShardPolicy) -> tf.data.Dataset:
    """The dataset with a policy. With DATA its rows have one order, as on all ranks."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    if policy == _Policy.DATA and dataset.options().deterministic is False:
        options.deterministic = True
    return dataset.with_options(options)


def _datasets_of(distributed: tf.distribute.DistributedDataset) -> list[tf.data.Dataset]:
    """The dataset of each worker, of which a process has one: made from a dataset, or from a function."""
    found: list[tf.data.Dataset] = getattr(distributed, "_cloned_datasets", None) or distributed._datasets
    return found


def _end_on_all_ranks_together(distributed: tf.distribute.DistributedDataset) -> None:
    """Switch off the collective before each step that finds out whether any rank has data left."""
    distributed._enable_get_next_as_optional = False


def takes_from_generator(distributed: tf.distribute.DistributedDataset) -> bool:
    """Whether a distributed dataset reads a generator of Python, which may give each element only once."""
    return any(map(_reads_generator, _datasets_of(distributed)))


def _reads_generator(dataset: tf.data.Dataset) -> bool:
    return any(operation == "GeneratorDataset" for part in _parts_of(dataset) for operation in _operations(part))


def _with_own_memory(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose elements are copies of arrays that Python owns.

    TensorFlow does not copy what a generator yields. After it has split an element into the ranks' parts, it treats
    that memory as its own and writes results to it, which would change the user's arrays. (Seen in TensorFlow 2.21
    without mpistrat too.)
    """
    if not any(operation in ("PyFunc", "EagerPyFunc", "PyFuncStateless")
               for part in _parts_of(dataset) for operation in _operations(part)):
        return dataset
    # By the spec an element keeps its structure, also a tuple of one.
    return dataset.map(lambda *element: tf.nest.pack_sequence_as(dataset.element_spec, [
        tf.raw_ops.DeepCopy(x=x) if isinstance(x, tf.Tensor) and x.dtype != tf.string else x
        for x in tf.nest.flatten(element)]))


def _is_split_by_rows(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.SparseTensorSpec) and bool(spec.shape.rank)


def _sparse_by_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with ragged indices and values, and a shape for each row, instead of each sparse tensor.

    TensorFlow splits them into the ranks' parts. It cannot make a sparse tensor of a part without rows ("Serialized
    sparse should have at least 1 serialized tensor"), and splits only tensors whose indices are sorted. scipy's
    matrices may have column order or no order.
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
    """The inverse of _sparse_by_rows, for elements of this spec."""
    def sparse(of: tf.TypeSpec, indices: tf.RaggedTensor, values: tf.RaggedTensor, shapes: tf.Tensor) -> tf.Tensor:
        # A part without rows has lost what is not known from the spec, and has no elements there.
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
