"""Features of Keras' compile and fit: how steps are run, what is minimised, and what is measured."""

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import World, assert_close, assert_equal_on_all, feature, points
from .keras_training import BATCH, COLUMNS, both, compiled, dense, fit_both, sequential, sgd, trains_as_one_process

GROUP = "Keras: steps, losses, metrics"


@feature(GROUP, "`steps_per_execution=3`")
def steps_per_execution(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(steps_per_execution=3))


@feature(GROUP, "`run_eagerly=True`")
def run_eagerly(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(run_eagerly=True))


@feature(GROUP, "`jit_compile=True`")
def jit_compile(world: World) -> None:
    with world.strategy.scope():
        model = compiled(jit_compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TensorFlow before 2.21 cannot, and it is switched off.
        model.fit(*points(24), batch_size=BATCH, verbose=0)
    assert_equal_on_all(model.get_weights())


class OwnStep(keras.Sequential):
    """A model with a train_step of its own, whose logs are no metrics of the model."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(error ** 2) / tf.distribute.get_strategy().num_replicas_in_sync
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        return {"own": tf.reduce_mean(tf.abs(error))}


@feature(GROUP, "A `train_step` of one's own, its logs are means")
def own_train_step(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(lambda: OwnStep([keras.Input((COLUMNS,)), *dense()]), metrics=()))


class OwnLoss(keras.Sequential):
    """A model whose loss is a function of its own of what Keras computes."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                     training: bool = True) -> Any:
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training)


@feature(GROUP, "A `compute_loss` of one's own")
def own_compute_loss(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(lambda: OwnLoss([keras.Input((COLUMNS,)), *dense()])))


@feature(GROUP, "A loss that is a sum")
def summed_loss(world: World) -> None:
    model, reference = both(world.strategy, world.rank, lambda: compiled(
        optimizer=lambda: keras.optimizers.SGD(0.001), loss=keras.losses.MeanSquaredError(reduction="sum")))
    x, y = points(60)
    for m in (model, reference):
        m.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert_close(model.get_weights(), reference.get_weights())


class Penalty(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(inputs ** 2))
        return inputs


@feature(GROUP, "`add_loss` in a layer")
def added_loss(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(lambda: sequential(Penalty())))


@feature(GROUP, "Regularizers and constraints")
def regularizers(world: World) -> None:
    def build() -> Any:
        layer = keras.layers.Dense(6, kernel_regularizer="l2", bias_constraint="non_neg",
                                   kernel_constraint=keras.constraints.MaxNorm(1.0))
        return sequential(layer)
    trains_as_one_process(world, lambda: compiled(build))


class Largest(keras.metrics.Metric):
    """The largest error, of a count of rows that is kept too."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return self.total / self.rows


@feature(GROUP, "A metric of one's own is of all rows")
def own_metric(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(metrics=(Largest(name="own"),)), rows=61)


@feature(GROUP, "Metrics with states of many numbers (AUC, precision)")
def wide_metrics(world: World) -> None:
    def make() -> Any:
        return compiled(lambda: keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1, "sigmoid")]),
                        loss="binary_crossentropy", metrics=(keras.metrics.AUC(name="auc"), "precision", "recall"))
    x, y = points(60)
    trains_as_one_process(world, make, data=(x, (y > 0).astype(np.float32)))


@feature(GROUP, "Logs of every batch are those of all replicas")
def logs_of_batches(world: World) -> None:
    seen: list[list[float]] = []

    def callbacks() -> list[Any]:
        own: list[float] = []
        seen.append(own)
        return [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: own.append(logs["loss"]))]
    trains_as_one_process(world, callbacks=callbacks)
    assert_close(seen[0], seen[1])


@feature(GROUP, "`trainable=False` between two fits")
def frozen_in_between(world: World) -> None:
    model, reference = trains_as_one_process(world)
    for m in (model, reference):
        m.layers[0].trainable = False
        with (world.strategy if m is model else tf.distribute.get_strategy()).scope():
            m.compile(sgd(), loss="mse", metrics=["mae"])
    fit_both(world.strategy, model, reference)


@feature(GROUP, "LoRA switched on between two fits")
def lora_in_between(world: World) -> None:
    model, reference = trains_as_one_process(world)
    for m in (model, reference):
        with (world.strategy if m is model else tf.distribute.get_strategy()).scope():
            m.layers[0].enable_lora(2)
            m.compile(sgd(), loss="mse", metrics=["mae"])
    reference.set_weights(model.get_weights())
    fit_both(world.strategy, model, reference)
