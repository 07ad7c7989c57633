"""Features of input: no row is lost or seen twice, whatever does not divide evenly."""

from typing import Any

import tensorflow as tf

from .common import World, feature, local_values, of_all_processes

GROUP = "Input"
Policy = tf.data.experimental.AutoShardPolicy


def _rows(world: World, distributed: Any) -> list[list[int]]:
    """The rows of each replica of all processes, in the order in which it sees them."""
    own: list[list[int]] = []
    for batch in distributed:
        values = local_values(world, batch)
        own = own or [[] for _ in values]
        for rows, value in zip(own, values):
            rows.extend(int(v) for v in value)
    return [rows for process in of_all_processes(own) for rows in process]


def _all_rows(world: World, distributed: Any) -> list[int]:
    return sorted(row for rows in _rows(world, distributed) for row in rows)


def _distributed(world: World, dataset: Any, policy: Any = None) -> Any:
    if policy is not None:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        dataset = dataset.with_options(options)
    return world.strategy.experimental_distribute_dataset(dataset)


def _lines(world: World, files: int) -> Any:
    """A dataset of the numbers in `files` text files, 4 rows in the first, 8 in the second, ... ; and how many rows."""
    names, number = [], 0
    for i in range(files):
        names.append(f"{world.directory}/{i}.txt")
        if world.rank == 0:
            with open(names[-1], "w") as file:
                file.writelines(f"{n}\n" for n in range(number, number + 4 * (i + 1)))
        number += 4 * (i + 1)
    of_all_processes(None)  # The files are there.
    dataset = tf.data.Dataset.from_tensor_slices(names).interleave(tf.data.TextLineDataset)
    return dataset.map(tf.strings.to_number).batch(6), number


@feature(GROUP, "Auto-shard AUTO: every row once")
def auto(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(24).batch(6))
    assert _all_rows(world, distributed) == list(range(24))


@feature(GROUP, "Auto-shard DATA, a last batch that does not divide evenly")
def by_data(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(31).batch(6), Policy.DATA)
    assert _all_rows(world, distributed) == list(range(31))


@feature(GROUP, "Auto-shard FILE, files of different lengths")
def by_file(world: World) -> None:
    dataset, rows = _lines(world, files=world.replicas)
    assert _all_rows(world, _distributed(world, dataset, Policy.FILE)) == list(range(rows))


@feature(GROUP, "Auto-shard AUTO, fewer files than processes")
def fewer_files(world: World) -> None:
    dataset, rows = _lines(world, files=1)
    assert _all_rows(world, _distributed(world, dataset)) == list(range(rows))


@feature(GROUP, "Auto-shard OFF: every process reads all")
def not_sharded(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(12).batch(6), Policy.OFF)
    processes = len(of_all_processes(None))
    assert _all_rows(world, distributed) == sorted(list(range(12)) * processes)


@feature(GROUP, "Auto-shard HINT")
def by_hint(world: World) -> None:
    hint = tf.data.experimental.SHARD_HINT
    distributed = _distributed(world, tf.data.Dataset.range(12).shard(hint, hint).batch(6), Policy.HINT)
    assert _all_rows(world, distributed) == list(range(12))


@feature(GROUP, "Rebatching: a global batch is one batch of the dataset")
def rebatching(world: World) -> None:
    iterator = iter(_distributed(world, tf.data.Dataset.range(24).batch(12)))
    first = of_all_processes([v.tolist() for v in local_values(world, next(iterator))])
    parts = [part for process in first for part in process]
    assert sorted(row for part in parts for row in part) == list(range(12))
    assert {len(part) for part in parts} == {12 // world.replicas}


@feature(GROUP, "A global batch smaller than the replicas")
def few_rows(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(5).batch(1))
    assert _all_rows(world, distributed) == list(range(5))


@feature(GROUP, "An unseeded `shuffle`: every row once")
def unseeded_shuffle(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(32).shuffle(32).batch(8))
    assert _all_rows(world, distributed) == list(range(32))


@feature(GROUP, "An endless dataset")
def endless(world: World) -> None:
    iterator = iter(_distributed(world, tf.data.Dataset.range(4).repeat().batch(4)))
    assert _all_rows(world, [next(iterator) for _ in range(3)]) == sorted([*range(4)] * 3)


@feature(GROUP, "`distribute_datasets_from_function`")
def from_function(world: World) -> None:
    def dataset_of(context: Any) -> Any:
        own = tf.data.Dataset.range(12).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(world.replicas))
    assert _all_rows(world, world.strategy.distribute_datasets_from_function(dataset_of)) == list(range(12))


@feature(GROUP, "Generators that end at different times")
def different_lengths(world: World) -> None:
    def dataset_of(context: Any) -> Any:
        first = 100 * context.input_pipeline_id
        own = range(first, first + 3 + context.input_pipeline_id)
        return tf.data.Dataset.from_generator(lambda: iter(own), output_types=tf.int64, output_shapes=()).batch(1)
    distributed = world.strategy.distribute_datasets_from_function(dataset_of)
    processes = len(of_all_processes(None))
    assert _all_rows(world, distributed) == [100 * p + i for p in range(processes) for i in range(3 + p)]


@feature(GROUP, "A loop over the dataset in `tf.function`")
def loop_in_a_function(world: World) -> None:
    distributed = _distributed(world, tf.data.Dataset.range(10).batch(4))

    @tf.function
    def program() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for batch in distributed:
            total += world.strategy.reduce("SUM", world.strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        return total
    assert int(program()) == 45
