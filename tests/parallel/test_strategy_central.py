"""MPIStrategy(variables="central"): the numbers of the mirrored mode, with the optimizers' slots on the chief only."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from mpistrat.tensorflow import MPIStrategy  # noqa: E402

from ..support.keras_versions import needs_multi_optimizer  # noqa: E402
from ..support.levels import sample  # noqa: E402
from .strategy_helpers import assert_close, assert_equal_on_all_ranks, collectives_counted, global_data  # noqa: E402

optimizers = keras.optimizers
COLUMNS, BATCH = 5, 12
STEPS = 5


@pytest.fixture(scope="module")
def central() -> MPIStrategy:
    return MPIStrategy(variables="central")


@pytest.fixture(scope="module")
def mirrored() -> MPIStrategy:
    return MPIStrategy()


class Loop:
    """Two variables of a model, an optimizer, and a step of one's own whose gradients differ among the ranks."""

    def __init__(self, strategy: MPIStrategy, make: Callable, build: bool = True, graph: bool = True):
        self.strategy, self._rank = strategy, mpistrat.rank()
        with strategy.scope():
            self.weights = [keras.Variable(np.linspace(-1, 1, 15).reshape(5, 3).astype(np.float32), name="kernel"),
                            keras.Variable(np.zeros(3, np.float32), name="bias")]
            self.weights[0].constraint = keras.constraints.MaxNorm(1.0, axis=0)
            self.optimizer = make()
            if build:
                self.optimizer.build(self.weights)
        step = functools.partial(strategy.run, self._step)
        self.step = tf.function(lambda number: step((number,))) if graph else lambda number: step((number,))

    def _step(self, number: Any) -> None:
        inputs = tf.reshape(tf.sin(tf.range(20.0) + 3.0 * self._rank + number), [4, 5])
        with tf.GradientTape() as tape:
            outputs = tf.tanh(inputs @ self.weights[0].value + self.weights[1].value)
            loss = getattr(self.optimizer, "scale_loss", lambda loss: loss)(tf.reduce_mean((outputs - 0.5) ** 2))
        self.optimizer.apply(tape.gradient(loss, [v.value for v in self.weights]), self.weights)

    def run(self, steps: int = STEPS) -> "Loop":
        for number in range(steps):
            self.step(tf.constant(float(number)))
        return self

    @property
    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.weights]


def by_shape(variable: Any) -> Any:
    """An optimizer for each rank of variables."""
    return _of_rank[len(variable.shape)]


_of_rank: dict[int, Any] = {}


def two_optimizers() -> Any:
    _of_rank.update({1: optimizers.SGD(0.1, momentum=0.9), 2: optimizers.Adam(0.01)})
    return optimizers.MultiOptimizer(by_shape)


MAKERS: dict[str, Callable] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.01),
    "clipvalue": lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.001),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "EMA": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation, clipped": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.01),
    "accumulation and EMA": lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2, use_ema=True,
                                                   ema_momentum=0.5, ema_overwrite_frequency=3),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=64.0),
    "several": two_optimizers,
}


@sample("name", [pytest.param(name, marks=needs_multi_optimizer if name == "several" else ())
                                  for name in MAKERS])
def test_an_optimizer_gives_the_bits_of_the_mirrored_mode(central: MPIStrategy, mirrored: MPIStrategy,
                                                          name: str) -> None:
    ours, expected = Loop(central, MAKERS[name]).run(), Loop(mirrored, MAKERS[name]).run()
    assert_close(ours.values, expected.values, 0)
    assert_equal_on_all_ranks(ours.values)
    assert not np.array_equal(ours.values[0], Loop(mirrored, MAKERS[name]).values[0]), "nothing was trained"


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [{"build": False}, {"graph": False}], ids=str)
def test_an_optimizer_may_be_built_in_the_step_and_the_step_run_eagerly(central: MPIStrategy, mirrored: MPIStrategy,
                                                                         arguments: dict, rank: int) -> None:
    ours, expected = [Loop(strategy, MAKERS["Adam"], **arguments).run() for strategy in (central, mirrored)]
    assert_close(ours.values, expected.values, 0)
    assert_equal_on_all_ranks(ours.values)
    assert (elements_of_slots(ours.optimizer) > 0) == (rank == 0)


# -- memory -----------------------------------------------------------------------------------------------------------


def elements_of_slots(optimizer: Any) -> int:
    """How many numbers this rank keeps for an optimizer, besides those of which there is one for the whole model."""
    return sum(variable.numpy().size for variable in optimizer.variables if len(variable.shape))


@sample("name", ["Adam", "EMA", "loss scale", pytest.param("several", marks=needs_multi_optimizer)])
def test_slots_take_memory_on_the_chief_only(central: MPIStrategy, mirrored: MPIStrategy, name: str,
                                             rank: int) -> None:
    expected = elements_of_slots(Loop(mirrored, MAKERS[name]).optimizer)
    assert expected >= 18
    loop = Loop(central, MAKERS[name]).run(1)
    assert elements_of_slots(loop.optimizer) == (expected if rank == 0 else 0)


def test_a_slot_has_the_same_shape_for_keras_on_all_ranks(central: MPIStrategy, rank: int) -> None:
    shapes = [tuple(variable.shape) for variable in Loop(central, MAKERS["momentum"]).optimizer.variables]
    assert mpistrat.allgather_object(shapes) == [[(), (), (5, 3), (3,)]] * mpistrat.size()


