"""Training whose data comes from other processes and threads, of Keras, of tf.data and of the script."""

import multiprocessing
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from reporting import say

import mpistrat.keras as hvd

BATCH, STEPS, WIDTH = 8, 6, 4


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Of this rank's shard, which a worker knows by asking for the rank."""
    values = np.random.default_rng(STEPS * hvd.rank() + index).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return values, values.sum(1, keepdims=True)


class Batches(keras.utils.PyDataset):
    """Made by forked processes, several at a time."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return batch(index)


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same, one after the other."""
    for index in range(STEPS):
        yield batch(index)


def from_generator() -> tf.data.Dataset:
    """tf.data with threads of its own, which call Python."""
    signature = (tf.TensorSpec((BATCH, WIDTH), tf.float32), tf.TensorSpec((BATCH, 1), tf.float32))
    data = tf.data.Dataset.from_generator(generated, output_signature=signature)
    return data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(np.abs, [x], tf.float32), (BATCH, WIDTH)), y),
                    num_parallel_calls=2).repeat().prefetch(2)


def pooled() -> tuple[np.ndarray, np.ndarray]:
    """By a pool of forked processes of the script's own."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        parts = pool.map(batch, range(STEPS))
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False)
fits = {
    "PyDataset": lambda: model.fit(Batches(workers=2, use_multiprocessing=True), epochs=2, verbose=0),
    "tf.data": lambda: model.fit(from_generator(), epochs=2, steps_per_epoch=STEPS, shuffle=False, verbose=0),
    "a pool": lambda: model.fit(*pooled(), batch_size=BATCH, epochs=2, verbose=0)}
for source, fit in [*fits.items(), *fits.items()]:
    fit()
    digests = hvd.allgather_object([weights.tobytes() for weights in model.get_weights()])
    say(f"{source}: the same weights on all ranks: {all(digest == digests[0] for digest in digests)}")
