"""MPIStrategy(variables="sharded" and "central"): the numbers and files of "mirrored", with slots divided."""

import contextlib
import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
from mpistrat.core.handle import Entry
from mpistrat.tensorflow import MPIStrategy
from mpistrat.tensorflow.xla import ffi

from ..support.keras_versions import needs_multi_optimizer
from ..support.legs import DEFAULT, HOST_EACH, TWO_HOSTS, Leg, under
from ..support.levels import sample
from .helpers import everywhere
from .strategy_helpers import assert_close, assert_equal_on_all_ranks
from .test_sharded import CLOSE, EXACT, Direct, new_model, rows_of, whole_state

optimizers = keras.optimizers
BATCH, STEPS = 6, 5


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


@pytest.fixture(scope="module")
def sharded() -> MPIStrategy:
    return MPIStrategy(variables="sharded")


@pytest.fixture(scope="module")
def central() -> MPIStrategy:
    return MPIStrategy(variables="central")


@pytest.fixture(scope="module")
def mirrored() -> MPIStrategy:
    return MPIStrategy()


def model_of(strategy: MPIStrategy) -> Any:
    model = new_model(strategy=strategy)
    with strategy.scope():
        model.compile(EXACT["Adam"](), "mse", jit_compile=False)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> Any:
    """Train on batches of which the last one is smaller."""
    x, y = (np.concatenate(parts)[:2 * BATCH + 1] for parts in zip(rows_of(0), rows_of(1), strict=True))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def state_of(model: Any) -> list[np.ndarray]:
    """The weights, and what the optimizer has in a file. Collective."""
    return [*model.get_weights(), *whole_state(model.optimizer)]


@pytest.fixture(scope="module")
def trained(sharded: MPIStrategy) -> Any:
    return fit(model_of(sharded))


@sample(("name", "tolerance"), [
    ("Adam", 0), ("SGD", 0), ("EMA", 0), ("loss scale", 0),
    pytest.param("several", 0, marks=needs_multi_optimizer), ("Adafactor", 1e-6),
    ("accumulation, clipped", 1e-5)])
def test_a_loop_has_the_numbers_of_the_mirrored_mode(name: str, tolerance: float, sharded: MPIStrategy,
                                                     mirrored: MPIStrategy) -> None:
    ours, expected = [Loop(strategy, MAKERS[name], build=name != "Adam").run() for strategy in (sharded, mirrored)]
    assert_close(ours.values, expected.values, tolerance)
    assert_equal_on_all_ranks(ours.values)


@sample("name", ["Adam", "EMA", "Ftrl", "clipnorm", "clipvalue", "schedule", "momentum", "Adafactor", "loss scale",
                 pytest.param("several", marks=needs_multi_optimizer)])
def test_central_slots_give_the_bits_of_the_mirrored_mode_and_take_memory_on_the_chief_only(
        name: str, central: MPIStrategy, mirrored: MPIStrategy, rank: int) -> None:
    ours, expected = [Loop(strategy, MAKERS[name]).run() for strategy in (central, mirrored)]
    assert_close(ours.values, expected.values, 0)
    assert_equal_on_all_ranks(ours.values)
    parts = getattr(ours.optimizer, "optimizers", [getattr(ours.optimizer, "inner_optimizer", ours.optimizer)])
    assert any(variable.numpy().size > 2 for part in parts for variable in part._variables) == (rank == 0)


def test_a_loop_may_run_eagerly(sharded: MPIStrategy, mirrored: MPIStrategy) -> None:
    ours, expected = [Loop(strategy, MAKERS["AdamW"], graph=False).run(2) for strategy in (sharded, mirrored)]
    assert_close(ours.values, expected.values, 0)


@sample(("name", "tolerance"), [("SGD", 0), ("accumulates", 1e-5)])
def test_fit_has_the_numbers_of_the_mirrored_mode(name: str, tolerance: float, sharded: MPIStrategy,
                                                  mirrored: MPIStrategy) -> None:
    models = [model_of(strategy) for strategy in (sharded, mirrored)]
    for model in models:
        model.compile((EXACT | CLOSE)[name](), "mse", jit_compile=False)  # Outside of the scope.
        fit(model)
    assert_close(models[0].get_weights(), models[1].get_weights(), tolerance)
    assert_equal_on_all_ranks(models[0].get_weights())
    assert hasattr(models[0].optimizer, "consolidate_state")


