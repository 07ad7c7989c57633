"""Losses of MPIStrategy that are no means of rows, and its optimizers, each of which reduces gradients once."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpistrat.strategy.keras import losses
from mpistrat.tensorflow import MPIStrategy

from ..programs.features.keras_training import both, compiled, fit_both, sgd
from .helpers import everywhere
from .strategy_helpers import assert_close, assert_equal_on_all_ranks, collectives_counted

BATCH, TOKENS = 12, 6
mse = keras.losses.MeanSquaredError


def sequences(rows: int, seed: int = 0) -> np.ndarray:
    """Tokens, of which 0 is none. In each batch the first rows are short and the last ones long."""
    x = np.random.default_rng(seed).integers(1, 9, size=(rows, TOKENS))
    for row in range(rows):
        x[row, 1 + row % BATCH * TOKENS // BATCH:] = 0
    return x


def tagger(outputs: int = 1, loss: Any = None, **arguments: Any) -> Any:
    """A model with a mask for each output, a number for each token."""
    inputs = [keras.Input((TOKENS,), dtype="int32") for _ in range(outputs)]
    tokens = [keras.layers.Embedding(9, 4, mask_zero=True, activity_regularizer="l2")(each) for each in inputs]
    last = [keras.layers.Dense(1, name=f"out{i}")(keras.layers.GRU(3, return_sequences=True)(each))
            for i, each in enumerate(tokens)]
    model = keras.Model(inputs if outputs > 1 else inputs[0], last if outputs > 1 else last[0])
    return compiled(lambda: model, loss=loss or ["mse"] * outputs, metrics=(), **arguments)


def dense(loss: Any, **arguments: Any) -> Any:
    return compiled(lambda: keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(1, use_bias=False)]),
                    optimizer=lambda: sgd(clipnorm=0.1), loss=loss, metrics=(), **arguments)


def three() -> Any:
    """A sum, a masked mean, and a mean of rows, with weights."""
    tokens, numbers = keras.Input((TOKENS,), dtype="int32"), keras.Input((TOKENS,))
    masked = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
    outputs = {"sum": keras.layers.Dense(1)(numbers), "mask": keras.layers.Dense(1)(masked),
               "mean": keras.layers.Dense(2)(numbers)}
    return compiled(lambda: keras.Model([tokens, numbers], outputs), metrics=(),
                    optimizer=lambda: keras.optimizers.SGD(0.01),
                    loss={"sum": mse(reduction="sum"), "mask": "mse", "mean": "mse"},
                    loss_weights={"sum": 0.1, "mask": 2.0, "mean": 1.0})


class OwnStep(keras.Model):
    """Reports a masked loss by Means, and the metrics of compile(), whose weights are tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = keras.metrics.Mean(name="kept")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weights)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(*((loss,) if isinstance(metric, keras.metrics.Mean) else (y, predicted)))
        return {metric.name: metric.result() for metric in self.metrics}


def own_step() -> Any:
    inputs = keras.Input((TOKENS,), dtype="int32")
    tokens = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    return compiled(lambda: OwnStep(inputs, keras.layers.Dense(1)(tokens)), loss="mse", metrics=["mae"])


class Arithmetic(keras.Model):
    """Trains on a loss that `arithmetic` computes from this model, its outputs, and two losses of Keras."""

    def __init__(self, arithmetic: Callable[..., Any]) -> None:
        inputs = keras.Input((TOKENS,))
        super().__init__(inputs, keras.layers.Dense(1, kernel_regularizer="l2")(inputs))
        self.arithmetic, self.kept = arithmetic, keras.metrics.Mean(name="kept")

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x)
        one, two = tf.function(mse())(y, predicted), keras.losses.MeanAbsoluteError()(y, predicted)
        loss = self.arithmetic(self, predicted, one, two)
        self.kept.update_state(loss)
        return {"kept": self.kept.result(), "total": loss, "difference": 0.5 * (4.0 * one - two)}

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            logs = self.test_step(data)
        self.optimizer.apply(tape.gradient(logs["total"], self.trainable_variables), self.trainable_variables)
        return logs


