"""`mpistrat bench --train`: training on synthetic data with and without averaging, in turn on the same ranks.

Called by command.py, on every rank.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat

_WARM_UP = 2


def models(image: int) -> dict[str, Callable[[], Any]]:
    """Return functions that make the Keras models, by name: ResNet-50 for `image` x `image` pixels, and an MLP."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    layers = keras.layers

    def mlp() -> Any:
        return keras.Sequential([keras.Input((784,)), layers.Dense(1024, "relu"), layers.Dense(1024, "relu"),
                                 layers.Dense(10)])

    return {"resnet50": lambda: keras.applications.ResNet50(weights=None, input_shape=(image, image, 3), classes=10),
            "mlp": mlp}


def measure_training(name: str, image: int, batch: int, steps: int) -> tuple[float, float]:
    """Return the median seconds per step of one model, (without, with) averaging over the ranks. Collective.

    All ranks train in both cases, in alternate steps, so that they share cores, memory and power in the same way. The
    difference is the cost of averaging. In both cases the ranks start each step at the same time.
    """
    import keras

    import mpistrat.keras as hvd
    make = models(image)[name]
    compiled = []
    for averaged in (False, True):
        keras.utils.set_random_seed(1)
        model = make()
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        model.compile(hvd.DistributedOptimizer(optimizer) if averaged else optimizer,
                      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        compiled.append(model)
    shape = compiled[0].input_shape[1:]
    random = np.random.default_rng(mpistrat.rank())
    inputs = random.random((batch, *shape), np.float32)
    labels = random.integers(0, 10, batch)
    seconds: list[list[float]] = [[], []]
    for _ in range(_WARM_UP + steps):
        for model, times in zip(compiled, seconds, strict=True):
            mpistrat.barrier()
            began = time.perf_counter()
            model.train_on_batch(inputs, labels)
            times.append(time.perf_counter() - began)
    slowest = mpistrat.allreduce(np.array(seconds)[:, _WARM_UP:], name="bench.train", op=mpistrat.Max)
    return statistics.median(slowest[0].tolist()), statistics.median(slowest[1].tolist())
