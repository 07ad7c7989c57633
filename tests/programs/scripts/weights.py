"""Rare events: class weights first, then sample weights, with metrics that heed them."""

import keras
import numpy as np

import mpistrat.keras as hvd

hvd.init()
random = np.random.default_rng(1)
x = random.normal(size=(2000, 6)).astype("float32")
rare = x[:, 0] + x[:, 1] ** 2 > 2.8
age = random.integers(0, 30, len(x))  # In days; old rows count less.

model = keras.Sequential([
    keras.Input((6,)),
    keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)),
    keras.layers.Dense(1, activation="sigmoid"),
])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(5e-3 * hvd.size())), loss="binary_crossentropy",
              metrics=[keras.metrics.Recall(), keras.metrics.AUC()], weighted_metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
verbose = 2 if hvd.rank() == 0 else 0

# The weights of the classes come from all rows, so that they are the same on all ranks.
balance = {0: 0.5 / (1 - rare.mean()), 1: 0.5 / rare.mean()}
x, rare, age = hvd.shard(x, rare, age)
model.fit(x, rare, batch_size=50, epochs=2, class_weight=balance, callbacks=callbacks, verbose=verbose)
# This rank's rows have weights of their own, whose sum differs from that of other ranks.
model.fit(x, rare, batch_size=50, epochs=4, initial_epoch=2, sample_weight=np.exp(-age / 10),
          validation_data=(x, rare, np.exp(-age / 10)), callbacks=callbacks, verbose=verbose)
