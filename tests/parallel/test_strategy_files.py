"""Files under MPIStrategy: the chief writes, nobody goes on before, and an error is one on every rank."""

import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
from mpistrat.tensorflow import MPIStrategy

from ..support.levels import sample
from .helpers import TrainingInterruptedError
from .strategy_helpers import assert_close, assert_equal_on_all_ranks, global_data

COLUMNS, BATCH = 5, 12


def compiled(strategy: MPIStrategy, *extra: Callable) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(4, activation="tanh"),
                                  *(make() for make in extra), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 2, **arguments: Any) -> Any:
    x, y = global_data(60)
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks),
                     **arguments)


def writers_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weight files that this rank begins to write from now on."""
    import h5py
    written: list[str] = []
    original = h5py.File.__init__

    def opened(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        if mode != "r":
            written.append(str(name))
        original(self, name, mode, *args, **kwargs)

    monkeypatch.setattr(h5py.File, "__init__", opened)
    return written


# -- a model ----------------------------------------------------------------------------------------------------------


@sample("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_all_ranks_save_to_one_path_and_load_at_once(strategy: MPIStrategy, name: str, shared_dir: str) -> None:
    model, path = compiled(strategy), os.path.join(shared_dir, name)
    fit(model)
    for _ in range(3):
        fit(model, epochs=1)
        if name.endswith(".weights.h5"):
            model.save_weights(path)
            loaded = compiled(strategy)
            loaded.load_weights(path)
        else:
            model.save(path)
            with strategy.scope():
                loaded = keras.models.load_model(path, compile=False)
        assert_close(loaded.get_weights(), model.get_weights(), 0)


def test_only_the_chief_writes(strategy: MPIStrategy, shared_dir: str, rank: int,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    model, written = compiled(strategy), writers_of(monkeypatch)
    model.save_weights(f"{shared_dir}/model.weights.h5")
    assert len(written) == (1 if rank == 0 else 0)


def test_export_to_one_path(strategy: MPIStrategy, shared_dir: str) -> None:
    model = compiled(strategy)
    model.export(f"{shared_dir}/served", verbose=False)
    x, _ = global_data(6)
    served = tf.saved_model.load(f"{shared_dir}/served")
    np.testing.assert_allclose(served.serve(x), model(x), atol=1e-6)


def test_a_saved_model_of_all_ranks_is_the_chiefs(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    module = tf.Module()
    with strategy.scope():
        module.total = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                                   aggregation=tf.VariableAggregation.SUM)
        module.weight = tf.Variable(2.0)
    strategy.run(lambda: module.total.assign(1.0))
    module.rank = tf.function(lambda: tf.constant(rank), input_signature=[])
    time.sleep(0.3 * rank)  # Without the strategy the last rank would write last.
    tf.saved_model.save(module, f"{shared_dir}/module")
    loaded = tf.saved_model.load(f"{shared_dir}/module")
    assert (int(loaded.rank()), float(loaded.weight)) == (0, 2.0)
    assert float(loaded.total) == mpistrat.size()
    with pytest.raises(ValueError, match="Expected an object of type `Trackable`"):
        tf.saved_model.save(object(), f"{shared_dir}/object")


def test_everything_may_be_within_the_scope(strategy: MPIStrategy, shared_dir: str) -> None:
    with strategy.scope():
        model = compiled(strategy)
        model.save(f"{shared_dir}/model.keras")
        fit(model, keras.callbacks.ModelCheckpoint(f"{shared_dir}/{{epoch}}.keras"),
            keras.callbacks.BackupAndRestore(f"{shared_dir}/backup"))
        loaded = keras.models.load_model(f"{shared_dir}/2.keras")
        fit(loaded, epochs=1)
    assert_equal_on_all_ranks(loaded.get_weights())


def test_a_collective_in_a_save_of_the_chief_is_an_error_on_every_rank(strategy: MPIStrategy, shared_dir: str,
                                                                       rank: int) -> None:
    class Reducing(keras.layers.Dense):
        def save_own_variables(self, store: Any) -> None:
            strategy.reduce("SUM", tf.constant(1.0), None)

    with strategy.scope():
        model = keras.Sequential([keras.Input((COLUMNS,)), Reducing(1)])
    with pytest.raises(mpistrat.InvalidRequestError if rank == 0 else mpistrat.CollectiveError,
                       match="this rank writes a file without the other ranks"):
        model.save_weights(f"{shared_dir}/model.weights.h5")


def test_a_metric_of_the_model_is_saved_without_a_collective_of_the_chief_alone(strategy: MPIStrategy,
                                                                                shared_dir: str) -> None:
    class WithMetric(keras.Sequential):
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.seen = keras.metrics.Mean(name="seen")

    with strategy.scope():
        model = WithMetric([keras.Input((COLUMNS,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    strategy.run(lambda: model.seen.update_state(3.0))
    model.save_weights(f"{shared_dir}/model.weights.h5")
    assert float(model.seen.result()) == 3.0


# -- errors -----------------------------------------------------------------------------------------------------------


class Full:
    """An action that fails on the chief as on a full disk."""

    def __init__(self, rank: int):
        self._rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._rank == 0:
            raise OSError(28, "No space left on device")


def assert_error_everywhere(action: Callable[[], Any], rank: int) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        action()
    assert caught.value.errno == 28
    assert ("rank 0" in str(caught.value)) == (rank != 0)
    assert float(mpistrat.allreduce(1.0)) == 1.0


def test_a_full_disk_is_an_error_on_every_rank(strategy: MPIStrategy, shared_dir: str, rank: int,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(strategy)
    import keras.src.saving.saving_lib as saving_lib
    monkeypatch.setattr(saving_lib, "H5IOStore", Full(rank))
    assert_error_everywhere(lambda: model.save_weights(f"{shared_dir}/model.weights.h5"), rank)


@sample("order", [1, -1])
def test_an_error_of_one_callback_reaches_ranks_in_another(strategy: MPIStrategy, shared_dir: str, rank: int,
                                                           order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = keras.callbacks.CSVLogger(f"{shared_dir}/log.csv")
    monkeypatch.setattr(logger, "on_epoch_end", Full(rank))
    callbacks = [logger, keras.callbacks.ModelCheckpoint(f"{shared_dir}/model.keras")][::order]
    assert_error_everywhere(lambda: fit(compiled(strategy), *callbacks), rank)


@sample("path", ["model.weights.h5", "model.keras"])
def test_a_checkpoint_where_a_file_is_in_the_way(strategy: MPIStrategy, shared_dir: str, path: str) -> None:
    if mpistrat.rank() == 0:
        Path(shared_dir, "file").touch()
    callback = keras.callbacks.ModelCheckpoint(f"{shared_dir}/file/{path}", save_weights_only="weights" in path)
    with pytest.raises(OSError):
        fit(compiled(strategy), callback)


# -- logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("append", [False, True])
def test_a_log_has_each_epoch_once(strategy: MPIStrategy, shared_dir: str, append: bool) -> None:
    model = compiled(strategy)
    for _ in range(2):
        history = fit(model, keras.callbacks.CSVLogger(f"{shared_dir}/log.csv", append=append)).history
    with open(f"{shared_dir}/log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"] * (2 if append else 1)
    assert float(rows[-1]["loss"]) == pytest.approx(history["loss"][-1])


@sample("arguments", [{}, {"update_freq": 2, "histogram_freq": 1, "embeddings_freq": 1,
                                            "write_steps_per_second": True}], ids=str)
def test_events_are_written_once(strategy: MPIStrategy, shared_dir: str, arguments: dict) -> None:
    x, y = global_data(24)
    pytest.importorskip("tensorboard")
    fit(compiled(strategy), keras.callbacks.TensorBoard(shared_dir, **arguments), validation_data=(x, y))
    mpistrat.barrier()
    for part in ("train", "validation"):
        events = [path for path in os.listdir(f"{shared_dir}/{part}") if "tfevents" in path]
        assert len(events) == 1
    steps = [(value.tag, event.step) for path in Path(shared_dir, "train").glob("*tfevents*")
             for event in tf.compat.v1.train.summary_iterator(str(path)) for value in event.summary.value]
    assert steps.count(("epoch_loss", 1)) == 1
    assert steps.count(("keras", 0)) == 1


# -- BackupAndRestore -------------------------------------------------------------------------------------------------


class Interrupt(keras.callbacks.Callback):
    """Ends a training after a step, counted over all epochs."""

    def __init__(self, step: int):
        super().__init__()
        self._left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise TrainingInterruptedError


@pytest.mark.nightly
def test_training_with_central_variables_goes_on_after_an_interruption(shared_dir: str) -> None:
    strategy = MPIStrategy(variables="central")
    whole, first, second = compiled(strategy), compiled(strategy), compiled(strategy)
    first.set_weights(whole.get_weights())
    fit(whole, epochs=4)
    with pytest.raises(TrainingInterruptedError):
        fit(first, keras.callbacks.BackupAndRestore(f"{shared_dir}/backup"), Interrupt(12), epochs=4)
    history = fit(second, keras.callbacks.BackupAndRestore(f"{shared_dir}/backup"), epochs=4)
    assert history.epoch == [2, 3]
    assert_equal_on_all_ranks(second.get_weights())
    assert_close(second.get_weights(), whole.get_weights(), 1e-6)
    assert not os.path.exists(f"{shared_dir}/backup")


@pytest.mark.nightly
def test_a_backup_in_the_middle_of_an_epoch(strategy: MPIStrategy, shared_dir: str) -> None:
    first, second = compiled(strategy, keras.layers.BatchNormalization), \
        compiled(strategy, keras.layers.BatchNormalization)

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(f"{shared_dir}/backup", save_freq=2, double_checkpoint=True)

    with pytest.raises(TrainingInterruptedError):
        fit(first, backup(), Interrupt(8), epochs=4)
    begun: list[Any] = []
    restored = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begun.extend(second.get_weights()))
    assert fit(second, backup(), restored, epochs=4).epoch == [1, 2, 3]
    assert_equal_on_all_ranks(begun)
    # The backup is of the step that the training was ended in.
    assert_close(begun, first.get_weights(), 0)
    assert_equal_on_all_ranks(second.get_weights())


def test_a_backup_that_only_the_chief_sees(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    first, second = compiled(strategy), compiled(strategy)
    with pytest.raises(TrainingInterruptedError):
        fit(first, keras.callbacks.BackupAndRestore(f"{shared_dir}/0"), Interrupt(7))
    history = fit(second, keras.callbacks.BackupAndRestore(f"{shared_dir}/{rank}"))
    assert history.epoch == [1]
    assert_equal_on_all_ranks(second.get_weights())


def test_a_backup_of_some_ranks_is_refused(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    callbacks = [keras.callbacks.BackupAndRestore(shared_dir)] if rank == 0 else []
    with pytest.raises(ValueError, match=r"only ranks \[0\] have a BackupAndRestore"):
        fit(compiled(strategy), *callbacks)


def test_a_broken_backup_is_an_error_on_every_rank(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    if rank == 0:
        Path(shared_dir, "latest.weights.h5").write_text("no weights")
    mpistrat.barrier()
    with pytest.raises(OSError):
        fit(compiled(strategy), keras.callbacks.BackupAndRestore(shared_dir))


# -- tf.train.Checkpoint ----------------------------------------------------------------------------------------------


def counted(strategy: MPIStrategy, rank: int) -> Any:
    """A checkpoint of a variable of each kind: the mirrored one is 5, the other holds rank + 1 on each rank."""
    with strategy.scope():
        mirrored = tf.Variable(5.0)
        on_read = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                              aggregation=tf.VariableAggregation.SUM)
    strategy.run(lambda: on_read.assign(rank + 1.0))
    return tf.train.Checkpoint(mirrored=mirrored, on_read=on_read)


def test_a_checkpoint_is_written_by_the_chief_and_read_by_all(strategy: MPIStrategy, shared_dir: str, rank: int,
                                                              size: int) -> None:
    checkpoint, total = counted(strategy, rank), size * (size + 1) / 2
    written: list[str] = []
    paths = [checkpoint.save(f"{shared_dir}/ckpt", tf.train.CheckpointOptions(
        experimental_write_callbacks=[written.append])) for _ in range(2)]
    assert paths[-1] == f"{shared_dir}/ckpt-2" == tf.train.latest_checkpoint(shared_dir)
    assert written == (paths if rank == 0 else [])
    for path in paths:
        assert tf.train.load_variable(path, "on_read/.ATTRIBUTES/VARIABLE_VALUE") == total
        checkpoint.on_read.assign(0.0)
        checkpoint.mirrored.assign(0.0)
        checkpoint.restore(path).assert_consumed()
        assert (checkpoint.mirrored.numpy(), checkpoint.on_read.numpy()) == (5.0, pytest.approx(total))


def test_a_manager_keeps_what_it_is_told_to_keep(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    checkpoint = counted(strategy, rank)
    manager = tf.train.CheckpointManager(checkpoint, shared_dir, max_to_keep=2)
    assert manager.restore_or_initialize() is None
    for _ in range(4):
        manager.save()
    assert manager.latest_checkpoint == f"{shared_dir}/ckpt-4"
    assert manager.checkpoints == [f"{shared_dir}/ckpt-3", f"{shared_dir}/ckpt-4"]
    mpistrat.barrier()
    assert len([name for name in os.listdir(shared_dir) if name.endswith(".index")]) == 2
    other = counted(strategy, rank)
    assert tf.train.CheckpointManager(other, shared_dir, max_to_keep=2).restore_or_initialize() \
        == f"{shared_dir}/ckpt-4"
    assert int(other.save_counter) == 4


def test_a_checkpoint_that_cannot_be_written(strategy: MPIStrategy, shared_dir: str, rank: int) -> None:
    if rank == 0:
        Path(shared_dir, "file").touch()
    mpistrat.barrier()
    with pytest.raises((tf.errors.OpError, mpistrat.CollectiveError)):
        counted(strategy, rank).save(f"{shared_dir}/file/ckpt")
    assert float(mpistrat.allreduce(1.0)) == 1.0


def test_a_checkpoint_without_variables_of_the_strategy_is_left_alone(shared_dir: str, rank: int) -> None:
    if rank == 0:
        tf.train.Checkpoint(a=tf.Variable(1.0)).save(f"{shared_dir}/ckpt")
    assert float(mpistrat.allreduce(1.0)) == 1.0