def test_fit_with_central_slots_has_the_bits_and_files_of_the_mirrored_mode(
        central: MPIStrategy, mirrored: MPIStrategy, rank: int, shared_dir: str) -> None:
    model, expected = [fit(model_of(strategy)) for strategy in (central, mirrored)]
    assert_close(state_of(model), state_of(expected), 0)
    model.save(f"{shared_dir}/{rank}.keras")
    for scope in (central.scope(), mirrored.scope()):
        with scope:  # That of the last rank.
            loaded = keras.models.load_model(f"{shared_dir}/{mpistrat.size() - 1}.keras")
        assert_close(state_of(loaded), state_of(expected), 0)


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_those_of_the_mirrored_mode_and_load_in_both(sharded: MPIStrategy, mirrored: MPIStrategy, rank: int,
                                                               size: int, shared_dir: str) -> None:
    callbacks = [keras.callbacks.ModelCheckpoint(f"{shared_dir}/within{{batch}}.keras", save_freq=2),
                 keras.callbacks.BackupAndRestore(f"{shared_dir}/backup", delete_checkpoint=False)]
    model = fit(model_of(sharded), *callbacks)
    expected = state_of(fit(model_of(mirrored)))
    assert_close(state_of(model), expected, 0)
    model.save(f"{shared_dir}/of{rank}.keras")  # Each rank writes a file of its own.
    for path in ("of0", f"of{size - 1}"):
        for scope in (contextlib.nullcontext(), sharded.scope(), mirrored.scope()):
            with scope:
                loaded = keras.models.load_model(f"{shared_dir}/{path}.keras")
            assert_close(state_of(loaded), expected, 0)
    assert int(keras.models.load_model(f"{shared_dir}/within2.keras").optimizer.iterations) == 2
    interrupted = fit(model_of(sharded), keras.callbacks.BackupAndRestore(f"{shared_dir}/backup"))
    assert_close(state_of(interrupted), expected, 0)


@sample("is_built", [False, True])
def test_a_checkpoint_has_the_whole_state(is_built: bool, sharded: MPIStrategy, mirrored: MPIStrategy,
                                          shared_dir: str) -> None:
    loop = Loop(sharded, MAKERS["Adam"]).run(2)
    path = tf.train.Checkpoint(weights=loop.weights, optimizer=loop.optimizer).write(f"{shared_dir}/checkpoint")
    expected = loop.run(2).values
    for strategy in (sharded, mirrored):
        other = Loop(strategy, MAKERS["Adam"], build=is_built)
        tf.train.Checkpoint(weights=other.weights, optimizer=other.optimizer).read(path)
        assert_close(other.run(2).values, expected, 0)


def test_a_copy_is_sharded_in_the_scope(trained: Any, sharded: MPIStrategy) -> None:
    trained.optimizer.consolidate_state(to=None)
    with sharded.scope():
        copied = copy.deepcopy(trained)
        made = type(trained.optimizer).from_config(trained.optimizer.get_config())
    assert hasattr(copied.optimizer, "consolidate_state") and hasattr(made, "consolidate_state")
    assert type(pickle.loads(pickle.dumps(made))) is keras.optimizers.Adam
    assert_close(state_of(copied), state_of(trained), 0)


def test_a_rank_has_its_part_of_the_state(trained: Any, size: int, submitted: list[Entry]) -> None:
    slots = [v for name in ("_momentums", "_velocities") for v in getattr(trained.optimizer, name)]
    own, weights = sum(int(np.prod(v.shape)) for v in slots), trained.count_params()
    assert own <= 2 * weights / size + 2 * 60
    assert sum(everywhere(own)) == 2 * weights
    submitted.clear()
    fit(trained)
    assert [entry.request.kind.name for entry in submitted].count("REDUCESCATTER") == 3


# -- what cannot be sharded -------------------------------------------------------------------------------------------


def built_elsewhere(model: Any) -> Any:
    optimizer = EXACT["Adam"]()
    optimizer.build(model.trainable_variables)
    return optimizer


@pytest.mark.parametrize(("make", "words"), [
    (lambda _: Direct(0.1), r"Direct has no update_step\(\)"),
    (built_elsewhere, r"Adam was built outside of strategy\.scope\(\)")], ids=["no update_step", "built"])
