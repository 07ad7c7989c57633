"""MPIStrategy(variables="sharded"): the numbers and files of the mirrored mode, with slots divided among the ranks."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from mpistrat.tensorflow import MPIStrategy  # noqa: E402

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


def model_of(strategy: MPIStrategy, make: Callable = EXACT["Adam"], **arguments: Any) -> Any:
    model = new_model(strategy=strategy)
    with strategy.scope():
        model.compile(make(), "mse", **{"jit_compile": False, **arguments})
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> Any:
    """Train on batches of which the last one is smaller."""
    x, y = (np.concatenate(parts)[:2 * BATCH + 1] for parts in zip(rows_of(0), rows_of(1), strict=True))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def state_of(model: Any) -> list[np.ndarray]:
    """The weights, and what the optimizer has in a file. Collective."""
    return [*model.get_weights(), *whole_state(model.optimizer)]


@pytest.mark.parametrize(("name", "tolerance"), [
    ("SGD", 0), ("Adam", 0), ("AdamW", 0), ("EMA", 0), ("loss scale", 0), ("several", 0), ("Adafactor", 1e-6),
    ("global_clipnorm", 1e-6), ("accumulation, clipped", 1e-5)])
def test_a_loop_has_the_numbers_of_the_mirrored_mode(name: str, tolerance: float, sharded: MPIStrategy,
                                                     mirrored: MPIStrategy) -> None:
    ours, expected = [Loop(strategy, MAKERS[name], build=name != "Adam").run() for strategy in (sharded, mirrored)]
    assert_close(ours.values, expected.values, tolerance)
    assert_equal_on_all_ranks(ours.values)


def test_a_loop_may_run_eagerly(sharded: MPIStrategy, mirrored: MPIStrategy) -> None:
    ours, expected = [Loop(strategy, MAKERS["Adam"], graph=False).run(2) for strategy in (sharded, mirrored)]
    assert_close(ours.values, expected.values, 0)


@pytest.mark.parametrize(("make", "arguments", "tolerance"), [
    (EXACT["SGD"], {}, 0), (EXACT["AdamW"], {"run_eagerly": True}, 0), (EXACT["of the user"], {}, 0),
    (CLOSE["accumulates"], {}, 1e-5)], ids=["SGD", "AdamW", "of the user", "accumulates"])
def test_fit_has_the_numbers_of_the_mirrored_mode(make: Callable, arguments: dict[str, Any], tolerance: float,
                                                  sharded: MPIStrategy, mirrored: MPIStrategy) -> None:
    ours, expected = [fit(model_of(strategy, make, **arguments)) for strategy in (sharded, mirrored)]
    assert_close(ours.get_weights(), expected.get_weights(), tolerance)
    assert_equal_on_all_ranks(ours.get_weights())


def test_each_rank_has_its_part_of_the_state(sharded: MPIStrategy, size: int, on_submit: Callable) -> None:
    model = fit(model_of(sharded))
    slots = [v for name in ("_momentums", "_velocities") for v in getattr(model.optimizer, name)]
    own, weights = sum(int(np.prod(v.shape)) for v in slots), model.count_params()
    assert own <= 2 * weights / size + 2 * 60
    assert sum(everywhere(own)) == 2 * weights
    seen: list[str] = []
    on_submit(lambda entry: seen.append(entry.request.kind.name))
    fit(model)
    assert seen.count("REDUCESCATTER") == 3


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_those_of_the_mirrored_mode_and_load_in_both(sharded: MPIStrategy, mirrored: MPIStrategy, rank: int,
                                                               size: int, shared_dir: str) -> None:
    within = keras.callbacks.ModelCheckpoint(f"{shared_dir}/{{batch}}.keras", save_freq=2)
    model = fit(model_of(sharded), within)
    model.save(f"{shared_dir}/of{rank}.keras")  # Each rank writes a file of its own.
    expected = state_of(fit(model_of(mirrored)))
    assert_close(state_of(keras.models.load_model(f"{shared_dir}/of{size - 1}.keras")), expected, 0)
    assert keras.models.load_model(f"{shared_dir}/2.keras").optimizer.variables[2].shape == expected[5 + 2].shape
    after = []
    for strategy in (sharded, mirrored):
        with strategy.scope():
            loaded = keras.models.load_model(f"{shared_dir}/of0.keras")
        after.append(fit(loaded).get_weights())
    assert_close(after[0], after[1], 0)
    assert_close(fit(model).get_weights(), after[1], 0)


@pytest.mark.parametrize("is_built", [False, True])
def test_a_checkpoint_has_the_whole_state(is_built: bool, sharded: MPIStrategy, mirrored: MPIStrategy,
                                          shared_dir: str) -> None:
    loop = Loop(sharded, MAKERS["Adam"]).run(2)
    path = tf.train.Checkpoint(weights=loop.weights, optimizer=loop.optimizer).write(f"{shared_dir}/checkpoint")
    expected = loop.run(2).values
    for strategy in (sharded, mirrored):
        other = Loop(strategy, MAKERS["Adam"], build=is_built)
        tf.train.Checkpoint(weights=other.weights, optimizer=other.optimizer).read(path)
        assert_close(other.run(2).values, expected, 0)


def test_training_that_is_interrupted_goes_on(sharded: MPIStrategy, shared_dir: str) -> None:
    model = fit(model_of(sharded), keras.callbacks.BackupAndRestore(shared_dir, delete_checkpoint=False))
    again = fit(model_of(sharded), keras.callbacks.BackupAndRestore(shared_dir))
    assert_close(state_of(again), state_of(model), 0)


def test_a_copy_is_sharded_in_the_scope(sharded: MPIStrategy, rank: int, shared_dir: str) -> None:
    model = fit(model_of(sharded))
    model.optimizer.consolidate_state(to=None)
    with sharded.scope():
        copied = copy.deepcopy(model)
        made = type(model.optimizer).from_config(model.optimizer.get_config())
    assert hasattr(copied.optimizer, "consolidate_state") and hasattr(made, "consolidate_state")
    assert_close(state_of(copied), state_of(model), 0)


# -- what cannot be sharded -------------------------------------------------------------------------------------------


def test_an_optimizer_may_be_made_outside_of_the_scope(sharded: MPIStrategy, mirrored: MPIStrategy) -> None:
    models = []
    for strategy in (sharded, mirrored):
        models.append(model_of(strategy))
        models[-1].compile(EXACT["Adam"](), "mse", jit_compile=False)
    assert_close(*(fit(model).get_weights() for model in models), 0)
    assert hasattr(models[0].optimizer, "consolidate_state")


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
