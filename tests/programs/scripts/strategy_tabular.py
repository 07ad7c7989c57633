"""The same program as with one GPU, under MPIStrategy: columns of a table, a normalization, early stopping."""

import keras
import numpy as np
import tensorflow as tf

import mpistrat
from mpistrat.tensorflow import MPIStrategy

strategy = MPIStrategy()
random = np.random.default_rng(4)  # Batches are global, so that all ranks make the same rows.
weight, power, year = random.uniform(700, 2200, 1000), random.uniform(50, 250, 1000), random.integers(70, 83, 1000)
mileage = 60 - weight / 60 - power / 20 + (year - 70) + random.normal(0, 1, 1000)
columns = np.stack([weight, power, year], axis=1).astype("float32")
train = tf.data.Dataset.from_tensor_slices((columns[:800], mileage[:800])).shuffle(800, seed=1).batch(64)

with strategy.scope():
    normalization = keras.layers.Normalization()
    normalization.adapt(columns[:800])
    model = keras.Sequential([
        keras.Input((3,)), normalization,
        keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
model.fit(train, epochs=4, validation_data=(columns[800:], mileage[800:]), verbose=2 if mpistrat.rank() == 0 else 0,
          callbacks=[keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
                     keras.callbacks.ModelCheckpoint("mileage.weights.h5", save_weights_only=True)])
predicted = model.predict(columns[800:], verbose=0)
if mpistrat.rank() == 0:
    print(f"the mean error of mileage is {np.abs(predicted[:, 0] - mileage[800:]).mean():.2f}")
