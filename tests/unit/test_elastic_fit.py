"""Training that goes on from a commit at the end of an epoch: by fit, and by the example with a loop."""

import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as keras_api
import mpistrat.tensorflow.elastic as elastic
from mpistrat.keras import elastic as keras_elastic
from mpistrat.keras.callbacks import Elastic
from mpistrat.keras.fit import fit_callbacks


class Counts(keras.Model):
    """Counts how often it has trained each of ten rows, which are their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.add_weight(shape=(10,), initializer="zeros", trainable=False)
        self.build((None,))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        self.trained.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(data[0], tf.int32), 10), axis=0))
        return {"loss": tf.reduce_sum(self.trained)}


def elastic_of(batches: int, every: int) -> tuple[Elastic, SimpleNamespace]:
    """The callback of a fit of which so many batches are done, and its state, which notes `commits` and `steps`."""
    callback = Elastic(commit_every=every)
    state = SimpleNamespace(epoch=0, batch=batches, past=[], commits=[], steps=[])
    state.commit = lambda: state.commits.append((state.epoch, state.batch))
    state.find_place = lambda *of: state.steps.append(of[0])
    callback.state = state  # type: ignore[assignment]
    return callback, state


@pytest.mark.parametrize(("every", "batches", "commits", "logs"), [
    (2, 0, [(0, 2), (1, 0), (1, 2), (2, 0)], [True, True]), (3, 0, [(0, 3), (1, 0), (1, 3), (2, 0)], [True, True]),
    (4, 0, [(1, 0), (2, 0)], [True, True]), (4, 3, [(1, 0), (2, 0)], [True, True]),
    (4, 4, [(1, 0), (2, 0)], [False, True]), (4, 9, [(1, 0), (2, 0)], [False, True])])
def test_what_is_done_of_an_epoch_is_not_trained_and_has_no_logs_and_its_end_has_one_commit(
        every: int, batches: int, commits: list[tuple[int, int]], logs: list[bool]) -> None:
    callback, state = elastic_of(batches, every)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=1, epochs=2, verbose=0, callbacks=[callback],
              validation_data=(np.ones((2, 1)), np.zeros((2, 1))))
    assert (state.commits, state.steps) == (commits, [4])
    assert int(model.optimizer.iterations) == 8 - min(batches, 4)
    assert ["mae" in each for _, each in state.past] == logs
    assert all("val_mae" in each for _, each in state.past)


@pytest.mark.parametrize(("batches", "every", "each", "trained", "commits"), [
    (6, 100, 4, range(4, 10), []), (8, 100, 4, range(8, 10), []), (3, 100, 2, range(2, 10), []),
    (3, 100, 4, range(10), []), (9, 100, 5, range(5, 10), []), (7, 100, 10, range(10), []),
    (0, 4, 4, range(10), [(0, 4), (0, 8)]), (0, 1, 5, range(10), [(0, 5)]), (0, 5, 4, range(10), [(0, 8)])])
def test_executions_of_several_batches_are_trained_whole_with_commits_between_them(
        batches: int, every: int, each: int, trained: range, commits: list[tuple[int, int]]) -> None:
    callback, state = elastic_of(batches, every)
    model, numbers = Counts(), np.arange(10)
    model.compile("sgd", "mse", steps_per_execution=each)
    model.fit(numbers, numbers, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])
    assert list(np.flatnonzero(model.trained)) == list(trained)
    assert state.commits == [*commits, (1, 0)]


@pytest.mark.parametrize(("then", "now", "door", "found"), [
    (None, None, "optimizer", 9), (None, None, "strategy", 6),  # of a generator, say
    (10, 15, "optimizer", 9), (10, 10, "optimizer", 6), (10, 10, "strategy", 6), (10, 7, "strategy", 4),
    (10, None, "optimizer", 9), (None, 10, "strategy", 6)])
def test_the_place_in_the_epoch_is_that_of_the_batches_which_a_rank_has(
        then: int | None, now: int | None, door: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mpistrat.init()
    ranks, began = [2], []

    def keep_going(state: keras_elastic.FitState, train: Callable[[], object]) -> None:
        state.batch, state.size, state.steps = 6, 3, then  # a commit of three ranks
        train()
        ranks[0] = 1  # The other rank is lost. This one keeps its rows.
        train()

    monkeypatch.setattr(keras_elastic, "_size", lambda: ranks[0])
    monkeypatch.setattr(keras_elastic, "keep_going", keep_going)
    monkeypatch.setattr(keras_elastic, "is_under_strategy", lambda model: door == "strategy")
    callback, model = Elastic(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd")

    def fit(epoch: int) -> keras.callbacks.History:
        assert callback.state is not None
        callback.set_model(model)
        callback.set_params({"steps": now})
        callback.on_train_begin()
        began.append((callback.state.batch, callback.state.size, callback.state.steps))
        return keras.callbacks.History()

    keras_elastic.run_fit(callback, fit, model, 0)
    assert began == [(found, 2, now)] * 2


@pytest.mark.parametrize("has_state", [True, False])
def test_a_fit_that_begins_anew_after_a_loss_says_what_to_add(has_state: bool, monkeypatch: pytest.MonkeyPatch,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    mpistrat.init()
    monkeypatch.setattr(fit_callbacks.membership, "current", lambda: SimpleNamespace(has_state=has_state))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras_api.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    for _ in range(2):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    said = [each.getMessage() for each in caplog.records if "begins anew" in each.getMessage()]
    assert len(said) == (not has_state)
    assert has_state or said[0].endswith("Type model.fit(..., callbacks=[..., hvd.callbacks.Elastic()])")


def test_the_example_goes_on_from_a_commit_after_the_last_row_of_an_epoch(monkeypatch: pytest.MonkeyPatch,
                                                                          capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")

    def run(train: Callable[[object], None]) -> Callable[[elastic.TensorFlowKerasState], None]:
        def from_commit(state: elastic.TensorFlowKerasState) -> None:
            state.loss = 1.5
            state.sampler.record_indices(list(state.sampler))
            state.sampler.reset()
            train(state)

        return from_commit

    monkeypatch.setattr(elastic, "run", run)
    monkeypatch.setattr(sys, "argv", ["elastic_loop.py", "--epochs", "1"])
    runpy.run_path("examples/elastic_loop.py", run_name="__main__")
    assert "epoch 0: loss 1.500 of 1 ranks" in capsys.readouterr().out
