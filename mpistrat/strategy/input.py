"""Datasets of a strategy: each rank reads its part of every global batch. TensorFlow shards and rebatches.

Datasets may end at different times on different ranks. For that, TensorFlow runs a collective before each step, which
finds out whether any rank has data left. It is switched off where all ranks are known to have the same number of
batches.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python.distribute.input_lib import InputWorkers
from tensorflow.python.distribute.input_util import get_distributed_dataset, get_distributed_datasets_from_function

from ..api import ops as array_ops
from ..api import runtime
from ..core.errors import InvalidRequestError
from ..core.topology import Topology, describe_by_rank
from ..tensorflow import names
from ..tensorflow.same_data import ADVICE, difference, sources_of

logger = logging.getLogger(__name__)

InputOptions: TypeAlias = tf.distribute.InputOptions | None
_Policy = tf.data.experimental.AutoShardPolicy
# The kinds of datasets that TensorFlow shards by files.
_READERS = ("ArrayRecordDataset", "FixedLengthRecordDataset", "RecordIODataset", "SSTableDataset", "TextLineDataset",
            "TFRecordDataset")


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
                number of rows), or the policy is FILE and there are fewer files than ranks.
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
        distributed = self._distributed(dataset, options)
        if self._size > 1 and policy in (_Policy.AUTO, _Policy.FILE) and _reads_files(dataset):
            problem = self._problem_with_files(distributed)
            if not problem:
                return distributed
            if policy == _Policy.FILE:
                raise InvalidRequestError(f"{problem} Write options.experimental_distribute.auto_shard_policy = "
                                          "tf.data.experimental.AutoShardPolicy.DATA, or make more files.")
            if self._rank == 0:
                logger.warning("fewer files than ranks: each rank reads all of them and takes its share of the rows")
            chosen = tf.data.Options()
            chosen.experimental_distribute.auto_shard_policy = policy = _Policy.DATA
            distributed = self._distributed(dataset.with_options(chosen), options)
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

    def _problem_with_files(self, distributed: tf.distribute.DistributedDataset) -> str:
        """Why TensorFlow cannot shard by files; "" if it can. Collective.

        TensorFlow raises the error with the first element, and not on every rank.
        """
        own = ""
        try:
            for _ in _datasets_of(distributed)[0].take(1):
                break
        except tf.errors.InvalidArgumentError as error:
            if "FILE based sharding" not in str(error):
                raise
            own = f"rank {self._rank}: there are fewer files than the {self._size} ranks."
        everybody = array_ops.allgather_object(own, names.eager("strategy/files_of_input"))
        return next((problem for problem in everybody if problem), "")

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


def _operations(dataset: tf.data.Dataset) -> Iterator[str]:
    """The class names of a dataset and its inputs, and the types of the operations in their functions."""
    yield type(dataset).__name__
    for wrapper in dataset._functions():
        graph_def = wrapper.function.graph.as_graph_def()
        for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
            yield from (node.op for node in nodes)
    for other in dataset._inputs():
        yield from _operations(other)


def _reads_files(dataset: tf.data.Dataset) -> bool:
    return any(reader in operation for operation in _operations(dataset) for reader in _READERS)


def _datasets_of(distributed: tf.distribute.DistributedDataset) -> list[tf.data.Dataset]:
    """The dataset of each worker, of which a process has one: made from a dataset, or from a function."""
    found: list[tf.data.Dataset] = getattr(distributed, "_cloned_datasets", None) or distributed._datasets
    return found


def _end_on_all_ranks_together(distributed: tf.distribute.DistributedDataset) -> None:
    """Switch off the collective before each step that finds out whether any rank has data left."""
    distributed._enable_get_next_as_optional = False


def takes_from_generator(distributed: tf.distribute.DistributedDataset) -> bool:
    """Whether a distributed dataset reads a generator of Python, which may give each element only once."""
    return any(operation == "GeneratorDataset" for dataset in _datasets_of(distributed)
               for operation in _operations(dataset))


def _with_own_memory(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset whose elements are copies of arrays that Python owns.

    TensorFlow does not copy what a generator yields. After it has split an element into the ranks' parts, it treats
    that memory as its own and writes results to it, which would change the user's arrays. (Seen in TensorFlow 2.21
    without mpistrat too.)
    """
    if not any(operation in ("PyFunc", "EagerPyFunc", "PyFuncStateless") for operation in _operations(dataset)):
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