def arithmetic(compute: Callable[..., Any]) -> Any:
    return compiled(lambda: Arithmetic(compute), lambda: keras.optimizers.SGD(0.01), loss=None, metrics=())


# The loss of a step; True if the gradients of the ranks add up to that of one process.
ARITHMETIC: dict[str, tuple[Callable[..., Any], bool]] = {
    "regularized": (lambda model, p, one, two: one + 0.5 * two + tf.nn.scale_regularization_loss(model.losses), True),
    "divided by hand": (lambda model, p, one, two: sum([
        one, 2.0 * (tf.reduce_mean(p ** 2) / tf.distribute.get_strategy().num_replicas_in_sync)]), True),
    "a sum by rows": (lambda model, p, one, two: tf.reduce_sum(p ** 2) * (1 / BATCH), True),
    "a sum not divided": (lambda model, p, one, two: one + tf.add_n(model.losses), False),
    "a function": (lambda model, p, one, two: tf.sqrt(one), False),
    "a mean": (lambda model, p, one, two: 0.5 * tf.reduce_mean(tf.reduce_sum(p ** 2, 1)) + tf.reduce_mean(p), False),
}


def targets(rows: int, *shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.5, 1.0, (rows, *shape)).astype(np.float32)


def row_weights(rows: int) -> np.ndarray:
    return np.where(np.arange(rows) % BATCH < BATCH // 2, 0.1, 2.0).astype(np.float32)


def numbers(rows: int) -> np.ndarray:
    return targets(rows, TOKENS, seed=5)


# How a model is made; and of a number of rows its inputs, targets and sample weights.
CASES: dict[str, tuple[Callable[[], Any], Callable[[int], tuple[Any, ...]]]] = {
    "mask": (tagger, lambda rows: (sequences(rows), targets(rows, TOKENS, 1), None)),
    "mask, eager": (lambda: tagger(run_eagerly=True), lambda rows: (sequences(rows), targets(rows, TOKENS, 1), None)),
    "mask, accumulated": (lambda: tagger(optimizer=lambda: sgd(gradient_accumulation_steps=2)),
                          lambda rows: (sequences(rows), targets(rows, TOKENS, 1), None)),
    "mask and weights": (tagger, lambda rows: (sequences(rows), targets(rows, TOKENS, 1), np.repeat(
        row_weights(rows)[:, None], TOKENS, 1))),
    "two masks": (lambda: tagger(2), lambda rows: ([sequences(rows), sequences(rows, 1)[::-1].copy()], [
        targets(rows, TOKENS, 1), targets(rows, TOKENS, 1, seed=4)], None)),
    "mask and a step of one's own": (own_step, lambda rows: (sequences(rows), targets(rows, TOKENS, 1), None)),
    "mean by weights": (lambda: dense(mse(reduction="mean_with_sample_weight")),
                        lambda rows: (numbers(rows), targets(rows, 1), row_weights(rows))),
    "mean by weights, compiled": (lambda: dense(mse(reduction="mean_with_sample_weight"), jit_compile=True),
                                  lambda rows: (numbers(rows), targets(rows, 1), row_weights(rows))),
    "mask, mean by weights": (lambda: tagger(loss=mse(reduction="mean_with_sample_weight")), lambda rows: (
        sequences(rows), targets(rows, TOKENS, 1), np.repeat(row_weights(rows)[:, None], TOKENS, 1))),
    "sum": (lambda: dense(mse(reduction="sum")), lambda rows: (numbers(rows), targets(rows, 1), row_weights(rows))),
    "none": (lambda: dense(mse(reduction="none")), lambda rows: (numbers(rows), targets(rows, 1), None)),
    "sum, mask and mean": (three, lambda rows: ([sequences(rows), numbers(rows)], {
        "sum": targets(rows, 1), "mask": targets(rows, TOKENS, 1), "mean": targets(rows, 2)}, None)),
    "losses within a loss": (lambda: dense(lambda y, p: 0.5 * mse()(y, p) + mse()(2 * y, p)),
                             lambda rows: (numbers(rows), targets(rows, 1), None)),
    "arithmetic": (lambda: arithmetic(ARITHMETIC["regularized"][0]),
                   lambda rows: (numbers(rows), targets(rows, 1), None)),
    "a number": (lambda: dense(lambda y, p: tf.reduce_mean(tf.square(y - p))),
                 lambda rows: (numbers(rows), targets(rows, 1), None)),
}


REPEATED = ("mask", "mask, eager", "mask, accumulated", "mask and weights", "two masks", "mask, mean by weights", "sum",
            "mean by weights, compiled")


@pytest.mark.parametrize("rows", [pytest.param(3 * BATCH, marks=pytest.mark.nightly), 2 * BATCH + 1])
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.nightly] * (case in REPEATED))
                                  for case in CASES])
