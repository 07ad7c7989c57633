"""Features of models: the ways to write one, and where it is made."""

import warnings
from typing import Any

import keras
import numpy as np

import mpistrat

from .common import World, assert_close, assert_equal_on_all, feature, points
from .keras_training import BATCH, COLUMNS, assert_same_training, both, compiled, dense, sgd, trains_as_one_process

GROUP = "Keras: models"


class Subclassed(keras.Model):
    """A model that knows its input only when it sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


@feature(GROUP, "A subclassed model")
def subclassed(world: World) -> None:
    trains_as_one_process(world, lambda: compiled(Subclassed))


@feature(GROUP, "A model that is built by its first batch")
def built_by_data(world: World) -> None:
    with world.strategy.scope():
        model = compiled(lambda: keras.Sequential(dense()))
    keras.utils.set_random_seed(world.rank)
    model.fit(*points(60), batch_size=BATCH, verbose=0)
    assert_equal_on_all(model.get_weights())


@feature(GROUP, "A functional model with two inputs")
def two_inputs(world: World) -> None:
    def build() -> Any:
        inputs = [keras.Input((2,)), keras.Input((3,))]
        x = keras.layers.Concatenate()([keras.layers.Dense(4)(i) for i in inputs])
        return keras.Model(inputs, keras.layers.Dense(1)(x))
    x, y = points(60)
    model, reference = both(world.strategy, world.rank, lambda: compiled(build))
    ours, expected = (m.fit([x[:, :2], x[:, 2:]], y, batch_size=BATCH, shuffle=False, verbose=0)
                      for m in (model, reference))
    assert_same_training(model, reference, ours, expected)


@feature(GROUP, "Several outputs, with loss weights")
def several_outputs(world: World) -> None:
    def make() -> Any:
        inputs = keras.Input((COLUMNS,))
        x = keras.layers.Dense(4)(inputs)
        model = keras.Model(inputs, {"a": keras.layers.Dense(1, name="a")(x), "b": keras.layers.Dense(1, name="b")(x)})
        model.compile(sgd(), loss={"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 0.3},
                      metrics={"a": ["mae"], "b": ["mse"]})
        return model
    x, y = points(60)
    model, reference = both(world.strategy, world.rank, make)
    ours, expected = (m.fit(x, {"a": y, "b": 1 - y}, batch_size=BATCH, shuffle=False, verbose=0)
                      for m in (model, reference))
    assert_same_training(model, reference, ours, expected)


@feature(GROUP, "A model in a model, with shared layers")
def nested_model(world: World) -> None:
    def build() -> Any:
        inner = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(COLUMNS, activation="tanh")])
        return keras.Sequential([keras.Input((COLUMNS,)), inner, inner, keras.layers.Dense(1)])
    trains_as_one_process(world, lambda: compiled(build))


@feature(GROUP, "Built outside of the scope: a warning")
def built_outside(world: World) -> None:
    model = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*points(24), batch_size=BATCH, verbose=0)
    # With one process nothing can go wrong.
    assert mpistrat.size() == 1 or any("strategy.scope" in str(warning.message) for warning in caught)


@feature(GROUP, "`get_weights`, `set_weights`")
def set_weights(world: World) -> None:
    model, reference = both(world.strategy, world.rank)
    weights = [np.full(w.shape, 0.1 * i, np.float32) for i, w in enumerate(model.get_weights())]
    model.set_weights(weights)
    assert_close(model.get_weights(), weights, 0)
    reference.set_weights(weights)
    x, _ = points(7)
    assert_close([model.predict(x, verbose=0)], [reference.predict(x, verbose=0)], 1e-6)


@feature(GROUP, "Two models with one strategy, in turns")
def two_models(world: World) -> None:
    first, second = trains_as_one_process(world), trains_as_one_process(world, lambda: compiled(Subclassed))
    for model, reference in (first, second):
        x, y = points(61)
        assert_close(model.evaluate(x, y, verbose=0), reference.evaluate(x, y, verbose=0))
