"""Callbacks that write files, on ranks with a DistributedOptimizer: one rank writes, and all have the file then."""

import csv
import os
from typing import Any

import keras
import numpy as np
import pytest

import mpistrat
import mpistrat.keras as hvd

from ..support.levels import sample
from .helpers import TrainingInterruptedError, everywhere

COLUMNS, BATCH, STEPS = 4, 8, 3
Callbacks = keras.callbacks


def new_model(seed: int = 1, **arguments: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1, **arguments))
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    return model


def fit(model: Any, rank: int, *callbacks: Any, epochs: int = 2) -> Any:
    x = np.random.default_rng(rank).normal(rank, 1.0, (STEPS * BATCH, COLUMNS)).astype(np.float32)
    return model.fit(x, x[:, :1], batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))


def bytes_of(model: Any) -> bytes:
    return b"".join(weight.tobytes() for weight in model.get_weights())


class Counted:
    """Counts the calls of a method of an object, which it goes on to call."""

    def __init__(self, owner: Any, name: str):
        self.calls, self._method = 0, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._method(*args, **kwargs)


def test_the_chief_writes_what_all_ranks_name_and_all_read_it_at_once(rank: int, size: int, shared_dir: str) -> None:
    pytest.importorskip("tensorboard")
    model, loaded = new_model(use_ema=True), []
    saves, own_saves = Counted(model, "save"), Counted(model, "save_weights")
    best = Callbacks.ModelCheckpoint(f"{shared_dir}/deep/{{epoch}}.keras", "loss", save_best_only=True,
                                     initial_value_threshold=1e9)
    load = Callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: loaded.append(
        bytes_of(keras.models.load_model(f"{shared_dir}/deep/{epoch + 1}.keras")) == bytes_of(model)))
    averages = Callbacks.SwapEMAWeights(swap_on_epoch=True)
    fit(model, rank, hvd.callbacks.BroadcastGlobalVariablesCallback(0), averages, best, load,
        Callbacks.ModelCheckpoint(f"{shared_dir}/{rank}.weights.h5", save_weights_only=True),
        Callbacks.CSVLogger(f"{shared_dir}/log.csv"), Callbacks.TensorBoard(f"{shared_dir}/events"))
    assert loaded == [True, True]
    assert (saves.calls, own_saves.calls) == (0 if rank else 2, 2)
    assert len(set(everywhere(best.best))) == 1 and best.best < 1e9
    with open(f"{shared_dir}/log.csv", encoding="utf-8") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]
    assert len([name for name in os.listdir(f"{shared_dir}/events/train") if "tfevents" in name]) == 1
    assert sorted(os.listdir(shared_dir)) == sorted([
        *(f"{each}.weights.h5" for each in range(size)), "deep", "events", "log.csv"])


@sample("on_ranks", ["the chief", "all, in other orders"])
def test_no_rank_waits_where_the_ranks_have_different_callbacks(on_ranks: str, rank: int, shared_dir: str) -> None:
    model, average = new_model(), hvd.callbacks.MetricAverageCallback()
    saves = Counted(model, "save_weights")
    own = [Callbacks.ModelCheckpoint(f"{shared_dir}/m.weights.h5", save_weights_only=True, save_freq=2)]
    if on_ranks == "the chief":
        fit(model, rank, *(own if rank == 0 else []), average)
    else:
        fit(model, rank, *[*own, average][::1 if rank == 0 else -1])
    assert saves.calls == (3 if rank == 0 else 0)
    fresh = new_model()
    fresh.load_weights(f"{shared_dir}/m.weights.h5")


def test_an_error_of_the_chief_is_one_on_all_ranks(rank: int, shared_dir: str) -> None:
    with pytest.raises(IsADirectoryError if rank == 0 else OSError, match="Is a directory"):
        fit(new_model(), rank, Callbacks.CSVLogger(shared_dir))
    assert float(mpistrat.allreduce(1.0)) == 1.0


def interrupt(epoch: int, logs: Any = None) -> None:
    if epoch == 2:
        raise TrainingInterruptedError


def test_all_ranks_go_on_with_the_backup_of_the_chief(rank: int, shared_dir: str) -> None:
    def backup() -> Any:
        return Callbacks.BackupAndRestore(f"{shared_dir}/backup")

    whole, first, second = new_model(), new_model(), new_model(seed=rank)
    fit(whole, rank, epochs=3)
    with pytest.raises(TrainingInterruptedError):
        fit(first, rank, backup(), Callbacks.LambdaCallback(on_epoch_begin=interrupt), epochs=3)
    loads = Counted(second, "load_weights")
    # The order of broadcast and restore does not matter.
    history = fit(second, rank, hvd.callbacks.BroadcastGlobalVariablesCallback(0), backup(), epochs=3)
    assert loads.calls == (0 if rank else 1)
    assert len(set(everywhere(bytes_of(second)))) == 1
    if hasattr(second, "_initial_epoch"):
        assert history.epoch == [2] and bytes_of(second) == bytes_of(whole)
    assert os.listdir(shared_dir) == []


def test_all_ranks_have_the_state_of_a_callback_that_one_runs(rank: int, shared_dir: str) -> None:
    callbacks = [Callbacks.BackupAndRestore(f"{shared_dir}/backup"),
                 Callbacks.ModelCheckpoint(f"{shared_dir}/m.weights.h5", save_weights_only=True, save_freq=2,
                                           verbose=rank)]
    with pytest.raises(TrainingInterruptedError):
        fit(new_model(), rank, *callbacks, Callbacks.LambdaCallback(on_epoch_begin=interrupt), epochs=3)
    backup, checkpoint = map(vars, callbacks)
    state = [backup["_current_epoch"], checkpoint["_current_epoch"], checkpoint["_last_batch_seen"]]
    assert mpistrat.allgather_object(state) == [[2, 2, STEPS - 1]] * mpistrat.size()
    assert checkpoint["verbose"] == rank, "the arguments are those of each rank"


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.weights.h5"])
def test_all_ranks_may_save_to_one_path_at_the_same_time(name: str, shared_dir: str) -> None:
    model, path = new_model(), f"{shared_dir}/{name}"
    for _ in range(5):
        mpistrat.barrier()
        model.save_weights(path) if "weights" in name else model.save(path)
    loaded = new_model()
    if "weights" in name:
        loaded.load_weights(path)
    else:
        loaded = keras.models.load_model(path, compile=False)
    assert bytes_of(loaded) == bytes_of(model)
    mpistrat.barrier()
    assert os.listdir(shared_dir) == [name]
