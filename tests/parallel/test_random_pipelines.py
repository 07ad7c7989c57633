"""Random datasets of files beside rows in memory, and their iterators: under AUTO the ranks have the plain rows."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import MPIStrategy

SEEDS = [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.nightly) for seed in range(40)]


class RandomPipelines:
    """Makes the same datasets of pairs of numbers on all ranks; `rng` decides. Collective: rank 0 writes the files."""

    def __init__(self, seed: int, folder: str):
        self.rng, self._folder, self._rows, self._files = np.random.default_rng(seed), folder, 0, 0

    def make(self, depth: int) -> Any:
        if depth == 0:
            kind = self._chosen("memory", "range", "records", "records of names", "lines", "parallel")
            return self._of_memory(kind) if kind in ("memory", "range") else self._of_files(kind)
        kind = self._chosen("map", "filter", "shuffle", "take", "skip", "repeat", "rebatch", "window", "enumerate",
                            "cache", "zip", "zip", "concatenate", "concatenate", "choose", "sample")
        first = self.make(depth - 1)
        if kind in ("zip", "concatenate", "choose", "sample"):
            return self._of_two(kind, first, self.make(int(self.rng.integers(depth))))
        number = int(self.rng.integers(1, 9))
        unary: dict[str, Callable[[], Any]] = {
            "map": lambda: first.map(lambda a, b: (a, b), num_parallel_calls=2),
            "filter": lambda: first.filter(lambda a, b: a % 4 != number % 4),
            "shuffle": lambda: first.shuffle(number, seed=number, reshuffle_each_iteration=False),
            "take": lambda: first.take(number + 4), "skip": lambda: first.skip(number),
            "repeat": lambda: first.repeat(2), "rebatch": lambda: first.batch(number).unbatch(),
            "cache": lambda: first.cache().prefetch(1),
            "window": lambda: first.batch(2).window(2, shift=1).flat_map(
                lambda a, b: tf.data.Dataset.zip((a, b))).unbatch(),
            "enumerate": lambda: first.enumerate().map(lambda i, pair: (pair[0], pair[1] + i))}
        return unary[kind]()

    def _chosen(self, *kinds: str) -> str:
        return kinds[int(self.rng.integers(len(kinds)))]

    def _of_memory(self, kind: str) -> Any:
        first, self._rows = self._rows, self._rows + int(self.rng.integers(3, 25))
        numbers = tf.data.Dataset.range(first, self._rows) if kind == "range" else \
            tf.data.Dataset.from_tensor_slices(np.arange(first, self._rows))
        return numbers.map(lambda n: (n, n))

    def _of_files(self, kind: str) -> Any:
        paths = []
        for rows in self.rng.integers(1, 8, size=int(self.rng.integers(1, 6))):
            paths.append(f"{self._folder}/{self._files}")
            lines = [str(n) for n in range(self._rows, self._rows + int(rows))]
            self._files, self._rows = self._files + 1, self._rows + int(rows)
            if mpistrat.rank() == 0 and kind == "lines":
                with open(paths[-1], "w") as file:
                    file.writelines(f"{line}\n" for line in lines)
            elif mpistrat.rank() == 0:
                with tf.io.TFRecordWriter(paths[-1]) as writer:
                    for line in lines:
                        writer.write(line.encode())
        names, records = tf.data.Dataset.from_tensor_slices(paths), tf.data.TFRecordDataset
        mpistrat.barrier()
        rows_of: dict[str, Callable[[], Any]] = {
            "records": lambda: records(paths), "records of names": lambda: names.flat_map(records),
            "lines": lambda: tf.data.TextLineDataset(paths),
            "parallel": lambda: names.interleave(records, cycle_length=2, num_parallel_calls=2)}
        return rows_of[kind]().map(lambda text: (tf.strings.to_number(text, tf.int64),) * 2)

    def _of_two(self, kind: str, first: Any, second: Any) -> Any:
        if self.rng.random() < 0.5:
            first, second = second, first
        if kind == "zip":
            return tf.data.Dataset.zip((first, second)).map(lambda one, other: (one[0], other[1]))
        if kind == "concatenate":
            return first.concatenate(second)
        if kind == "sample":
            return tf.data.Dataset.sample_from_datasets([first, second], [0.6, 0.4], seed=3,
                                                        stop_on_empty_dataset=False)
        return tf.data.Dataset.choose_from_datasets([first, second], tf.data.Dataset.range(2).repeat(9),
                                                    stop_on_empty_dataset=False)


def pairs_of(batches: Any, local: Callable[[Any], Any] = lambda part: part) -> list[tuple[int, int]]:
    return [pair for batch in batches for pair in zip(*(local(part).numpy().tolist() for part in batch), strict=True)]


class Tally(keras.Model):
    """Sums a function of each pair in training and evaluation, and predicts the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = keras.metrics.Sum(name="tally")

    def call(self, a: Any) -> Any:
        return a

    def train_step(self, data: Any) -> dict[str, Any]:
        a, b = data
        self.tally.update_state(tf.cast(a * a + 3 * a * b + 1, tf.float32))
        return {"tally": self.tally.result()}

    test_step = train_step


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ranks_have_the_rows_of_the_dataset(seed: int, shared_dir: str) -> None:
    strategy, pipelines = MPIStrategy(), RandomPipelines(seed, shared_dir)
    for depth in (1, 2, 3, 4):
        dataset = pipelines.make(depth).batch(int(pipelines.rng.integers(1, 10)))
        plain = pairs_of(dataset)
        own = pairs_of(strategy.experimental_distribute_dataset(dataset),
                       lambda part: strategy.experimental_local_results(part)[0])
        found = [pair for of_rank in mpistrat.allgather_object(own) for pair in of_rank]
        assert Counter(found) == Counter(plain), f"depth {depth}"
    with strategy.scope():
        model = Tally()
        model.compile()
    wanted = sum(a * a + 3 * a * b + 1 for a, b in plain)
    if plain:
        assert model.fit(dataset, verbose=0).history["tally"] == [wanted]
        assert model.evaluate(dataset, verbose=0, return_dict=True)["tally"] == wanted
        pairs = dataset.map(lambda a, b: tf.stack([a, b], 1))
        assert model.predict(pairs, verbose=0).tolist() == list(map(list, plain))


# -- iterators have no thread that tunes them, for which the destructor could wait; pipelines stay parallel ------------


def threads_that_tune() -> int:
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
