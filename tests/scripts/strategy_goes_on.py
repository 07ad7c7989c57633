"""Trains models from files that another number of ranks has left, under MPIStrategy with sharded and mirrored slots.

usage: mpistrat run -np N python tests/scripts/strategy_goes_on.py DIRECTORY

Each rank says whether both modes have the same bits of weights and slots.
"""

import os
import sys
from typing import Any

import keras
import numpy as np

import mpistrat.tensorflow as hvd

BATCH = 6
OPTIMIZERS = {"momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "Adam": lambda: keras.optimizers.Adam(0.01)}
hvd.init()
strategies = {mode: hvd.MPIStrategy(variables=mode) for mode in ("sharded", "mirrored")}
generator = np.random.default_rng(hvd.size())
x, y = generator.normal(size=(4 * BATCH, 30)).astype(np.float32), generator.normal(size=(4 * BATCH, 3))


def trained(mode: str, name: str) -> list[np.ndarray]:
    """What the file has after another epoch, which begins with the last file of the sharded mode."""
    before, path = (os.path.join(sys.argv[1], f"{each}-{name}.keras") for each in ("sharded", mode))
    with strategies[mode].scope():
        if os.path.exists(before):
            model: Any = keras.models.load_model(before)
        else:
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(50, activation="tanh"),
                                      keras.layers.Dense(3)])
            model.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    model.save(path)  # On all ranks, which have read `before`.
    saved = keras.models.load_model(path)
    return [*saved.get_weights(), *(np.asarray(v) for v in saved.optimizer.variables)]


for name in OPTIMIZERS:
    mirrored, sharded = trained("mirrored", name), trained("sharded", name)
    is_same = all(np.array_equal(a, b) for a, b in zip(mirrored, sharded, strict=True))
    print(f"rank {hvd.rank()}: of {hvd.size()}: {name} after {sharded[4]} steps, {len(sharded)} arrays, same bits: "
          f"{is_same}", flush=True)