def test_each_rank_sums_up_its_own_gradients(central: MPIStrategy, rank: int) -> None:
    optimizer = Loop(central, MAKERS["accumulation"]).run(1).optimizer
    sums = mpistrat.allgather_object([total.numpy().tobytes() for total in optimizer._accumulated_gradients])
    assert len({first for first, _ in sums}) == len(sums)


# -- communication ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("Adam", [2, 2, 2, 2]), ("accumulation", [0, 2, 0, 2])])
def test_a_step_sends_gradients_once_and_values_once(central: MPIStrategy, name: str, expected: list[int]) -> None:
    loop = Loop(central, MAKERS[name]).run(2)
    counts = []
    for number in range(4):
        with collectives_counted() as names:
            loop.step(tf.constant(float(number)))
        counts.append(len([each for each in names if not each.startswith("check/")]))  # Checks are in the first steps.
    assert counts == expected


def test_with_slots_there_is_nothing_to_agree_on_when_they_are_made(central: MPIStrategy) -> None:
    loop = Loop(central, MAKERS["SGD"])
    with collectives_counted() as names, central.scope():
        optimizer = optimizers.Adam(0.01)
        made = len(names)
        optimizer.build(loop.weights)
    assert names[made:] == []


def test_a_variable_from_elsewhere_is_an_error_on_every_rank(central: MPIStrategy) -> None:
    variable = tf.Variable([1.0])
    with central.scope():
        optimizer = optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="was not created in this strategy's scope"):
        central.run(lambda: optimizer.apply([tf.ones([1])], [variable]))


# -- Keras ------------------------------------------------------------------------------------------------------------


def model_of(strategy: MPIStrategy, make: Callable = MAKERS["Adam"], dropped: float = 0.3, **arguments: Any) -> Any:
    """A model with layers that draw random numbers and that keep statistics."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(6, activation="tanh"),
                                  keras.layers.BatchNormalization(), keras.layers.Dropout(dropped),
                                  keras.layers.Dense(1)])
        model.compile(make(), loss="mse", metrics=["mae"], **arguments)
    return model


def fit(model: Any, epochs: int = 1, **arguments: Any) -> dict[str, list[float]]:
    """Train on batches of which the last one is smaller."""
    history = model.fit(*global_data(61), batch_size=BATCH, epochs=epochs, verbose=0, **arguments).history
    return dict(history)


@pytest.mark.nightly
def test_averages_take_turns_with_the_weights(central: MPIStrategy, mirrored: MPIStrategy) -> None:
    def make() -> Any:
        return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    weights = []
    for strategy in (central, mirrored):
        model = model_of(strategy, make)
        fit(model, 2, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
        weights.append(model.get_weights())
    assert_close(weights[0], weights[1], 0)
    assert_equal_on_all_ranks(weights[0])


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_training_goes_on_from_the_chiefs_file(central: MPIStrategy, rank: int, shared_dir: str) -> None:
    model = model_of(central, dropped=0.0)
    fit(model)
    model.save(os.path.join(shared_dir, f"rank{rank}.keras"))
    mpistrat.barrier()
    with central.scope():
        loaded = keras.models.load_model(os.path.join(shared_dir, "rank0.keras"))
    fit(loaded, shuffle=False)
    fit(model, shuffle=False)
    assert_equal_on_all_ranks(loaded.get_weights())
    assert_close(loaded.get_weights(), model.get_weights(), 0)


def test_a_file_of_another_rank_has_no_slots_and_says_so(central: MPIStrategy, size: int, shared_dir: str,
                                                         rank: int) -> None:
    model = model_of(central)
    model.save(os.path.join(shared_dir, f"rank{rank}.keras"))
    mpistrat.barrier()
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"), central.scope():
        loaded = keras.models.load_model(os.path.join(shared_dir, f"rank{size - 1}.keras"))
    assert_close(loaded.get_weights(), model.get_weights(), 0)


def test_a_checkpoint_of_the_chief_is_restored_on_all_ranks(central: MPIStrategy, rank: int, shared_dir: str) -> None:
    loop = Loop(central, MAKERS["momentum"]).run(2)
    saved = tf.train.Checkpoint(weights=loop.weights, optimizer=loop.optimizer).write(f"{shared_dir}/rank{rank}")
    expected = loop.run(2).values
    mpistrat.barrier()
    other = Loop(central, MAKERS["momentum"])
    checkpoint = tf.train.Checkpoint(weights=other.weights, optimizer=other.optimizer)
    checkpoint.read(saved.replace(f"rank{rank}", "rank0")).assert_consumed()
    assert_close(other.run(2).values, expected, 0)
    assert_equal_on_all_ranks(other.values)


def test_an_optimizer_takes_slots_on_all_ranks(central: MPIStrategy, rank: int) -> None:
    loop, other = Loop(central, MAKERS["momentum"]).run(2), Loop(central, MAKERS["momentum"])
    slots = mpistrat.broadcast_object([variable.numpy() for variable in loop.optimizer.variables], 0)
    for variable, value in zip(other.weights, loop.values, strict=True):
        variable.assign(value)
    other.optimizer.set_weights(slots)
    assert_close(other.run(2).values, loop.run(2).values, 0)


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_another_kind_of_variables_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'variables are "mirrored", "central" or "sharded"\. Received: .part'):
        MPIStrategy(variables="partitioned")


def test_kinds_of_variables_that_differ_among_the_ranks_are_an_error_on_every_rank(rank: int, size: int) -> None:
    expected = f"MPIStrategy(variables=): mirrored on ranks [0]; central on ranks {list(range(1, size))}"
    with pytest.raises(mpistrat.MismatchError, match=re.escape(expected)):
        MPIStrategy(variables="central" if rank else "mirrored")
