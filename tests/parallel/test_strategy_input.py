"""Datasets of MPIStrategy: no row is lost or seen twice, whatever does not divide evenly."""

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
from mpistrat.strategy import input as strategy_input
from mpistrat.tensorflow import MPIStrategy

from .strategy_helpers import collectives_counted

Policy = tf.data.experimental.AutoShardPolicy


def with_policy(dataset: Any, policy: Any) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def local_batches(strategy: MPIStrategy, distributed: Any) -> list[list[int]]:
    return [np.asarray(strategy.experimental_local_results(batch)[0]).tolist() for batch in distributed]


def all_rows(batches: list[list[int]]) -> list[int]:
    return sorted(row for rank in mpistrat.allgather_object(batches) for batch in rank for row in batch)


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.DATA])
@pytest.mark.parametrize("rows", [24, 25, 31])
def test_every_row_is_seen_once(strategy: MPIStrategy, policy: Any, rows: int) -> None:
    dataset = with_policy(tf.data.Dataset.range(rows).batch(6), policy)
    with collectives_counted() as names:
        batches = local_batches(strategy, strategy.experimental_distribute_dataset(dataset))
    assert all_rows(batches) == list(range(rows))
    assert not [name for name in names if "reduce" in name], "asked whether there is data, where that is known"


def text_files(shared_dir: str, lines: list[int]) -> list[str]:
    """Files of numbers, `lines[i]` of them in file i, written by every rank alike."""
    names, number = [], 0
    for i, count in enumerate(lines):
        names.append(f"{shared_dir}/{i}.txt")
        if mpistrat.rank() == 0:
            with open(names[-1], "w") as file:
                file.writelines(f"{n}\n" for n in range(number, number + count))
        number += count
    mpistrat.barrier()
    return names


def lines_of_one_file(shared_dir: str) -> Any:
    return tf.data.Dataset.from_tensor_slices(text_files(shared_dir, [9])).interleave(tf.data.TextLineDataset).map(
        tf.strings.to_number).batch(3)


def test_fewer_files_than_ranks_are_an_error_where_files_are_asked_for(strategy: MPIStrategy, shared_dir: str) -> None:
    with pytest.raises(ValueError, match=r"fewer files than the \d+ ranks"):
        strategy.experimental_distribute_dataset(with_policy(lines_of_one_file(shared_dir), Policy.FILE))


def test_files_beside_memory_are_an_error_where_files_are_asked_for(strategy: MPIStrategy, size: int,
                                                                    shared_dir: str) -> None:
    lines = tf.data.TextLineDataset(text_files(shared_dir, [3] * size))
    dataset = tf.data.Dataset.zip((lines, tf.data.Dataset.range(3 * size))).batch(3)
    with pytest.raises(ValueError, match="cannot shard the dataset by files"):
        strategy.experimental_distribute_dataset(with_policy(dataset, Policy.FILE))


def test_the_order_of_rows_is_one_where_all_ranks_read_all(strategy: MPIStrategy, rank: int,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    options = tf.data.Options()
    options.deterministic = False
    rows = tf.data.Dataset.range(12)
    distributed = strategy.experimental_distribute_dataset(rows.batch(3).with_options(options))
    assert distributed._cloned_datasets[0].options().deterministic
    strategy.experimental_distribute_dataset(rows.map(lambda n: n, num_parallel_calls=2, deterministic=False).batch(3))
    said = [record for record in caplog.records if "has deterministic=False" in record.getMessage()]
    assert len(said) == (rank == 0)


@pytest.mark.parametrize("known", [False, True])
def test_generators_of_different_lengths(strategy: MPIStrategy, known: bool, rank: int, size: int) -> None:
    def dataset_of(context: Any) -> Any:
        own = range(100 * rank, 100 * rank + 3 + rank)
        if known:
            return tf.data.Dataset.from_tensor_slices(list(own)).batch(1)
        return tf.data.Dataset.from_generator(lambda: iter(own), output_types=tf.int64, output_shapes=()).batch(1)
    batches = local_batches(strategy, strategy.distribute_datasets_from_function(dataset_of))
    assert len(batches) == 3 + size - 1
    assert all_rows(batches) == sorted(100 * r + i for r in range(size) for i in range(3 + r))


def test_a_function_is_told_its_part(strategy: MPIStrategy, rank: int, size: int) -> None:
    seen: list[Any] = []

    def dataset_of(context: Any) -> Any:
        seen.append((context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync,
                     context.get_per_replica_batch_size(4 * size)))
        return tf.data.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)
    batches = local_batches(strategy, strategy.distribute_datasets_from_function(dataset_of))
    assert seen == [(rank, size, size, 4)]
    assert all_rows(batches) == list(range(8))


def _own_lines(rank: int, size: int) -> Any:
    return tf.data.Dataset.from_tensor_slices([f"{n}.txt" for n in range(8)][rank::size]).batch(2)


