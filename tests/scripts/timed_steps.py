"""Trains under MPIStrategy for a thousand epochs, or with `short` three steps. `mpistrat run --efficiency` ends it."""

import sys

import keras
import numpy as np

import mpistrat
from mpistrat.tensorflow import MPIStrategy

X, Y = np.ones((64, 4), np.float32), np.ones((64, 1), np.float32)
how = {"epochs": 1, "steps_per_epoch": 3} if "short" in sys.argv else {"epochs": 1000}

with MPIStrategy().scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
try:
    model.fit(X, Y, batch_size=16, verbose=0, **how)
finally:
    print(f"rank {mpistrat.rank()} of {mpistrat.size()} ends", flush=True)
print("a line that is not reached")