def test_losses_are_those_of_one_process(case: str, rows: int, strategy: MPIStrategy, rank: int) -> None:
    make, data_of = CASES[case]
    model, reference = both(strategy, rank, make)
    x, y, weights = data_of(rows)
    fit_both(strategy, model, reference, data=(x, y), sample_weight=weights, batch_size=BATCH, atol=2e-5)
    found, wanted = (each.evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
                     for each in (model, reference))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=2e-5), name


@pytest.mark.parametrize("variables", [pytest.param("central", marks=pytest.mark.nightly), "sharded"])
def test_masks_count_with_slots_elsewhere(variables: str, rank: int) -> None:
    strategy = MPIStrategy(variables=variables)
    model, reference = both(strategy, rank, tagger)
    x, y, _ = CASES["mask"][1](30)
    for each in (model, reference):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(model.get_weights(), reference.get_weights(), 1e-5)


def test_a_step_of_a_masked_loss_has_one_small_collective_more(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank, tagger)
    x, y, _ = CASES["mask"][1](2 * BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with collectives_counted() as names:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    steps = [name.rpartition("/")[2] for name in names if "()/strategy/" in name or name.startswith("optimizer")]
    # Values and indices are those of the embedding's gradient.
    found = [step.partition("#")[0] for step in steps]
    found = [step.rstrip("0123456789") for step in found if step not in ("values", "indices")]
    assert found == ["rows", "optimizer"] * 2, steps


def test_a_loss_of_one_number_is_told_of(strategy: MPIStrategy, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        models = [dense(loss) for loss in (keras.losses.Dice(), "mse")]
    for model in models:
        for _ in range(2):
            model.fit(numbers(BATCH), targets(BATCH, 1), batch_size=BATCH, verbose=0)
    said = [record.getMessage() for record in caplog.records if "one number for a batch" in record.getMessage()]
    assert [text.partition(":")[0] for text in said] == ([models[0].name] if rank == 0 else [])


@pytest.mark.parametrize("case", ARITHMETIC)
def test_a_loss_that_is_not_divided_is_told_of(case: str, strategy: MPIStrategy, rank: int,
                                               caplog: pytest.LogCaptureFixture) -> None:
    losses._tell.cache_clear()
    compute, is_right = ARITHMETIC[case]
    model, reference = both(strategy, rank, lambda: arithmetic(compute))
    for each in (model, reference):
        each.fit(numbers(BATCH), targets(BATCH, 1), batch_size=BATCH, verbose=0)
    told = [text for text in caplog.messages if "the loss by whose gradients" in text]
    assert len(told) == (rank == 0 and not is_right)
    assert is_right == np.allclose(model.get_weights()[0], reference.get_weights()[0], atol=1e-6)


SGD = keras.optimizers.SGD


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
