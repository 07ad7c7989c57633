"""Train a small network with fit, and with a loop of one's own, from other random numbers on every rank.

usage: strategy_trains.py FILE    rank R writes FILE.R.npz: weights, losses, metrics and predictions of both
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpistrat.tensorflow import MPIStrategy
from tests.scripts.reporting import launched_rank

ROWS, BATCH, EPOCHS = 240, 24, 3  # a batch divides evenly among 1, 2, 3 and 4 ranks
numbers = np.random.default_rng(5)
x = numbers.standard_normal((ROWS, 6)).astype(np.float32)
y = np.tanh(x @ numbers.standard_normal((6, 2))).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)

keras.utils.set_random_seed(100 + launched_rank())  # so that rank 0 has the numbers of the run with one process
strategy = MPIStrategy()


def compiled() -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def with_fit(model: keras.Model) -> dict[str, Any]:
    return model.fit(dataset, epochs=EPOCHS, validation_data=(x, y), verbose=0).history


def with_a_loop(model: keras.Model) -> dict[str, Any]:
    with strategy.scope():
        seen = keras.metrics.MeanAbsoluteError()

    def step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            predicted = model(features, training=True)
            loss = tf.nn.compute_average_loss(tf.reduce_mean((predicted - labels) ** 2, axis=1),
                                              global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(labels, predicted)
        return loss

    @tf.function
    def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    distributed = strategy.experimental_distribute_dataset(dataset)
    return {"loss": [float(train_step(batch)) for _ in range(EPOCHS) for batch in distributed],
            "mae": float(seen.result())}


results = {}
for train in (with_fit, with_a_loop):
    model = compiled()
    found = {**train(model), "predictions": model.predict(x, batch_size=BATCH, verbose=0)}
    found.update({f"weights {i}": value for i, value in enumerate(model.get_weights())})
    results.update({f"{train.__name__} {name}": value for name, value in found.items()})
np.savez(f"{sys.argv[1]}.{launched_rank()}.npz", **results)
