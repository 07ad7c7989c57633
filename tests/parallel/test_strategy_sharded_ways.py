"""MPIStrategy(variables="sharded") with XLA, with mixed precision, and between made-up hosts, against "mirrored"."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from mpistrat.tensorflow import MPIStrategy  # noqa: E402
from mpistrat.tensorflow.xla import ffi  # noqa: E402

from ..support.legs import DEFAULT, HOST_EACH, TWO_HOSTS, Leg, under  # noqa: E402
from .strategy_helpers import assert_close, assert_equal_on_all_ranks  # noqa: E402
from .test_sharded import new_model, rows_of, whole_state  # noqa: E402

BATCH, STEPS = 6, 4
needs_xla = pytest.mark.skipif(ffi.api() is None, reason="XLA compiles collectives with TensorFlow 2.21")


@pytest.fixture(autouse=True)
def _initialised_afterwards() -> Iterator[None]:
    yield
    mpistrat.init()


def adam(accumulates: bool = False) -> Any:
    more = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05} if accumulates else {}
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **more)


def by_fit(strategy: MPIStrategy, policy: str = "float32", **compiled: Any) -> tuple[list[np.ndarray], Any]:
    """The weights and the whole state, and the optimizer."""
    model = new_model(strategy=strategy, policy=policy)
    with strategy.scope():
        model.compile(adam(policy != "float32"), "mse", **compiled)
    x, y = (np.concatenate(parts)[:BATCH * STEPS] for parts in zip(rows_of(0), rows_of(1), strict=True))
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *whole_state(model.optimizer)], model.optimizer


def by_loop(strategy: MPIStrategy) -> tuple[list[np.ndarray], Any]:
    model = new_model(strategy=strategy)
    with strategy.scope():
        optimizer = adam()
        optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        def of_replica(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / strategy.num_replicas_in_sync
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        strategy.run(of_replica, (x, y))

    x, y = rows_of(mpistrat.rank())
    for _ in range(STEPS):
        step(tf.constant(x), tf.constant(y))
    return [*model.get_weights(), *whole_state(optimizer)], optimizer


# Keras wraps the optimizer of a model of mixed precision in one that scales the loss.
MIXED = "mixed precision, accumulation and global clipnorm"
WAYS = {
    "fit": lambda strategy: by_fit(strategy, jit_compile=False),
    "compiled fit": lambda strategy: by_fit(strategy, jit_compile=True),
    "compiled loop": by_loop,
    MIXED: lambda strategy: by_fit(strategy, "mixed_float16")}


@pytest.mark.parametrize(("way", "leg"), [
    pytest.param("fit", HOST_EACH, marks=pytest.mark.nightly),
    pytest.param("compiled fit", DEFAULT, marks=[needs_xla, pytest.mark.nightly]),
    pytest.param("compiled loop", HOST_EACH, marks=needs_xla), (MIXED, HOST_EACH)])
def test_the_numbers_are_those_of_the_mirrored_mode(way: str, leg: Leg, size: int) -> None:
    with under(TWO_HOSTS if size > 2 and leg is HOST_EACH else leg):
        (ours, optimizer), (expected, _) = [WAYS[way](MPIStrategy(variables=mode)) for mode in ("sharded", "mirrored")]
        assert_close(ours, expected, 1e-5)
        assert_equal_on_all_ranks(ours)
    assert hasattr(optimizer, "inner_optimizer") == (way == MIXED)
    assert hasattr(getattr(optimizer, "inner_optimizer", optimizer), "consolidate_state")
