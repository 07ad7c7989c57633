"""A fit with several batches in an execution and several in an update, whose number of ranks or processes changes.

usage: mpistrat run --elastic ... python tests/scripts/elastic_executions.py horovod|strategy LOG HOSTS

In generation 1, between two updates: in Horovod's way the rank makes room for a second one in the file HOSTS, under the
strategy rank 1 kills itself. Each rank appends the rows that it trains to LOG; at the end it prints the weight, from
which each update takes the mean of the rows.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.elastic import membership
from mpistrat.tensorflow import MPIStrategy

door, log, hosts = sys.argv[1], sys.argv[2], Path(sys.argv[3])
ROWS, BATCH, EXECUTION, UPDATE = 48, 2, 4, 8
hvd.init()
own = membership.current()


class Model(keras.Model):
    """Its loss is the product of the weight and the mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")
        self.build((None,))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.weight * x

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> Any:
        tf.numpy_function(note, [data[0]], [])
        return super().train_step(data)


def note(rows: np.ndarray) -> None:
    with open(log, "a", encoding="utf-8") as file:
        file.write("".join(f"{row:g}\n" for row in rows))


class Change(keras.callbacks.Callback):
    """Changes the ranks: before the third commit, or before the fourth."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if own.job.generation != 1:
            return
        if door == "horovod" and batch == 11:
            hosts.write_text("localhost:2\n")
            end = time.monotonic() + 60
            while not own.why_leave and time.monotonic() < end:
                time.sleep(0.05)
        if door == "strategy" and batch == 15 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


x = np.arange(ROWS, dtype="float32")
optimizer: Any = keras.optimizers.SGD(1.0, gradient_accumulation_steps=UPDATE)
if door == "strategy":
    with MPIStrategy().scope():
        model = Model()
        model.compile(optimizer, lambda y, predicted: predicted, steps_per_execution=EXECUTION)
else:
    x, model = x[hvd.rank()::hvd.size()], Model()
    model.compile(hvd.DistributedOptimizer(optimizer), lambda y, predicted: predicted, steps_per_execution=EXECUTION)
model.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Change(), hvd.callbacks.Elastic(commit_every=1)])
print(f"rank {hvd.rank()} of {hvd.size()}: generation {own.job.generation}, weight {model.weight.numpy():g}",
      flush=True)
