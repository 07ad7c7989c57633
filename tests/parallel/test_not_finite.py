"""The first rank with Inf or NaN in its gradients is named, with its tensors, whatever averages them."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.tensorflow import DistributedGradientTape, MPIStrategy
from mpistrat.tensorflow.xla.context import why_not

from ..support.levels import sample

BATCH, STEPS = 4, 6


@pytest.fixture(autouse=True)
def _nothing_found(size: int) -> None:
    if size == 1:
        pytest.skip("one rank reduces nothing")
    watch = mpistrat.global_process_set.group("watch").finite
    assert watch is not None
    watch.__init__(mpistrat.rank())  # type: ignore[misc]


def model_of(policy: str = "float32") -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu", dtype=policy, name="first"),
                             keras.layers.Dense(1, dtype=policy, name="last")])


def data_of(bad_row: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(2).normal(size=(STEPS * batch, 3)).astype(np.float32)
    y = x[:, :1].copy()
    if bad_row >= 0:
        y[bad_row] = np.nan
    return x, y


def by_fit(is_bad: bool, **arguments: Any) -> None:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", **arguments)
    model.fit(*data_of(2 * BATCH if is_bad else -1, BATCH), batch_size=BATCH, shuffle=False, verbose=0)


def by_strategy(is_bad: bool) -> None:
    with MPIStrategy().scope():
        model = model_of()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    size = mpistrat.size()
    # Of each global batch a rank has the rows of its place. The last one has the bad row.
    model.fit(*data_of(3 * size * BATCH - 1, size * BATCH), batch_size=size * BATCH, shuffle=False, verbose=0)


def by_tape(is_bad: bool, wrap: Callable = lambda step: step) -> None:
    model, optimizer = model_of(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))

    run = wrap(step)
    x, y = map(tf.constant, data_of(0 if is_bad else -1, BATCH))
    for _ in range(25):  # No end of an epoch looks at the weights.
        run(x[:BATCH], y[:BATCH])


@sample(("train", "ago"), [
    (by_fit, 4), (lambda is_bad: by_fit(is_bad, run_eagerly=True), 4), (by_strategy, 4), (by_tape, 20),
    (lambda is_bad: by_tape(is_bad, tf.function), 20),
    pytest.param(lambda is_bad: by_tape(is_bad, tf.function(jit_compile=True)), 20,
                 marks=pytest.mark.skipif(why_not() != "", reason="XLA cannot compile collectives here"))],
    ids=["fit", "eager fit", "strategy", "eager tape", "tape", "compiled tape"])
def test_the_rank_and_its_tensors_are_named_once(train: Callable[[bool], None], ago: int, rank: int, size: int,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(rank == size - 1)
    said = [each.getMessage() for each in caplog.records if "Inf or NaN" in each.getMessage()]
    assert len(said) == (rank == size - 1)
    for text in said:
        assert f"rank {rank} was the first with Inf or NaN in its gradients, {ago} steps ago: in those of " in text
        assert "first/kernel" in text and "last/bias" in text


@sample("is_inside", [True, False], ids=["around the optimizer", "in the optimizer"])
def test_overflow_that_a_scale_of_the_loss_skips_is_none(is_inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    def scaled(optimizer: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**20)

    sgd, model = keras.optimizers.SGD(0.01), model_of("mixed_float16")
    model.compile(scaled(hvd.DistributedOptimizer(sgd)) if is_inside else hvd.DistributedOptimizer(scaled(sgd)), "mse")
    with caplog.at_level(logging.WARNING):
        model.fit(*data_of(-1, BATCH), batch_size=BATCH, epochs=2, verbose=0)
    assert float(model.optimizer.dynamic_scale) < 2.0**20  # Steps have been skipped.
    assert "Inf or NaN" not in caplog.text
    assert not mpistrat.global_process_set.group("watch").finite.is_done  # type: ignore[union-attr]