def test_what_cannot_be_sharded_is_an_error_on_every_rank(make: Callable, words: str, sharded: MPIStrategy) -> None:
    model = model_of(sharded)
    model.compile(make(model), "mse")
    with pytest.raises(ValueError, match=words):
        fit(model)
    optimizer = make(model)
    with pytest.raises(ValueError, match=words):
        sharded.run(lambda: optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables],
                                            model.trainable_variables))


def test_it_is_applied_in_a_replica(sharded: MPIStrategy) -> None:
    loop = Loop(sharded, MAKERS["SGD"])
    with pytest.raises(ValueError, match=r"Call it in a function that you pass to strategy\.run"):
        loop.optimizer.apply([tf.ones([5, 3]), tf.ones([3])])


def test_an_asynchronous_checkpoint_is_an_error_on_every_rank(sharded: MPIStrategy, shared_dir: str) -> None:
    loop = Loop(sharded, MAKERS["Adam"])
    with pytest.raises(ValueError, match="Leave out experimental_enable_async_checkpoint"):
        tf.train.Checkpoint(optimizer=loop.optimizer).write(
            f"{shared_dir}/checkpoint", tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))
    mpistrat.barrier()


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_another_kind_of_variables_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'variables must be "mirrored", "central" or "sharded"\. Received: .part'):
        MPIStrategy(variables="partitioned")


def test_kinds_of_variables_that_differ_among_the_ranks_are_an_error_on_every_rank(rank: int, size: int) -> None:
    expected = f"MPIStrategy(variables=): mirrored on ranks [0]; central on ranks {list(range(1, size))}"
    with pytest.raises(mpistrat.MismatchError, match=re.escape(expected)):
        MPIStrategy(variables="central" if rank else "mirrored")


# -- XLA, mixed precision, and made-up hosts ---------------------------------------------------------------------------


needs_xla = pytest.mark.skipif(ffi.api() is None, reason="XLA compiles collectives with TensorFlow 2.21")


def adam(accumulates: bool = False) -> Any:
    more = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.05} if accumulates else {}
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **more)


def by_fit(strategy: MPIStrategy, policy: str = "float32", **compiled: Any) -> tuple[list[np.ndarray], Any]:
    model = new_model(strategy=strategy, policy=policy)
    with strategy.scope():
        model.compile(adam(policy != "float32"), "mse", **compiled)
    x, y = (np.concatenate(parts)[:4 * BATCH] for parts in zip(rows_of(0), rows_of(1), strict=True))
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
    for _ in range(4):
        step(tf.constant(x), tf.constant(y))
    return [*model.get_weights(), *whole_state(optimizer)], optimizer


# Keras wraps the optimizer of a model of mixed precision in one that scales the loss.
MIXED = "mixed precision, accumulation and global clipnorm"
WAYS = {
    "fit": lambda strategy: by_fit(strategy, jit_compile=False),
    "compiled fit": lambda strategy: by_fit(strategy, jit_compile=True),
    "compiled loop": by_loop,
    MIXED: lambda strategy: by_fit(strategy, "mixed_float16")}


@pytest.mark.usefixtures("initialised_afterwards")
@pytest.mark.parametrize(("way", "leg"), [
    pytest.param("fit", HOST_EACH, marks=pytest.mark.nightly),
    pytest.param("compiled fit", DEFAULT, marks=[needs_xla, pytest.mark.nightly]),
    pytest.param("compiled loop", HOST_EACH, marks=needs_xla), (MIXED, HOST_EACH)])
def test_the_numbers_are_those_of_the_mirrored_mode_in_all_ways(way: str, leg: Leg, size: int) -> None:
    with under(TWO_HOSTS if size > 2 and leg is HOST_EACH else leg):
        (ours, optimizer), (expected, _) = [WAYS[way](MPIStrategy(variables=mode)) for mode in ("sharded", "mirrored")]
        assert_close(ours, expected, 1e-5)
        assert_equal_on_all_ranks(ours)
    assert hasattr(optimizer, "inner_optimizer") == (way == MIXED)
    assert hasattr(getattr(optimizer, "inner_optimizer", optimizer), "consolidate_state")
