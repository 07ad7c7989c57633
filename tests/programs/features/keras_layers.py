"""Features of layers that have a state besides weights, or draw random numbers."""

from typing import Any

import keras
import numpy as np

from .common import World, assert_close, assert_equal_on_all, feature, local_values, of_all_processes, points
from .keras_training import BATCH, COLUMNS, compiled, sequential, trains_as_one_process

GROUP = "Keras: layers"


@feature(GROUP, "`BatchNormalization`: the same running statistics everywhere")
def batch_normalization(world: World) -> None:
    with world.strategy.scope():
        model = compiled(lambda: sequential(keras.layers.BatchNormalization(momentum=0.5)))
    x, y = points(60)
    x[:len(x) // 2] += 3.0
    model.fit(x, y, batch_size=60, epochs=2, shuffle=False, verbose=0)
    assert_equal_on_all([model.evaluate(x, y, verbose=0)])
    assert_equal_on_all(model.get_weights())


@feature(GROUP, "`BatchNormalization`: running statistics are the mean of the replicas'")
def statistics_are_means(world: World) -> None:
    with world.strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
    rows = 4 * world.replicas
    x = np.repeat(np.arange(world.replicas, dtype=np.float32), 4)[:, None]  # Replica i sees the number i.
    model.fit(x, x, batch_size=rows, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), [(world.replicas - 1) / 2], atol=1e-5)


@feature(GROUP, "`BatchNormalization(synchronized=True)`: as one process")
def synchronized_batch_normalization(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(
        lambda: sequential(keras.layers.BatchNormalization(synchronized=True))), atol=2e-5)


@feature(GROUP, "`BatchNormalization`, a replica without rows")
def batch_normalization_without_rows(world: World) -> None:
    with world.strategy.scope():
        model = compiled(lambda: sequential(keras.layers.BatchNormalization()))
    x, y = points(2 * world.replicas + 1)
    history = model.fit(x, y, batch_size=2 * world.replicas, epochs=2, shuffle=False, verbose=0).history
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert np.isfinite(history["loss"]).all()


@feature(GROUP, "`Dropout`: other units on each replica")
def dropout(world: World) -> None:
    with world.strategy.scope():
        layer = keras.layers.Dropout(0.5)

    def step() -> Any:
        return layer(keras.ops.ones([64]), training=True)
    own = [value.tobytes() for value in local_values(world, world.strategy.run(step))]
    masks = [mask for process in of_all_processes(own) for mask in process]
    assert len(set(masks)) == world.replicas


@feature(GROUP, "Training with `Dropout`: equal weights everywhere")
def training_with_dropout(world: World) -> None:
    with world.strategy.scope():
        model = compiled(lambda: sequential(keras.layers.Dropout(0.5)))
    model.fit(*points(60), batch_size=BATCH, verbose=0)
    assert_equal_on_all(model.get_weights())


@feature(GROUP, "`Normalization.adapt` before training")
def adapted(world: World) -> None:
    def build() -> Any:
        layer = keras.layers.Normalization()
        layer.adapt(points(60)[0])
        return keras.Sequential([keras.Input((COLUMNS,)), layer, keras.layers.Dense(1)])
    trains_as_one_process(world, lambda: compiled(build))


@feature(GROUP, "`LSTM`")
def lstm(world: World) -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((COLUMNS, 1)), keras.layers.LSTM(4), keras.layers.Dense(1)])
    x, y = points(60)
    trains_as_one_process(world, lambda: compiled(build), data=(x[..., None], y), epochs=1)


@feature(GROUP, "`Conv2D` and pooling")
def convolution(world: World) -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Conv2D(3, 3), keras.layers.MaxPooling2D(),
                                 keras.layers.Flatten(), keras.layers.Dense(1)])
    x, _ = points(60, 36)
    trains_as_one_process(world, lambda: compiled(build), data=(x.reshape(-1, 6, 6, 1), x[:, :1]))


@feature(GROUP, "`MultiHeadAttention`")
def attention(world: World) -> None:
    def build() -> Any:
        inputs = keras.Input((COLUMNS, 2))
        x = keras.layers.LayerNormalization()(keras.layers.MultiHeadAttention(2, 3)(inputs, inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    x, y = points(60, 2 * COLUMNS)
    trains_as_one_process(world, lambda: compiled(build, lambda: keras.optimizers.SGD(0.01)),
                          data=(x.reshape(-1, COLUMNS, 2), y), epochs=1)


@feature(GROUP, "A random layer has its own seed on each replica, the same in every run")
def random_layers_repeat(world: World) -> None:
    def drawn() -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with world.strategy.scope():
            layer = keras.layers.GaussianNoise(1.0)
        return local_values(world, world.strategy.run(lambda: layer(keras.ops.zeros([8]), training=True)))
    assert_close(drawn(), drawn(), 0)
