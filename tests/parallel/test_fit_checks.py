"""Ranks that train differently in fit: an error on every rank, or what makes them alike."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat.api import runtime

from ..support.system_calls import needs_system_calls

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")

COLUMNS, ROWS, BATCH = 4, 24, 8
BroadcastCallback = hvd.callbacks.BroadcastGlobalVariablesCallback


def new_model(**arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments), loss="mse", jit_compile=False)
    return model


def data_of(rank: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(rank, 1.0, (rows, COLUMNS)).astype(np.float32)
    return x, x[:, :1]


def fit(model: Any, rank: int, callbacks: Any = None, epochs: int = 1, rows: int = ROWS, **arguments: Any) -> Any:
    return model.fit(*data_of(rank, rows), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks, **arguments)


def everywhere(value: Any) -> list[Any]:
    return mpistrat.allgather_object(value)


class Keep(keras.callbacks.Callback):
    """Keeps the logs of each epoch, and the running mean when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict] = []
        self.means: list[bytes] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))
        self.means.append(self.model.layers[0].moving_mean.numpy().tobytes())


class Stop(keras.callbacks.Callback):
    """Stops after an epoch, or after a batch of it."""

    def __init__(self, epoch: int, batch: int | None = None):
        super().__init__()
        self.epoch, self.batch, self.now = epoch, batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training |= (self.now, batch) == (self.epoch, self.batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training |= self.batch is None and epoch == self.epoch


class SeenByBatch(keras.callbacks.Callback):
    """Counts what fit and evaluate call."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


@pytest.fixture
def without_checks() -> Iterator[None]:
    """As with MPISTRAT_CONSISTENCY_CHECK_DISABLE=1."""
    before = runtime.current().settings
    runtime.current().settings = dataclasses.replace(before, consistency_check_disable=True)
    yield
    runtime.current().settings = before


# -- the beginning ----------------------------------------------------------------------------------------------------


def test_different_numbers_of_steps_are_an_error_on_every_rank(rank: int, size: int) -> None:
    rest = str(list(range(1, size)))
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(new_model(), rank, rows=ROWS if rank else ROWS + BATCH)
    assert f"steps per epoch: 4 on ranks [0]; 3 on ranks {rest}." in str(caught.value)
    assert "x, y = hvd.shard(x, y) for arrays, dataset.take(3), or steps_per_epoch=3." in str(caught.value)


def test_a_rank_whose_number_of_steps_is_unknown_is_not_compared(rank: int, size: int) -> None:
    model, (x, y) = new_model(), data_of(rank)
    if rank == 0:
        model.fit(((x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, ROWS, BATCH)), verbose=0)
    else:
        fit(model, rank)
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


@pytest.mark.parametrize("cls", [BroadcastCallback, hvd.callbacks.MetricAverageCallback])
def test_a_callback_that_communicates_on_some_ranks_only_is_an_error_on_every_rank(cls: Any, rank: int,
                                                                                   size: int) -> None:
    callbacks = [cls(0)] if rank == size - 1 else []
    with pytest.raises(mpistrat.MismatchError, match=rf"only ranks \[{size - 1}\] have a {cls.__name__}\."):
        fit(new_model(), rank, callbacks)


def test_a_model_that_some_ranks_have_built_cannot_be_broadcast(rank: int, size: int) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    if rank == 0:
        model.predict(data_of(rank)[0], verbose=0)
    with pytest.raises(mpistrat.MismatchError, match=r"different numbers of weights: 2 on ranks \[0\]; 0 on ranks \[1"):
        fit(model, rank, [BroadcastCallback(0)])


def test_the_argument_on_statistics_must_be_the_same(rank: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=r"average_statistics=\): True on ranks \[0\]; False on ranks \[1"):
        fit(new_model(average_statistics=rank == 0), rank)


# -- metrics ----------------------------------------------------------------------------------------------------------


READERS = {
    "early stopping everywhere": lambda rank, path: [keras.callbacks.EarlyStopping("loss")],
    "plateau everywhere": lambda rank, path: [keras.callbacks.ReduceLROnPlateau("loss")],
    "best checkpoint on the chief": lambda rank, path: [] if rank else [
        keras.callbacks.ModelCheckpoint(f"{path}/best.keras", "loss", save_best_only=True)],
}


@pytest.mark.parametrize("name", READERS)
def test_callbacks_that_decide_by_metrics_get_averages(name: str, rank: int, shared_dir: str,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    keep = Keep()
    with caplog.at_level(logging.INFO, "mpistrat"):
        history = fit(new_model(), rank, [keep, *READERS[name](rank, shared_dir)], epochs=2)
    losses = everywhere([logs["loss"] for logs in keep.logs])
    assert all(other == losses[0] for other in losses)
    assert history.history["loss"] == losses[0]
    assert len([r for r in caplog.records if "fit averages the metrics" in r.getMessage()]) == (0 if rank else 1)


def test_the_average_is_that_of_the_ranks(rank: int) -> None:
    own, averaged = Keep(), Keep()
    keras.utils.set_random_seed(1)
    fit(new_model(), rank, [own], shuffle=False)
    fit(new_model(), rank, [averaged, keras.callbacks.EarlyStopping("loss")], shuffle=False)
    losses = everywhere(own.logs[0]["loss"])
    assert len(set(losses)) > 1
    assert averaged.logs[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_a_metric_that_only_some_ranks_have_is_named(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    validation = {"validation_data": data_of(9)} if rank == 0 else {}
    fit(new_model(), rank, [keras.callbacks.ReduceLROnPlateau("loss")], epochs=2, **validation)
    texts = [r.getMessage() for r in caplog.records if "cannot average metrics" in r.getMessage()]
    assert len(texts) == (0 if rank else 1)
    assert all("val_loss on ranks [0]" in text for text in texts)


@pytest.mark.usefixtures("without_checks")
def test_without_the_checks_metrics_stay_as_they_are(rank: int, size: int) -> None:
    keep = Keep()
    fit(new_model(), rank, [keep, keras.callbacks.EarlyStopping("loss")])
    assert len(set(everywhere(keep.logs[0]["loss"]))) == size
    assert len(set(everywhere(keep.means[0]))) == 1  # This has an argument of its own.


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_stops_alone_is_named_on_every_rank(rank: int, size: int) -> None:
    others = str(list(range(1, size)))
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(new_model(), rank, None if rank else Stop(1), epochs=4)
    assert "ranks [0] ended training after epoch 2 (stopped by Stop)" in str(caught.value)
    assert f"ranks {others} go on to epoch 3" in str(caught.value)


def test_early_stopping_on_one_rank_is_named(rank: int) -> None:
    early = keras.callbacks.EarlyStopping("loss", mode="max", patience=1)
    with pytest.raises(mpistrat.MismatchError, match=r"ended training after epoch \d+ \(stopped by EarlyStopping\)"):
        fit(new_model(), rank, [] if rank else [Keep(), early], epochs=20)


def test_other_epochs_are_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=r"numbers of epochs: 2 on ranks \[0\]; 3 on ranks \[1"):
        fit(new_model(), rank, epochs=3 if rank else 2)
    with pytest.raises(mpistrat.MismatchError, match=r"ranks \[0\] go on to epoch 3; ranks \[1.* go on to epoch 2"):
        fit(new_model(), rank, epochs=3, initial_epoch=0 if rank else 1)


@pytest.mark.parametrize("batch", [None, 1, ROWS // BATCH - 1], ids=["epoch", "batch", "last batch"])
def test_all_ranks_may_stop_together(batch: int | None, rank: int) -> None:
    model = new_model()
    assert len(fit(model, rank, Stop(1, batch), epochs=4).history["loss"]) == 2
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


@needs_system_calls
def test_a_rank_that_stops_alone_within_an_epoch_ends_training_on_all(rank: int, restart: Callable) -> None:
    text = r"This rank has stopped within epoch 1 \(stopped by Stop\), and others have not" if rank == 0 \
        else r"which wait for .*optimizer\d+/stopped within epoch 1 instead"
    with pytest.raises((mpistrat.DeadlockError, tf.errors.OpError), match=text):
        fit(new_model(), rank, Stop(0, 0) if rank == 0 else None)
    restart()


# -- running statistics -----------------------------------------------------------------------------------------------


def running_mean(model: Any) -> np.ndarray:
    return model.layers[0].moving_mean.numpy()


def test_running_statistics_are_averaged_when_an_epoch_ends(rank: int, size: int) -> None:
    own, averaged = new_model(average_statistics=False), new_model()
    keep = Keep()
    fit(own, rank, shuffle=False)
    fit(averaged, rank, [keep], shuffle=False)
    means = everywhere(running_mean(own))
    assert len({mean.tobytes() for mean in means}) == size
    np.testing.assert_allclose(running_mean(averaged), np.mean(means, axis=0), rtol=1e-5, atol=1e-7)
    assert len(set(everywhere(keep.means[0]))) == 1  # Before callbacks that save the model.
    assert len(set(everywhere(running_mean(averaged).tobytes()))) == 1


def test_local_statistics_stay_on_their_rank(rank: int, size: int) -> None:
    model = new_model()
    model.optimizer.register_local_var(model.layers[0].moving_mean)
    fit(model, rank)
    assert len(set(everywhere(running_mean(model).tobytes()))) == size
    assert len(set(everywhere(model.layers[0].moving_variance.numpy().tobytes()))) == 1


def test_statistics_are_averaged_with_loss_scaling_too(rank: int) -> None:
    model = new_model()
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), initial_scale=2.0)
    model.compile(scaled, loss="mse", jit_compile=False)
    fit(model, rank)
    assert len(set(everywhere(running_mean(model).tobytes()))) == 1


# -- whatever is given to fit -----------------------------------------------------------------------------------------


def test_fit_may_be_called_again_and_evaluated_on_one_rank(rank: int) -> None:
    model = new_model()
    for _ in range(2):
        fit(model, rank, epochs=2)
        if rank == 0:
            model.evaluate(*data_of(rank), verbose=0)
            model.predict(data_of(rank)[0], verbose=0)
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


def test_a_list_of_callbacks_of_the_users_is_left_as_it_was(rank: int) -> None:
    model, seen = new_model(), SeenByBatch()
    callbacks = keras.callbacks.CallbackList([seen], add_history=True, model=model, epochs=2, steps=ROWS // BATCH)
    before = list(callbacks.callbacks)
    fit(model, rank, callbacks, epochs=2)
    assert callbacks.callbacks == before
    assert seen.batches == 2 * ROWS // BATCH
    assert len(set(everywhere(running_mean(model).tobytes()))) == 1


@pytest.mark.parametrize("form", [lambda c: c, lambda c: [[c]], lambda c: (c,)], ids=["one", "nested", "tuple"])
def test_callbacks_may_be_given_in_any_form(form: Any, rank: int) -> None:
    seen = SeenByBatch()
    history = fit(new_model(), rank, form(seen))
    assert seen.batches == ROWS // BATCH
    assert list(history.history) == ["loss"]


def test_callbacks_may_be_given_by_position(rank: int) -> None:
    seen = SeenByBatch()
    new_model().fit(*data_of(rank), BATCH, 1, 0, [seen])
    assert seen.batches == ROWS // BATCH


def test_a_step_of_the_users_own_and_an_eager_one(rank: int) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(self.norm(x, training=training))

        def train_step(self, data: Any) -> dict:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
            return {"own_loss": loss}

    for run_eagerly in (False, True):
        keras.utils.set_random_seed(rank)
        model = Own()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=run_eagerly, jit_compile=False)
        fit(model, rank, [BroadcastCallback(0), keras.callbacks.EarlyStopping("own_loss", mode="min")], epochs=2)
        assert len(set(everywhere(b"".join(weight.tobytes() for weight in model.get_weights())))) == 1


def test_a_model_with_a_plain_optimizer_is_left_alone(rank: int) -> None:
    model = new_model()
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    fit(model, rank, epochs=1 + rank, rows=ROWS + rank * BATCH)


def test_a_loop_with_a_list_of_callbacks_on_one_rank_is_left_alone(rank: int) -> None:
    model = new_model()
    callbacks: Sequence[Any] = [Keep()]
    if rank == 0:
        own = keras.callbacks.CallbackList(callbacks, model=model)
        own.on_train_begin()
        own.on_epoch_begin(0)
        own.on_epoch_end(0, {"loss": 1.0})
        own.on_train_end()
    assert everywhere(rank)[0] == 0
