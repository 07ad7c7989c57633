"""Optimizers under MPIStrategy: each reduces gradients once, wherever it was made and whatever applies it."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpistrat.tensorflow import MPIStrategy

from .helpers import everywhere
from .strategy_helpers import assert_close, assert_equal_on_all_ranks

SGD = keras.optimizers.SGD


@pytest.fixture(scope="module")
def strategy() -> MPIStrategy:
    return MPIStrategy()


def variable(strategy: MPIStrategy) -> Any:
    with strategy.scope():
        return keras.Variable(np.zeros(2, np.float32), name="w")


def in_scope(strategy: MPIStrategy, make: Callable) -> Any:
    with strategy.scope():
        return make()


def steps(strategy: MPIStrategy, optimizer: Any, variable: Any, gradients: list[Any]) -> Any:
    """The variable after steps with this rank's gradients, in a graph."""
    @tf.function
    def step(gradient: Any) -> None:
        strategy.run(lambda own: optimizer.apply([own], [variable]), (gradient,))

    for gradient in gradients:
        step(tf.fill([2], tf.constant(gradient, tf.float32)))
    return variable.numpy()


class Around(SGD):
    """Applies another optimizer, of which Keras knows nothing, in place of its own update."""

    def __init__(self, inside: Any):
        super().__init__(0.1)
        self.inside = inside

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.inside.apply(grads, trainable_variables)


class Doubles(SGD):
    """Has an apply of its own."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2 * gradient for gradient in grads], trainable_variables)


@pytest.mark.parametrize(("make", "rate"), [
    (lambda: SGD(0.1), 0.1), (lambda: Around(SGD(0.1)), 0.1), (lambda: Around(Around(SGD(0.1))), 0.1),
    (lambda: Doubles(0.1), 0.2), (lambda: Around(Doubles(0.1)), 0.2),
    (lambda: keras.optimizers.LossScaleOptimizer(Doubles(0.1), 1.0), 0.2),
    (lambda: SGD(0.1, gradient_accumulation_steps=2), 0.05),
], ids=["one", "one around it", "two around it", "own apply", "around own apply", "loss scale", "accumulates"])
def test_gradients_are_reduced_once(make: Callable, rate: float, strategy: MPIStrategy, rank: int, size: int) -> None:
    value = steps(strategy, in_scope(strategy, make), variable(strategy), [1.0 + rank, 2.0 + rank])
    total = sum(3 + 2 * other for other in range(size))
    assert_close([value], [np.full(2, -rate * total, np.float32)], 1e-5)
    assert_equal_on_all_ranks([value])


def test_an_optimizer_made_elsewhere_agrees_on_an_overflow(strategy: MPIStrategy, rank: int, size: int) -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(0.1), 1.0)
    value = steps(strategy, optimizer, variable(strategy), [np.inf if rank == 0 else 1.0, 1.0])
    assert_close([value], [np.full(2, -0.1 * size / 0.5, np.float32)], 1e-5)  # The overflow has halved the scale.
    assert_equal_on_all_ranks([value, optimizer.dynamic_scale.numpy()])


def test_one_with_an_apply_of_its_own_is_made_in_the_scope(strategy: MPIStrategy) -> None:
    optimizer, own = Doubles(0.1), variable(strategy)
    with pytest.raises(ValueError, match=r"Doubles defines its own apply\(\), .* created in strategy\.scope\(\)"):
        strategy.run(lambda: optimizer.apply([tf.ones([2])], [own]))


@pytest.mark.parametrize("passes", [None, 2])
def test_outside_of_a_replica_a_rank_applies_its_own_gradients(passes: int | None, strategy: MPIStrategy, rank: int,
                                                               size: int) -> None:
    optimizer, own = in_scope(strategy, lambda: SGD(0.1, gradient_accumulation_steps=passes)), variable(strategy)
    for _ in range(passes or 1):
        optimizer.apply([tf.fill([2], 1.0 + rank)], [own])
    assert everywhere(own.numpy()[0]) == pytest.approx([-0.1 * (1 + other) for other in range(size)])


def test_its_class_stands_for_that_of_keras(strategy: MPIStrategy) -> None:
    optimizer = in_scope(strategy, lambda: SGD(0.1, momentum=0.5))
    cls = type(optimizer)
    assert cls.__name__ == "SGD" and cls.__module__ == SGD.__module__ and isinstance(optimizer, SGD)
    of_keras = keras.optimizers.serialize(SGD(0.1, momentum=0.5))
    assert keras.optimizers.serialize(optimizer) | {"config": of_keras["config"]} == of_keras
    assert type(cls(0.2)) is SGD and type(cls.from_config(optimizer.get_config())) is SGD
    assert type(in_scope(strategy, lambda: cls(0.2))) is cls
