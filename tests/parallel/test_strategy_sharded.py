"""MPIStrategy(variables="sharded"): the numbers and files of the mirrored mode, with slots divided among the ranks."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from mpistrat.core.handle import Entry  # noqa: E402
from mpistrat.tensorflow import MPIStrategy  # noqa: E402

from ..support.keras_versions import needs_multi_optimizer  # noqa: E402
from ..support.levels import sample  # noqa: E402
from .helpers import everywhere  # noqa: E402
from .strategy_helpers import assert_close, assert_equal_on_all_ranks  # noqa: E402
from .test_sharded import CLOSE, EXACT, Direct, new_model, rows_of, whole_state  # noqa: E402
from .test_strategy_central import MAKERS, Loop  # noqa: E402

BATCH = 6


@pytest.fixture(scope="module")
def sharded() -> MPIStrategy:
    return MPIStrategy(variables="sharded")


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


def test_a_loop_may_run_eagerly(sharded: MPIStrategy, mirrored: MPIStrategy) -> None:
    ours, expected = [Loop(strategy, MAKERS["AdamW"], graph=False).run(2) for strategy in (sharded, mirrored)]
    assert_close(ours.values, expected.values, 0)


@sample(("name", "tolerance"), [("accumulates", 1e-5), ("SGD", 0)])
def test_fit_has_the_numbers_of_the_mirrored_mode(name: str, tolerance: float, sharded: MPIStrategy,
                                                  mirrored: MPIStrategy) -> None:
    models = [model_of(strategy) for strategy in (sharded, mirrored)]
    for model in models:
        model.compile((EXACT | CLOSE)[name](), "mse", jit_compile=False)  # Outside of the scope.
        fit(model)
    assert_close(models[0].get_weights(), models[1].get_weights(), tolerance)
    assert_equal_on_all_ranks(models[0].get_weights())
    assert hasattr(models[0].optimizer, "consolidate_state")


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
    with pytest.raises(ValueError, match=r"Call optimizer\.apply in a function for strategy\.run"):
        loop.optimizer.apply([tf.ones([5, 3]), tf.ones([3])])


def test_an_asynchronous_checkpoint_is_an_error_on_every_rank(sharded: MPIStrategy, shared_dir: str) -> None:
    loop = Loop(sharded, MAKERS["Adam"])
    with pytest.raises(ValueError, match="Leave out experimental_enable_async_checkpoint"):
        tf.train.Checkpoint(optimizer=loop.optimizer).write(
            f"{shared_dir}/checkpoint", tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))
    mpistrat.barrier()
