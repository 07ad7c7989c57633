"""Features of callbacks: they see the same numbers in all processes, and so decide alike."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from .common import World, assert_close, assert_equal_on_all, feature, of_all_processes, points
from .keras_training import BATCH, both, compiled, sgd, trains_as_one_process

GROUP = "Keras: callbacks"


def _decides_as_one_process(world: World, callback: Callable) -> None:
    """Fit on rows that the replicas find differently hard, with a rate at which losses go up and down."""
    x, y = points(60)
    trains_as_one_process(world, lambda: compiled(optimizer=lambda: keras.optimizers.SGD(0.7)), epochs=6,
                          validation_data=(x[:24], y[:24]), callbacks=lambda: [callback()], atol=1e-4)


@feature(GROUP, "`EarlyStopping(restore_best_weights=True)`")
def early_stopping(world: World) -> None:
    _decides_as_one_process(world, lambda: keras.callbacks.EarlyStopping("val_loss", patience=1,
                                                                         restore_best_weights=True))


@feature(GROUP, "`ReduceLROnPlateau`")
def reduce_on_plateau(world: World) -> None:
    _decides_as_one_process(world, lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1,
                                                                             min_delta=0.05))


@feature(GROUP, "`LearningRateScheduler`")
def learning_rate_scheduler(world: World) -> None:
    _decides_as_one_process(world, lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate))


@feature(GROUP, "`TerminateOnNaN`, a NaN on one replica")
def terminate_on_nan(world: World) -> None:
    with world.strategy.scope():
        model = compiled()
    x, y = points(60)
    x[0] = np.nan  # In the first replica's part of the first batch.
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0,
                        callbacks=[keras.callbacks.TerminateOnNaN()])
    assert_equal_on_all([len(history.epoch)])
    assert len(history.epoch) == 1


@feature(GROUP, "`SwapEMAWeights`")
def swap_ema(world: World) -> None:
    x, y = points(60)
    trains_as_one_process(world, lambda: compiled(optimizer=lambda: sgd(use_ema=True, ema_momentum=0.5)),
                          callbacks=lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
                          validation_data=(x[:24], y[:24]))


@feature(GROUP, "`CSVLogger`: one file, a line per epoch")
def csv_logger(world: World) -> None:
    path = Path(world.directory, "log.csv")
    with world.strategy.scope():
        model = compiled()
    history = model.fit(*points(60), batch_size=BATCH, epochs=3, verbose=0,
                        callbacks=[keras.callbacks.CSVLogger(str(path))]).history
    of_all_processes(None)  # All have closed it.
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert_close([float(row["loss"]) for row in rows], history["loss"])


@feature(GROUP, "`ModelCheckpoint`: the best model, to one path")
def model_checkpoint(world: World) -> None:
    path = f"{world.directory}/best.keras"
    model, _ = both(world.strategy, world.rank, lambda: compiled(optimizer=lambda: keras.optimizers.SGD(0.7)))
    x, y = points(60)
    history = model.fit(x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, validation_data=(x, y), callbacks=[
        keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)]).history
    of_all_processes(None)
    best = keras.models.load_model(path)
    assert_equal_on_all(best.get_weights())
    np.testing.assert_allclose(best.evaluate(x, y, batch_size=BATCH, verbose=0)[0], min(history["val_loss"]), atol=1e-6)


@feature(GROUP, "`ModelCheckpoint(save_weights_only=True)`, every 2 batches")
def weights_checkpoint(world: World) -> None:
    path = f"{world.directory}/{{batch}}.weights.h5"
    model, _ = both(world.strategy, world.rank)
    model.fit(*points(60), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)])
    of_all_processes(None)
    assert len(list(Path(world.directory).glob("*.weights.h5"))) == 2


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError


@feature(GROUP, "`BackupAndRestore`: interrupted, and resumed as if never")
def backup_and_restore(world: World) -> None:
    model, reference = both(world.strategy, world.rank)
    x, y = points(60)
    arguments: dict[str, Any] = {"batch_size": BATCH, "epochs": 4, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, y, **arguments, callbacks=[keras.callbacks.BackupAndRestore(world.directory), Interruption()])
    except InterruptedError:
        with world.strategy.scope():
            model = compiled()
    history = model.fit(x, y, **arguments, callbacks=[keras.callbacks.BackupAndRestore(world.directory)])
    assert history.epoch == [2, 3]
    reference.fit(x, y, **arguments)
    assert_equal_on_all(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights())
