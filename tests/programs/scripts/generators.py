"""Python generators of rows that never end: one for training, one for validation, and one behind tf.data."""

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd

hvd.init()


def batches(seed, rows=32):
    """Sequences of numbers, and the next one."""
    random = np.random.default_rng(seed)
    while True:
        starts, steps = random.uniform(-1, 1, (2, rows, 1))
        sequence = starts + steps * np.arange(9) / 8
        yield sequence[:, :8].astype("float32"), sequence[:, 8:].astype("float32")


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
             hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=1, steps_per_epoch=20)]
verbose = 2 if hvd.rank() == 0 else 0
model.fit(batches(hvd.rank()), steps_per_epoch=20, epochs=2, callbacks=callbacks, verbose=verbose,
          validation_data=batches(1000 + hvd.rank()), validation_steps=2)

signature = tf.TensorSpec((32, 8)), tf.TensorSpec((32, 1))
dataset = tf.data.Dataset.from_generator(lambda: batches(2000 + hvd.rank()), output_signature=signature)
model.fit(dataset.prefetch(2), steps_per_epoch=20, epochs=1, callbacks=callbacks[:2], verbose=verbose)
