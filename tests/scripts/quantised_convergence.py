"""usage: quantised_convergence.py: train three models with each compression, each two ranks being a host.

Prints for each model a JSON object with the loss afterwards by compression. All ranks must have the same
weights in the end.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from keras import layers

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import mpistrat.keras as hvd
from tests.support.pretended_hosts import pretend_hosts

CLASSES, STEPS, ROWS = 8, 150, 16


def dense() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Labels are the largest of random products of the inputs."""
    random = np.random.default_rng(1)
    x = random.standard_normal((4096, 64)).astype(np.float32)
    y = np.argmax(x @ random.standard_normal((64, CLASSES)), axis=1)
    return keras.Sequential([keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(CLASSES)]), x, y


def convolutional() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Each class has a picture of its own, under noise."""
    random = np.random.default_rng(2)
    y = random.integers(0, CLASSES, 4096)
    x = random.standard_normal((CLASSES, 12, 12, 1))[y] * 0.4 + random.standard_normal((4096, 12, 12, 1))
    return keras.Sequential([
        keras.Input((12, 12, 1)), layers.Conv2D(16, 3, activation="relu"), layers.Conv2D(32, 3, activation="relu"),
        layers.Flatten(), layers.Dense(CLASSES)]), x.astype(np.float32), y


def text() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A class prefers some words."""
    random = np.random.default_rng(3)
    y = random.integers(0, CLASSES, 4096)
    preferred = random.integers(0, 500, (CLASSES, 20))
    words = np.where(random.random((4096, 24)) < 0.2, preferred[y[:, None], random.integers(0, 20, (4096, 24))],
                     random.integers(0, 500, (4096, 24)))
    return keras.Sequential([
        keras.Input((24,), dtype="int32"), layers.Embedding(500, 48), layers.Conv1D(64, 3, activation="relu"),
        layers.GlobalAveragePooling1D(), layers.Dense(64, "relu"), layers.Dense(CLASSES)]), words, y


def last_loss(made: Callable[[], tuple[keras.Model, np.ndarray, np.ndarray]], compression: str) -> float:
    """Train, and return the loss of rows that are the same for all ranks."""
    keras.utils.set_random_seed(7)
    model, x, y = made()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3), compression=getattr(hvd.Compression, compression))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = np.random.default_rng(hvd.rank()).integers(0, len(x), STEPS * ROWS)
    model.fit(x[rows], y[rows], batch_size=ROWS, shuffle=False, verbose=0)
    weights = [weight.tobytes() for weight in model.get_weights()]
    assert len(set(hvd.allgather_object(b"".join(weights)))) == 1, "the ranks have other weights"
    test = np.random.default_rng(99).integers(0, len(x), 1024)
    return float(model.evaluate(x[test], y[test], batch_size=1024, verbose=0))


pretend_hosts(2)
hvd.init()
for each in (dense, convolutional, text):
    found = {compression: round(last_loss(each, compression), 5) for compression in ("none", "int8")}
    if hvd.rank() == 0:
        print(json.dumps({"model": each.__name__, **found}), flush=True)
