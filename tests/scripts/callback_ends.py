"""Training in which a callback of rank 1 ends its process, in the way that is named, after the third step."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import mpistrat.keras as hvd

way, mark = sys.argv[1:]


class End(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if hvd.rank() == 1 and batch == 2:
            Path(mark).write_text(str(time.time()))
            sys.exit(3) if way == "sys.exit" else os._exit(3)


hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False)
model.fit(np.ones((2000, 4)), np.ones((2000, 1)), batch_size=2, verbose=0, callbacks=[End()])