# What each rank passes, and what rank 0 says; "" for data that are the same, or are meant to differ.
DATA: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "arrays": (lambda rank, size: tf.data.Dataset.from_tensor_slices(np.arange(6.0) + rank).batch(2),
               r"arrays of shape \(6,\), checksum of the rows \w+ on ranks \[0\]; arrays of shape \(6,\), checksum"),
    "names": (_own_lines, r"arrays of shape"),
    "dataset.shard": (lambda rank, size: tf.data.Dataset.range(12).shard(size, rank).batch(2),
                      r"ShardDataset\(num_shards=\d, index=0\) on ranks \[0\]; ShardDataset\(num_shards=\d, index=1\)"),
    "skip": (lambda rank, size: tf.data.Dataset.range(12).skip(4 * rank).take(4).batch(2), r"SkipDataset\(count=0\)"),
    "shard": (lambda rank, size: mpistrat.shard(tf.data.Dataset.range(12).filter(lambda n: n < 9)).batch(2),
              r"shard\(\): part 0 of \d on ranks \[0\]; shard\(\): part 1 of \d"),
    "order": (lambda rank, size: tf.data.Dataset.range(12).shuffle(12, seed=rank).batch(2), r"ShuffleDataset\(.*seed"),
    "batches": (lambda rank, size: tf.data.Dataset.range(12).batch(2 + rank), r"BatchDataset\(batch_size=2\) on ranks"),
    "one more": (lambda rank, size: tf.data.Dataset.range(12).batch(2) if rank else
                 tf.data.Dataset.range(12).take(12).batch(2), r"TakeDataset\(count=12\) on ranks \[0\]; nothing on"),
    "same": (lambda rank, size: tf.data.Dataset.from_tensor_slices((np.arange(12.0), list("abcdefghijkl"))).shuffle(
        12).take(9).batch(2).repeat(2), ""),
    "policy OFF": (lambda rank, size: with_policy(tf.data.Dataset.range(12).shard(size, rank).batch(2), Policy.OFF),
                   ""),
}


@pytest.mark.parametrize("case", DATA)
def test_different_data_are_warned_of(strategy: MPIStrategy, case: str, rank: int, size: int,
                                      caplog: pytest.LogCaptureFixture) -> None:
    make, text = DATA[case]
    strategy.experimental_distribute_dataset(make(rank, size))
    said = [record.getMessage() for record in caplog.records if "different data" in record.getMessage()]
    assert len(said) == (rank == 0 and text != "")
    if said:
        assert re.search(text, said[0]) and "MPIStrategy shards a dataset itself" in said[0], said


def test_different_orders_are_warned_of(strategy: MPIStrategy, rank: int, shared_dir: str,
                                        caplog: pytest.LogCaptureFixture) -> None:
    def said(*datasets: Any) -> int:
        for dataset in datasets:
            strategy_input._say_once.cache_clear()
            strategy.experimental_distribute_dataset(dataset.batch(2))
        return sum("in a different order before it takes its part" in text for text in caplog.messages)

    rows, files = tf.data.Dataset.range(12), tf.data.Dataset.from_tensor_slices(text_files(shared_dir, [2, 2, 2]))
    lines = files.interleave(tf.data.TextLineDataset)
    assert said(rows.shuffle(12)) == 0, "the strategy has seeded TensorFlow"
    tf.random.set_seed(None)  # as before the strategy is made
    by_hand = with_policy(rows.shuffle(12), Policy.OFF)
    assert said(rows.shuffle(12, seed=3), lines.shuffle(9), by_hand) == 0
    mixed = tf.data.Dataset.sample_from_datasets([rows, rows])
    assert said(rows.shuffle(12), mixed, files.shuffle(3).interleave(tf.data.TextLineDataset)) == (0 if rank else 3)


def test_different_elements_are_an_error_on_every_rank(strategy: MPIStrategy, rank: int, size: int) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.zeros([8, 3 if rank else 2])).batch(4)
    with pytest.raises(ValueError, match=r"structure, dtype or shape: .* on ranks \[0\]; .* on ranks \[1"):
        strategy.experimental_distribute_dataset(dataset)


def test_a_replica_per_pipeline_is_refused(strategy: MPIStrategy) -> None:
    options = tf.distribute.InputOptions(experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2), options)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(4).batch(2), options)


@pytest.mark.parametrize("size", [1, 3])
def test_the_next_batches_are_read_ahead_by_a_plain_iterator(strategy: MPIStrategy, size: int) -> None:
    enough = threading.Semaphore(0)

    def read(number: Any) -> Any:
        enough.release()
        return number

    def dataset_of(_: Any) -> Any:
        return tf.data.Dataset.range(100).map(lambda n: tf.numpy_function(read, [n], tf.int64))
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=size)
    iterator = iter(strategy.distribute_datasets_from_function(dataset_of, options))
    assert int(strategy.experimental_local_results(next(iterator))[0]) == 0
    assert all(enough.acquire(timeout=30) for _ in range(1 + size))
    if not tf.config.list_logical_devices("GPU"):
        assert type(iterator._iterators[0]._iterator).__name__ == "OwnedIterator", "TensorFlow's other one has crashed"


@pytest.mark.parametrize("structure", ["pair", "tuple of one", "dictionary", "lone"])
def test_sparse_tensors_need_no_order_and_may_have_fewer_rows_than_ranks(strategy: MPIStrategy, structure: str) -> None:
    table = np.arange(1, 25 * 4 + 1, dtype=np.float32).reshape(25, 4)

    def batch(number: Any) -> Any:
        rows = tf.constant(table)[6 * number:6 * number + 6]
        indices = tf.reverse(tf.where(rows != 0), [0])
        sparse = tf.SparseTensor(indices, tf.gather_nd(rows, indices), tf.shape(rows, tf.int64))
        return {"pair": (sparse, rows[:, 0]), "tuple of one": (sparse,), "dictionary": {"a": sparse},
                "lone": sparse}[structure]

    dataset = tf.data.Dataset.range(5).map(batch)
    distributed = strategy.experimental_distribute_dataset(dataset)
    tf.nest.assert_same_structure(distributed.element_spec, dataset.element_spec)
    rows = []
    for element in distributed:
        first = next(leaf for leaf in tf.nest.flatten(element))
        rows += tf.sparse.to_dense(strategy.experimental_local_results(first)[0]).numpy().tolist()
    joined = [row for part in mpistrat.allgather_object(rows) for row in part]
    assert sorted(joined) == table.tolist()
