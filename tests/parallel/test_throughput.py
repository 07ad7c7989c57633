"""Rows per second: the line at the end of fit, the callback Throughput; the ranks' clocks, and the status file."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.api import runtime
from mpistrat.api.elastic import ObjectState
from mpistrat.keras.bridge import measures
from mpistrat.keras.bridge.measures import Work
from mpistrat.keras.bridge.training import step_values_of
from mpistrat.keras.fit.fit_callbacks import TimedSteps
from mpistrat.process.step_timer import StepTimer
from mpistrat.tensorflow import MPIStrategy
from mpistrat.trace import clocks
from mpistrat.trace.reports import status_directory
from mpistrat.trace.stragglers import StragglerWatch

from ..support.levels import sample

STEPS, COLUMNS, EPOCHS = 4, 3, 2


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Scalars(OwnStep):
    def train_step(self, data: Any) -> dict:
        return super().train_step((tf.fill((2, COLUMNS), data), tf.fill((2, 1), data)))


def new_model(cls: Any = keras.Model, is_distributed: bool = True, **arguments: Any) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((COLUMNS,))
    model = cls(inputs, keras.layers.Dense(1)(inputs))
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer) if is_distributed else optimizer, "mse", **arguments)
    return model


def batch_of(rank: int) -> int:
    return 5 + rank


def rows_of_rank(rank: int) -> int:
    return STEPS * batch_of(rank) - 1  # The last batch is shorter.


def points(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1, 1, rows * COLUMNS, dtype="float32").reshape(rows, COLUMNS)
    return x, x.sum(1, keepdims=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Work]]:
    """The work of all ranks, each time that a speed is made of it."""
    found, original = [], measures.speed_of

    def speed_of(works: list[Work]) -> Any:
        found.append(works)
        return original(works)

    monkeypatch.setattr(measures, "speed_of", speed_of)
    return found


def fit(model: Any, rank: int, data: Any = None, **arguments: Any) -> Any:
    arguments = {"epochs": EPOCHS, "verbose": 2 if rank == 0 else 0, **arguments}
    if data is not None:
        return model.fit(data, **arguments).history
    return model.fit(*points(rows_of_rank(rank)), batch_size=batch_of(rank), **arguments).history


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "fit has trained" in line]


@sample("make, not_counted", [
    (new_model, 1), (lambda: new_model(run_eagerly=True), 1), (lambda: new_model(OwnStep), 1),
    (lambda: new_model(steps_per_execution=2), 2)], ids=["plain", "eager", "own-step", "two-steps"])
def test_fit_counts_all_rows_after_the_first_step(make: Callable, not_counted: int, rank: int, size: int,
                                                  measured: list, capfd: pytest.CaptureFixture[str]) -> None:
    fit(make(), rank, validation_data=points(7))
    printed = lines(capfd.readouterr().out)
    assert len(printed) == (1 if rank == 0 and size > 1 else 0)
    assert all(f"on {size} ranks; collectives took " in line for line in printed)
    if size > 1:
        works, = measured
        assert all(0 < work.waits.seconds <= work.seconds + 1e-3 for work in works)
        assert all(0 <= work.waits.waiting + work.waits.moving <= work.waits.seconds + 1e-3 for work in works)
        assert [work.rows for work in works] == [
            EPOCHS * rows_of_rank(r) - not_counted * batch_of(r) for r in range(size)]
        assert {work.steps for work in works} == {EPOCHS * STEPS - not_counted}


def test_a_silent_fit_measures_and_prints_nothing(rank: int, measured: list, capfd: pytest.CaptureFixture[str]) -> None:
    fit(new_model(), rank, verbose=0)
    assert not measured and not lines(capfd.readouterr().out)


def test_a_fit_of_one_step_prints_nothing(rank: int, size: int, measured: list,
                                          capfd: pytest.CaptureFixture[str]) -> None:
    fit(new_model(), rank, epochs=1, steps_per_epoch=1)
    assert not lines(capfd.readouterr().out)
    assert measured == ([[Work(0, 0, 0.0)] * size] if size > 1 else [])


def test_steps_are_counted_where_batches_have_no_rows(rank: int, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = tf.data.Dataset.from_tensor_slices(tf.range(5.0) + rank)
    history = fit(new_model(Scalars), rank, data, callbacks=[hvd.callbacks.Throughput()])
    assert "rows_per_second" not in history
    assert len(history["steps_per_second"]) == EPOCHS and min(history["steps_per_second"]) > 0
    printed = lines(capfd.readouterr().out)
    assert len(printed) == (1 if rank == 0 and size > 1 else 0)
    assert all(f"steps per second on {size} ranks" in line for line in printed)


def test_the_callback_gives_all_ranks_and_later_callbacks_the_same_number(rank: int, size: int, measured: list,
                                                                          tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    history = fit(new_model(), rank, verbose=0, callbacks=[
        hvd.callbacks.Throughput(), keras.callbacks.CSVLogger(str(path)),
        keras.callbacks.TensorBoard(str(tmp_path / "board"))])
    figures = history["rows_per_second"]
    assert len(figures) == EPOCHS and min(figures) > 0
    assert len(set(mpistrat.allgather_object(str(figures)))) == 1
    header, *rows = path.read_text().splitlines()
    assert [float(row.split(",")[header.split(",").index("rows_per_second")]) for row in rows] == figures
    assert scalars(tmp_path / "board" / "train", "epoch_rows_per_second") == pytest.approx(figures)
    assert [[work.rows for work in works] for works in measured[:EPOCHS]] == [
        [rows_of_rank(r) - batch_of(r) for r in range(size)], [rows_of_rank(r) for r in range(size)]]


def scalars(directory: Path, tag: str) -> list[float]:
    """The values that TensorBoard shows for a tag, in the order of the epochs."""
    return [tf.make_ndarray(value.tensor).item() for file in sorted(directory.glob("events.*"))
             for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value
             if value.tag == tag]


@sample("is_in_scope", [False, True])
def test_tensorboard_has_the_speed_of_a_strategy_too(is_in_scope: bool, tmp_path: Path) -> None:
    strategy = MPIStrategy()
    with strategy.scope():
        model = new_model(is_distributed=False)
    with strategy.scope() if is_in_scope else contextlib.nullcontext():
        history = model.fit(*points(64), batch_size=16, verbose=0, callbacks=[
            hvd.callbacks.Throughput(), keras.callbacks.TensorBoard(str(tmp_path))]).history
    # One rank writes the files, into a directory of all ranks or of its own.
    written = [each for each in mpistrat.allgather_object(scalars(tmp_path / "train", "epoch_rows_per_second")) if each]
    assert written and all(each == pytest.approx(history["rows_per_second"]) for each in written)


def test_a_process_set_measures_its_own_ranks(rank: int, size: int, measured: list) -> None:
    if size < 3:
        pytest.skip("a set of two ranks beside another rank")
    process_set = mpistrat.add_process_set([0, 2])
    try:
        callback = hvd.callbacks.Throughput(process_set)
        history = fit(new_model(is_distributed=False), rank, verbose=0, callbacks=[callback])
        assert ("rows_per_second" in history) == (rank != 1)
        assert [len(works) for works in measured] == ([] if rank == 1 else [2] * EPOCHS)
    finally:
        mpistrat.remove_process_set(process_set)


@sample("is_in_scope", [False, True])
def test_a_fit_of_a_strategy_counts_the_rows_of_all_ranks(is_in_scope: bool, rank: int, size: int, measured: list,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    strategy, rows, batch = MPIStrategy(), 8 * size * STEPS - 1, 8 * size
    with strategy.scope():
        model = new_model(is_distributed=False)
    arguments = {"batch_size": batch, "epochs": EPOCHS, "verbose": 2, "callbacks": [hvd.callbacks.Throughput()]}
    if is_in_scope:
        with strategy.scope():
            history = model.fit(*points(rows), **arguments).history
    else:
        history = model.fit(*points(rows), **arguments).history
    assert len(set(mpistrat.allgather_object(str(history["rows_per_second"])))) == 1
    assert len(lines(capfd.readouterr().out)) == (1 if rank == 0 and size > 1 else 0)
    totals = [sum(work.rows for work in works) for works in measured]
    assert totals == [rows - batch, rows] + ([2 * rows - batch] if size > 1 else [])


@pytest.mark.nightly
@pytest.mark.parametrize("make", [
    hvd.callbacks.Throughput, hvd.callbacks.MetricAverageCallback, hvd.callbacks.Elastic,
    lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    lambda: hvd.elastic.UpdateBatchStateCallback(ObjectState(batch=0)),
    lambda: TimedSteps(StepTimer(10**6, 0), True)],
    ids=["throughput", "metrics", "elastic", "broadcast", "batch", "efficiency"])
def test_callbacks_that_read_no_logs_do_not_make_a_strategy_reduce_those_of_each_step(make: Callable) -> None:
    strategy = MPIStrategy()
    with strategy.scope():
        model = new_model(is_distributed=False)
    model.fit(*points(16), batch_size=8, verbose=0, callbacks=[make()])
    assert step_values_of(model).reads_logs is False


@pytest.mark.skipif(mpistrat.size() == 1, reason="one rank waits for nobody")
def test_a_rank_that_is_slow_in_each_step_is_named_by_the_chief(caplog: pytest.LogCaptureFixture) -> None:
    last = mpistrat.size() - 1
    variable = tf.Variable(tf.ones(3))

    def train(steps: int) -> None:
        for _ in range(steps):
            with mpistrat.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable * variable)
            tape.gradient(loss, [variable])
            if mpistrat.rank() == last:
                time.sleep(0.1)

    named = f"rank {last} on "
    tracer = runtime.current().tracer
    assert tracer is not None
    tracer.reports.stragglers = StragglerWatch()  # The rank may have been named in an earlier test.
    for _ in range(20):  # Of a second or two each. The first three are enough, but on a machine that is very busy.
        train(10)
        if mpistrat.broadcast_object(named in caplog.text, root_rank=0, name="is named"):
            break
    if mpistrat.rank() == 0:
        assert "is slower than the others" in caplog.text
        assert "time.sleep(0.1)" in caplog.text


def test_ranks_of_one_host_read_one_clock() -> None:
    comm = runtime.current().comm
    if comm is None:
        pytest.skip("one rank without MPI")
    offsets = clocks.measure(comm)
    assert {rank: offset.at(time.monotonic_ns()) for rank, offset in offsets.items()} == dict.fromkeys(
        range(mpistrat.size()), 0)


def test_a_clock_that_is_shifted_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = runtime.current().comm
    if comm is None:
        pytest.skip("one rank without MPI")
    shift = 10**9 * mpistrat.rank()
    monkeypatch.setattr(clocks, "identity", lambda: f"clock of rank {mpistrat.rank()}")
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + shift))
    offsets = clocks.measure(comm)
    errors = [offset.at(0) - 10**9 * rank for rank, offset in offsets.items()]
    print(f"errors of the clocks in us: {[error / 1000 for error in errors]}")
    assert offsets[0].at(0) == 0
    assert max(map(abs, errors)) < 5_000_000  # 100 us or less where no other process runs on the cores.


def test_the_status_file_has_all_ranks() -> None:
    own = f"{os.getpid()}"
    pid = mpistrat.broadcast_object(own, name="status.pid")
    limit = time.monotonic() + 60
    ranks: list[dict] = []
    is_done = False
    while not is_done:
        assert time.monotonic() < limit
        mpistrat.allreduce(np.ones(4), name="status.work")
        if mpistrat.rank() == 0:
            found = list(Path(status_directory(os.environ)).glob(f"*-{pid}.json"))
            ranks = json.loads(found[0].read_text())["ranks"] if found else []
        has_all = len(ranks) == mpistrat.size() and all(each["bytes"] for each in ranks)
        is_done = mpistrat.broadcast_object(has_all, name="status.done")
    if mpistrat.rank() == 0:
        assert [each["rank"] for each in ranks] == list(range(mpistrat.size()))
        for each in ranks:
            assert each["operations"] > 0 and each["rss_bytes"] > 0
            assert each["computing"] + each["waiting"] + each["moving"] == pytest.approx(1, abs=1e-3)
