"""An elastic job with a sharded optimizer, in which rank 2 of the first generation dies after its third step.

usage: mpistrat run --elastic -np 3 python tests/scripts/elastic_sharded.py [strategy]

It is a loop, or fit under MPIStrategy. All ranks have the same gradients, so each rank of the last generation has the
weights of one process; of one with as many rows, in another order of additions, under a strategy.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.elastic import membership
from mpistrat.tensorflow import MPIStrategy

STEPS = 6
hvd.init()
generation = membership.current().job.generation


def layer() -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(7)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def step_of(model: Any, number: int) -> None:
    model.optimizer.apply([tf.fill(v.shape, 1.0 / (1 + number)) for v in model.weights], model.weights)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < STEPS:
        step_of(state.model, state.step)
        if (generation, hvd.rank(), state.step) == (1, 2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()


class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (generation, hvd.rank(), batch) == (1, 2, 3):
            os.kill(os.getpid(), signal.SIGKILL)


alone = layer()
if "strategy" in sys.argv:
    x = np.tile(np.linspace(-1, 1, 9, dtype=np.float32), (6 * STEPS, 1))
    with MPIStrategy(variables="sharded").scope():
        model = layer()
    model.fit(x, x[:, :7], batch_size=6, shuffle=False, verbose=0,
              callbacks=[Die(), hvd.callbacks.Elastic(commit_every=1)])
    assert hasattr(model.optimizer, "consolidate_state")
    alone.fit(x, x[:, :7], batch_size=6, shuffle=False, verbose=0)
else:
    model = layer()
    model.optimizer = hvd.ShardedOptimizer(model.optimizer)
    train(hvd.elastic.KerasState(model, step=0))
    for number in range(STEPS):
        step_of(alone, number)
most = 1e-5 if "strategy" in sys.argv else 0
is_same = all(np.allclose(a, b, most, most) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
print(f"rank {hvd.rank()}: of {hvd.size()}, generation {generation}, as one process: {is_same}", flush=True)
