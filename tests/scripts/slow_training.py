"""Train one model in several ways, between hosts that a slow network joins; rank 0 prints a line of JSON for each.

usage: slow_training.py STEPS WAY...

A line has the way, the rows per second of all ranks, and the loss of other rows in the end. "alone" averages nothing:
that is a run without any network, and its loss is that of rank 0.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import mpistrat.keras as hvd

COLUMNS, HIDDEN, CLASSES, BATCH, WARM_UP = 256, 512, 10, 64, 3
DIFFICULTY = 8  # dimensions of the inputs that the class depends on


def rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the class that a fixed random network gives them."""
    fixed, own = np.random.default_rng(0), np.random.default_rng(seed)
    x = own.normal(size=(count, COLUMNS)).astype(np.float32)
    hidden = np.tanh(x[:, :DIFFICULTY] @ fixed.normal(size=(DIFFICULTY, 32)))
    return x, np.argmax(hidden @ fixed.normal(size=(32, CLASSES)), axis=1)


def model_of() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(HIDDEN, "relu"),
                             keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(HIDDEN, "relu"),
                             keras.layers.Dense(CLASSES)])


def distributed(**arguments: Any) -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), **arguments), []


def hosts() -> Any:
    local = hvd.callbacks.LocalSGD(every=10, scope="hosts")
    return distributed(process_set=local.process_set)[0], [local]


def diloco(**arguments: Any) -> Any:
    return keras.optimizers.Adam(1e-3), [hvd.callbacks.DiLoCo(every=50, **arguments)]


WAYS: dict[str, Callable[[], Any]] = {
    "alone": lambda: (keras.optimizers.Adam(1e-3), []), "none": distributed,
    **{name: lambda name=name: distributed(compression=getattr(hvd.Compression, name))
       for name in ("bf16", "int8") if hasattr(hvd.Compression, name)},
    "hosts": hosts, "diloco": diloco,
    "diloco int8": lambda: diloco(compression=hvd.Compression.int8)}


def measure(way: str, steps: int) -> tuple[float, float]:
    """(rows per second of all ranks, loss of other rows in the end). Collective."""
    optimizer, callbacks = WAYS[way]()
    model = model_of()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    start = model.get_weights()
    x, y = rows(1 + hvd.rank(), BATCH * steps)
    model.fit(x[:WARM_UP * BATCH], y[:WARM_UP * BATCH], batch_size=BATCH, verbose=0,
              callbacks=WAYS[way]()[1])  # traces the step
    for variable in model.optimizer.variables:
        if variable.name != "learning_rate":
            variable.assign(np.zeros(variable.shape, variable.dtype))
    model.set_weights(start)
    hvd.barrier()
    began = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
    hvd.barrier()
    seconds = time.perf_counter() - began
    return hvd.size() * BATCH * steps / seconds, float(model.evaluate(*rows(0, 4096), batch_size=512, verbose=0))


def main() -> None:
    steps, ways = int(sys.argv[1]), sys.argv[2:]
    hvd.init()
    for way in ways:
        if way in WAYS:
            rows_per_s, loss = measure(way, steps)
            if hvd.rank() == 0:
                print(json.dumps({"way": way, "rows_per_s": rows_per_s, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
