"""Iterators of tf.data have no thread that tunes them, for which the destructor could wait; pipelines stay parallel."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import mpistrat.tensorflow as hvd


def threads_that_tune() -> int:
    """How many threads of this process tune datasets."""
    names = [task.joinpath("comm") for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("tf_data_model") for name in names if name.exists())


@pytest.fixture(autouse=True)
def _without_iterators() -> Iterator[None]:
    gc.collect()  # Those of other tests, which may have begun before init().
    yield


def options(**fields: bool) -> tf.data.Options:
    made = tf.data.Options()
    for name, value in fields.items():
        setattr(made.autotune if name == "enabled" else made.experimental_optimization, name, value)
    return made


PIPELINES = {
    "map": lambda: tf.data.Dataset.range(6).map(lambda x: x * 2),
    "asked for": lambda: tf.data.Dataset.range(6).map(lambda x: x * 2).with_options(options(enabled=True)),
    "AUTOTUNE": lambda: tf.data.Dataset.range(6).map(lambda x: x * 2, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE),
    "generator": lambda: tf.data.Dataset.from_generator(lambda: iter(range(0, 12, 2)), output_signature=tf.TensorSpec(
        (), tf.int64)),
    "py_function": lambda: tf.data.Dataset.range(6).map(lambda x: tf.numpy_function(lambda y: y * 2, [x], tf.int64)),
    "no rewrites": lambda: tf.data.Dataset.range(6).map(lambda x: x * 2).with_options(options(
        map_parallelization=False, inject_prefetch=False)),
    "none by default": lambda: tf.data.Dataset.range(6).map(lambda x: x * 2).with_options(options(
        apply_default_optimizations=False)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_no_thread_tunes_a_dataset_and_its_elements_are_the_same(name: str) -> None:
    before = threads_that_tune()
    iterator = iter(PIPELINES[name]())
    found = [int(next(iterator))]
    assert threads_that_tune() - before == (hvd.size() == 1)
    assert found + [int(value) for value in iterator] == [0, 2, 4, 6, 8, 10]


def test_graphs_and_iterators_of_several_devices_and_reductions_too() -> None:
    @tf.function
    def total(dataset: tf.data.Dataset) -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for value in dataset:
            found += value + tf.cast(tf.numpy_function(threads_that_tune, [], tf.int64), tf.int64) * 1000
        return found

    if hvd.size() == 1:
        pytest.skip("With one rank, no other rank waits.")
    assert int(total(tf.data.Dataset.range(4))) == 6
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4)))
    assert int(next(iterator)) == 0
    assert threads_that_tune() == 0
    counts = tf.data.Dataset.range(2).reduce(tf.constant(0, tf.int64), lambda sum_, _: sum_ + tf.numpy_function(
        threads_that_tune, [], tf.int64))
    assert int(counts) == 0


def test_a_map_without_a_number_of_calls_is_parallel_and_a_prefetch_ends_the_pipeline() -> None:
    """As TensorFlow rewrites them with autotuning."""
    rewritten = tf.data.Dataset.range(6).map(lambda x: x * 2).batch(2)._apply_debug_options()
    names = {node.op for node in tf.compat.v1.GraphDef.FromString(rewritten._as_serialized_graph().numpy()).node}
    assert ({"ParallelMapDatasetV2", "PrefetchDataset"} <= names) == (hvd.size() > 1)
