"""Training a Keras model with a strategy and without one, on the same data, and comparing the two."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import World, assert_close, assert_equal_on_all, points

COLUMNS, BATCH, ROWS = 5, 12, 60


def dense(*extra: Any) -> list[Any]:
    return [keras.layers.Dense(6, activation="tanh"), *extra, keras.layers.Dense(1)]


def sequential(*extra: Any) -> Any:
    return keras.Sequential([keras.Input((COLUMNS,)), *dense(*extra)])


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **arguments)


def compiled(build: Callable = sequential, optimizer: Callable = sgd, loss: Any = "mse", metrics: Any = ("mae",),
             **arguments: Any) -> Any:
    model = build()
    model.compile(optimizer(), loss=loss, metrics=list(metrics) or None, **arguments)
    return model


def both(strategy: tf.distribute.Strategy, rank: int, make: Callable = compiled) -> tuple[Any, Any]:
    """The same model with the strategy, from other seeds in each process, and without one."""
    keras.utils.set_random_seed(7)
    reference = make()
    keras.utils.set_random_seed(7 + rank)
    with strategy.scope():
        model = make()
    if reference.built:
        reference.set_weights(model.get_weights())
    return model, reference


def assert_same_training(model: Any, reference: Any, ours: Any, expected: Any, atol: float = 1e-5) -> None:
    """Equal weights in all processes, and weights and histories that are those of the reference."""
    assert_equal_on_all(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights(), atol)
    assert set(ours.history) == set(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=0, atol=atol, err_msg=name)


def trains_as_one_process(world: World, make: Callable = compiled, *, rows: int = ROWS, data: Any = None,
                          atol: float = 1e-5, callbacks: Callable = list, **arguments: Any) -> tuple[Any, Any]:
    """Fit both models and compare; both models. The data are `rows` of points(), unless `data` is given."""
    model, reference = both(world.strategy, world.rank, make)
    fit_both(world.strategy, model, reference, rows=rows, data=data, atol=atol, callbacks=callbacks, **arguments)
    return model, reference


def fit_both(strategy: tf.distribute.Strategy, model: Any, reference: Any, *, rows: int = ROWS, data: Any = None,
             atol: float = 1e-5, callbacks: Callable = list, **arguments: Any) -> None:
    """As trains_as_one_process, for models that are there. They are built first, with the same weights."""
    x, y = data or points(rows)
    if not model.built:
        reference.build((None, *x.shape[1:]))
        with strategy.scope():
            model.build((None, *x.shape[1:]))
        reference.set_weights(model.get_weights())
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    ours, expected = (m.fit(x, y, callbacks=callbacks(), **arguments) for m in (model, reference))
    assert_same_training(model, reference, ours, expected, atol)
