"""Features of Keras' fit, evaluate and predict: what they are given, and what they give back."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import World, assert_close, assert_equal_on_all, feature, points
from .keras_training import (
    BATCH,
    COLUMNS,
    ROWS,
    assert_same_training,
    both,
    compiled,
    sequential,
    trains_as_one_process,
)

GROUP = "Keras: data"


def _fits_like_arrays(world: World, data: Any) -> None:
    """One epoch on `data` is one epoch on the arrays that they are made of."""
    model, reference = both(world.strategy, world.rank)
    x, y = points(ROWS)
    ours = model.fit(data, verbose=0, shuffle=False)
    expected = reference.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    assert_same_training(model, reference, ours, expected)


def _dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(points(ROWS)).batch(BATCH)


@feature(GROUP, "`fit`: numpy arrays")
def fit_arrays(world: World) -> None:
    trains_as_one_process(world)


@feature(GROUP, "`fit`: rows that do not divide evenly")
def fit_uneven(world: World) -> None:
    trains_as_one_process(world, rows=61)


@feature(GROUP, "`fit`: a global batch smaller than the replicas")
def fit_few_rows(world: World) -> None:
    trains_as_one_process(world, rows=1)


@feature(GROUP, "`fit`: `tf.data.Dataset`")
def fit_dataset(world: World) -> None:
    _fits_like_arrays(world, _dataset())


@feature(GROUP, "`fit`: a generator")
def fit_generator(world: World) -> None:
    def batches() -> Iterator[Any]:
        x, y = points(ROWS)
        for start in range(0, ROWS, BATCH):
            yield x[start:start + BATCH], y[start:start + BATCH]
    _fits_like_arrays(world, batches())


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        x, y = points(ROWS)
        return x[rows], y[rows]


@feature(GROUP, "`fit`: `PyDataset`")
def fit_pydataset(world: World) -> None:
    _fits_like_arrays(world, Batches())


@feature(GROUP, "`fit`: `DistributedDataset`")
def fit_distributed(world: World) -> None:
    _fits_like_arrays(world, world.strategy.experimental_distribute_dataset(_dataset()))


@feature(GROUP, "`fit`: `distribute_datasets_from_function`")
def fit_from_function(world: World) -> None:
    def dataset_of(context: Any) -> Any:
        own = tf.data.Dataset.from_tensor_slices(points(ROWS))
        own = own.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(BATCH))
    _fits_like_arrays(world, world.strategy.distribute_datasets_from_function(dataset_of))


@feature(GROUP, "`fit`: `steps_per_epoch` of an endless dataset")
def fit_endless(world: World) -> None:
    x, y = points(ROWS)
    model, reference = both(world.strategy, world.rank)
    ours = model.fit(_dataset().repeat(), steps_per_epoch=5, epochs=2, verbose=0)
    expected = reference.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    assert_same_training(model, reference, ours, expected)


@feature(GROUP, "`fit`: shuffled arrays, every row once")
def fit_shuffled(world: World) -> None:
    model, _ = both(world.strategy, world.rank, lambda: compiled(optimizer=lambda: keras.optimizers.SGD(0.0)))
    x, y = points(64)
    loss = model.fit(x, y, batch_size=16, shuffle=True, verbose=0).history["loss"][0]
    np.testing.assert_allclose(loss, np.mean((model(x).numpy() - y) ** 2), atol=1e-6)


@feature(GROUP, "`fit`: validation data")
def fit_validation(world: World) -> None:
    x, y = points(40)
    trains_as_one_process(world, validation_data=(x, y))


@feature(GROUP, "`fit`: validation split")
def fit_validation_split(world: World) -> None:
    trains_as_one_process(world, validation_split=0.2)


@feature(GROUP, "`fit`: sample weights")
def fit_sample_weights(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(metrics=(), weighted_metrics=["mae"]),
                          sample_weight=np.linspace(0, 2, ROWS).astype(np.float32))


@feature(GROUP, "`fit`: class weights")
def fit_class_weights(world: World) -> None:
    def make() -> Any:
        return compiled(lambda: keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(2)]), metrics=(),
                        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = points(ROWS)
    trains_as_one_process(world, make, data=(x, (y[:, 0] > 0).astype(np.int32)), class_weight={0: 1.0, 1: 3.0})


@feature(GROUP, "`fit`: ragged rows of text")
def fit_strings(world: World) -> None:
    def make() -> Any:
        layers = [keras.layers.Embedding(8, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return compiled(lambda: keras.Sequential([keras.Input((3,), dtype="int32"), *layers]))
    texts = tf.constant([" ".join("abcde"[(i + j) % 5] for j in range(1 + i % 3)) for i in range(ROWS)])
    look_up = keras.layers.StringLookup(vocabulary=list("abcde"))

    def prepared(text: Any, y: Any) -> Any:
        return look_up(tf.strings.split(text)).to_tensor(shape=[None, 3]), y
    dataset = tf.data.Dataset.from_tensor_slices((texts, points(ROWS)[1])).batch(BATCH).map(prepared)
    model, reference = both(world.strategy, world.rank, make)
    ours, expected = (m.fit(dataset, verbose=0) for m in (model, reference))
    assert_same_training(model, reference, ours, expected)


@feature(GROUP, "`evaluate`: metrics of all rows")
def evaluate(world: World) -> None:
    model, reference = both(world.strategy, world.rank)
    x, y = points(61)
    ours, expected = (m.evaluate(x, y, batch_size=BATCH, verbose=0) for m in (model, reference))
    assert_close(ours, expected, 1e-6)
    assert_equal_on_all([ours])


@feature(GROUP, "`predict`: all rows, in order")
def predict(world: World) -> None:
    model, reference = both(world.strategy, world.rank)
    x, _ = points(61)
    assert_close([model.predict(x, batch_size=BATCH, verbose=0)], [reference.predict(x, verbose=0)], 1e-6)


@feature(GROUP, "`predict`: a dataset, several outputs")
def predict_several(world: World) -> None:
    def make() -> Any:
        inputs = keras.Input((COLUMNS,))
        return keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(3)(inputs)})
    model, reference = both(world.strategy, world.rank, make)
    x, _ = points(61)
    ours = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(BATCH), verbose=0)
    expected = reference.predict(x, verbose=0)
    assert_close([ours["a"], ours["b"]], [expected["a"], expected["b"]], 1e-6)


@feature(GROUP, "`train_on_batch`, `test_on_batch`")
def on_batch(world: World) -> None:
    # Every replica is given the same rows: what each of them sees is up to the strategy.
    model, reference = both(world.strategy, world.rank, lambda: compiled(sequential))
    x, y = points(BATCH)
    for _ in range(2):
        assert_close(model.train_on_batch(x, y), reference.train_on_batch(x, y))
    assert_close(model.test_on_batch(x, y), reference.test_on_batch(x, y))
    assert_equal_on_all(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights())
