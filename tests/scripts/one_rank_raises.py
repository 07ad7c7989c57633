"""Training with TensorFlow's start-up, in which a function of rank 1 raises an error with a message of two lines."""

import keras
import numpy as np

import mpistrat.keras as hvd


def check(part: int) -> None:
    if part == 1:
        raise ValueError("part 1 is empty,\nand so is its file")


hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False)
check(hvd.rank())
model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
