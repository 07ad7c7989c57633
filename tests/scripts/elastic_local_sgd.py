"""A fit with DiLoCo in an elastic job whose rank 1 is killed within the second epoch of the first generation.

usage: mpistrat run --elastic=restart -np 2 python tests/scripts/elastic_local_sgd.py

Each rank prints with which state its fit begins, and which it ends with.
"""

import os
import signal
from typing import Any

import keras
import numpy as np

import mpistrat.keras as hvd
from mpistrat.elastic import membership
from mpistrat.tensorflow.consistency import digest_of

hvd.init()
generation = membership.current().job.generation
local = hvd.callbacks.DiLoCo(every=3)


class Tell(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (generation, self.epoch, batch, hvd.rank()) == (1, 1, 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, logs: Any = None) -> None:
        self.say("begins")

    def on_train_end(self, logs: Any = None) -> None:
        self.say("ends")

    def say(self, what: str) -> None:
        velocity = local.variables[-1].numpy() if len(local.variables) > 1 else np.zeros(1)
        own = b"".join(digest_of(np.asarray(v.numpy())) for v in [*self.model.weights, *local.variables]).hex()
        print(f"generation {generation}, rank {hvd.rank()} {what}: step {int(local.variables[0])}, outer steps "
              f"{int(local.outer[0].iterations)}, moves {bool(np.any(velocity))}, {own}", flush=True)


keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), loss="mse")
x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype(np.float32)
model.fit(x, x.sum(axis=1), batch_size=4, epochs=3, shuffle=False, verbose=0,
          callbacks=[local, Tell(), hvd.callbacks.Elastic(commit_every=4)])
