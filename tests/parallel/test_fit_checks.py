"""Ranks that train differently in fit: an error on every rank, or what makes them alike."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
import mpistrat.tensorflow as hvd_tf
from mpistrat.api import runtime
from mpistrat.core.handle import Entry
from mpistrat.keras.fit import fit_checks
from mpistrat.tensorflow import gradients as reduced

from ..support.keras_versions import needs_multi_optimizer
from ..support.levels import sample
from .helpers import everywhere

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
    def __init__(self, epoch: int, batch: int | None = None):
        super().__init__()
        self.epoch, self.batch, self.now = epoch, batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training |= (self.now, batch) == (self.epoch, self.batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training |= self.batch is None and epoch == self.epoch


def counting(batches: list[int]) -> Any:
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))


# -- how many operations there are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_under_strategy", [False, True], ids=["optimizer", "strategy"])
@sample("verbose", [0, 2])
def test_fit_of_two_batches_makes_few_operations(is_under_strategy: bool, verbose: int, rank: int,
                                                 submitted: list[Entry]) -> None:
    keras.utils.set_random_seed(1)
    strategy = hvd_tf.MPIStrategy() if is_under_strategy else None
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer if is_under_strategy else hvd.DistributedOptimizer(optimizer), loss="mse")
    submitted.clear()
    model.fit(*data_of(0 if is_under_strategy else rank, 16), batch_size=8, verbose=verbose, callbacks=[
        BroadcastCallback(0)] if strategy is None else [])
    found = [entry.request.name for entry in submitted if not entry.request.name.startswith("check/")]
    steps = [place for place, name in enumerate(found) if "/" not in name]
    assert len(steps) == (2 if mpistrat.size() > 1 else 0), found
    if steps:
        metrics = [name for name in found[steps[-1] + 1:] if name == "strategy/reduce"]
        assert steps[0] <= 3 and len(found) - 1 - steps[-1] - len(metrics) <= 3, found


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


def test_a_rank_whose_epochs_end_by_an_error_alone(rank: int, size: int) -> None:
    """Keras finds out the number of steps by a step more, which ends in an error of the data."""
    model, (x, y) = new_model(), data_of(rank)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    if rank == 0:
        data = data.filter(lambda *_: True)
    model.fit(data, epochs=3, verbose=0)
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


@pytest.mark.parametrize("cls", [BroadcastCallback, hvd.callbacks.MetricAverageCallback])
def test_a_callback_that_communicates_on_some_ranks_only_is_an_error_on_every_rank(cls: Any, rank: int,
                                                                                   size: int) -> None:
    callbacks = [cls(0)] if rank == size - 1 else []
    with pytest.raises(mpistrat.MismatchError, match=rf"only ranks \[{size - 1}\] have a {cls.__name__},"):
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


# -- what the ranks train ---------------------------------------------------------------------------------------------


def different(rank: int, kind: str = "input", optimizer: Any = None) -> Any:
    """A model whose weights are not the same on all ranks, with weight decay."""
    keras.utils.set_random_seed(rank)
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((COLUMNS,)), *layers] if kind == "input" else layers)
    optimizer = optimizer or keras.optimizers.AdamW(0.01, weight_decay=0.1)
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", jit_compile=False)
    return model


@pytest.mark.parametrize("kind", ["input", "no input"])
@sample("optimizer", [
    lambda: keras.optimizers.AdamW(0.01), lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01))], ids=["AdamW", "SGD", "scaled"])
def test_with_weight_decay_a_forgotten_broadcast_is_an_error_on_every_rank(optimizer: Callable, kind: str, rank: int,
                                                                           size: int) -> None:
    where = "[0] and [1]" if size == 2 else ", ".join(f"[{number}]" for number in range(size))
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(different(rank, kind, optimizer()), rank)
    assert f"first/kernel differ between ranks {where}. The same holds for 1 more of 4 variables." in str(caught.value)
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0] == size  # The engine goes on.


@pytest.mark.parametrize("kind", ["input", "no input"])
def test_with_weight_decay_weights_that_are_broadcast_are_compared_in_the_first_steps_only(
        kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = fit_checks.digests_of_weights
    monkeypatch.setattr(fit_checks, "digests_of_weights",
                        lambda variables: (compared.append(len(variables)), original(variables))[1])
    model = different(rank, kind)
    fit(model, rank, [BroadcastCallback(0)], epochs=2)
    fit(model, rank)
    # Then only the rates are compared, in the first step of each epoch.
    assert compared == ([4, 0, 0] if kind == "input" else [0, 4, 0, 0])
    assert len(set(everywhere(b"".join(weight.tobytes() for weight in model.get_weights())))) == 1


def test_with_weight_decay_local_weights_may_differ(rank: int, size: int) -> None:
    model = different(rank)
    for variable in model.layers[0].trainable_variables:
        model.optimizer.register_local_var(variable)
    fit(model, rank, [BroadcastCallback(0, local_variables=model.layers[0].trainable_variables)])
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == size


@pytest.mark.usefixtures("no_warning_yet")
@sample("form", [np.asarray, tf.constant], ids=["numpy", "tensors"])
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
def test_the_same_rows_on_all_ranks_are_a_warning_also_if_each_rank_shuffles_them(
        is_same: bool, form: Callable, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    keras.utils.set_random_seed(rank)
    x, y = map(form, data_of(1 if is_same else rank))
    for _ in range(2):
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=True)
    texts = [r.getMessage() for r in caplog.records if "all ranks train on the same data" in r.getMessage()]
    assert len(texts) == (1 if is_same and rank == 0 else 0)
    assert all("fit got the same rows on all of them" in text for text in texts)


def plateau(**arguments: Any) -> Any:
    return keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, **arguments)


def by_rank(rank: int) -> Any:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch > rank else 1.0))


# The callbacks of a rank, the epoch in which the rates differ, and what the error advises.
RATES_THAT_DIFFER = {
    "plateau on one rank": (lambda rank: [] if rank else [plateau()], 3, "have a ReduceLROnPlateau: pass it to"),
    "scheduler on one rank": (lambda rank: [] if rank else [by_rank(0)], 2, "have a LearningRateScheduler: pass it to"),
    "by the rank": (lambda rank: [by_rank(rank)], 2, "from values that are equal on all ranks, not from rank()"),
}


@pytest.mark.parametrize("name", RATES_THAT_DIFFER)
def test_learning_rates_that_differ_are_an_error_on_every_rank(name: str, rank: int, size: int) -> None:
    callbacks, epoch, advice = RATES_THAT_DIFFER[name]
    model, keep = new_model(), Keep()
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(model, rank, [keep, *callbacks(rank)], epochs=5)
    text = str(caught.value)
    assert f"fit: in epoch {epoch} the ranks have different values of the learning_rate of SGD: 0.0" in text
    assert "0.1 on ranks [1" in text
    assert advice in text
    assert len(keep.logs) == epoch - 1
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0] == size  # The engine goes on.


def test_other_arguments_of_the_optimizers_that_differ_are_an_error_too(rank: int) -> None:
    model = new_model()
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5 + 0.1 * rank))
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), loss="mse", jit_compile=False)
    with pytest.raises(mpistrat.MismatchError, match=r"momentum of SGD: 0.5 on ranks \[0\]; 0.6 on ranks \[1"):
        fit(model, rank)


def test_a_rate_that_is_broadcast_after_it_was_set_on_one_rank_is_right(rank: int) -> None:
    class Share(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                hvd.broadcast_variables([self.model.optimizer.learning_rate], 0)

    model = new_model()
    fit(model, rank, [*([] if rank else [by_rank(0)]), Share()], epochs=3)
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


class Change(keras.callbacks.Callback):
    def __init__(self, name: str, factor: float):
        super().__init__()
        self.name, self.factor = name, factor

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            weight, = (w for w in self.model.weights if w.path.endswith(self.name))
            weight.assign(weight * self.factor)


@sample("trainable", [True, False], ids=["trained", "frozen"])
def test_weights_that_differ_when_an_epoch_ends_are_an_error_on_every_rank(trainable: bool, rank: int,
                                                                           size: int) -> None:
    model, keep = new_model(), Keep()
    model.layers[1].trainable = trainable
    with pytest.raises(mpistrat.MismatchError, match="fit: at the end of epoch 1 the ranks have different w") as caught:
        fit(model, rank, [keep, *([] if rank else [Change("kernel", 1.01)])], epochs=2)
    assert f"/kernel differ between ranks [0] and {list(range(1, size))}. Only ranks [0] have a Change: pass it to " \
        "fit on all ranks. Usual causes: " in str(caught.value)
    assert not keep.logs  # No callback of the user saves such a model.
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0] == size


def test_a_weight_that_is_not_a_number_on_one_rank_is_no_rounding(rank: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match="at the end of epoch 1 the ranks have different weights"):
        fit(new_model(), rank, [] if rank else [Change("gamma", float("nan"))])


def vocabulary_of(layer: Any, rank: int) -> None:
    layer.adapt(np.array(["a", "b", "ab"[rank > 0]]))


def root_only(layer: Any, rank: int) -> None:
    if rank == 0:
        vocabulary_of(layer, rank)
    layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0))  # as the error advises


@pytest.mark.parametrize("adapt, place", [(vocabulary_of, "model"), (vocabulary_of, "pipeline"), (root_only, "model"),
                                          pytest.param(root_only, "pipeline", marks=pytest.mark.nightly)])
def test_a_vocabulary_of_each_rank_is_an_error_that_names_the_layer(
        adapt: Callable, place: str, rank: int, size: int, caplog: pytest.LogCaptureFixture) -> None:
    words = keras.layers.StringLookup(output_mode="one_hot", name="words")
    adapt(words, rank)
    here = place == "model"
    inputs = [keras.Input((1,), dtype="string"), words] if here else [keras.Input((3,))]
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(([["a"], ["b"]] * 4, np.arange(8.0) + rank)).batch(4)
    data = data if here else data.map(lambda x, y: (words(x), y))
    if adapt is root_only:
        model.fit(data, verbose=0, callbacks=[BroadcastCallback(0)])
        vocabulary_of(words, rank)
        model.optimizer.register_local_var(model.layers[-1].bias)  # A layer may be each rank's own then.
        model.fit(data, verbose=0, callbacks=[BroadcastCallback(0)])
        assert len([r for r in caplog.records if "disagree on the vocabulary" in r.getMessage()]) == (0 if rank else 1)
        return
    with pytest.raises(mpistrat.MismatchError) as caught:
        model.fit(data, verbose=0, callbacks=[BroadcastCallback(0)])
    where = f"[0]; {list(range(1, size))}. Call layer.adapt with all rows, before hvd.shard"
    text = "the ranks disagree on the vocabulary of the layer words (StringLookup). Groups of ranks that agree: "
    assert f"{text}{where}" in str(caught.value)


@pytest.mark.parametrize("callbacks", [[], [BroadcastCallback]], ids=["no broadcast", "broadcast"])
def test_statistics_of_each_ranks_rows_are_an_error_or_a_warning(callbacks: list, rank: int,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Normalization(name="n"), keras.layers.Dense(1)])
    model.layers[0].adapt(data_of(rank)[0])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    text = "the ranks disagree on the mean and variance of the layer n (Normalization). Groups"
    if callbacks:
        fit(model, rank, [BroadcastCallback(0)])
        fit(model, rank, [BroadcastCallback(0)])  # Now they are equal.
        assert len([r for r in caplog.records if text in r.getMessage()]) == (0 if rank else 1)
    else:
        with pytest.raises(mpistrat.MismatchError) as caught:
            fit(model, rank)
        assert text in str(caught.value)


# -- metrics ----------------------------------------------------------------------------------------------------------


READERS = {
    "early stopping everywhere": lambda rank, path: [keras.callbacks.EarlyStopping("loss")],
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


def test_validation_on_other_numbers_of_batches_is_named_unless_rows_are_counted(
        rank: int, caplog: pytest.LogCaptureFixture) -> None:
    for weighted in True, False:
        fit(new_model(), rank, [hvd.callbacks.MetricAverageCallback(weighted=weighted)], epochs=2,
            validation_data=data_of(rank, ROWS if rank == 0 else BATCH))
    texts = [r.getMessage() for r in caplog.records if "different numbers of batches" in r.getMessage()]
    assert len(texts) == (rank == 0), texts
    assert not texts or ("3 on rank" in texts[0] and "MetricAverageCallback(weighted=True)" in texts[0])


@sample("make", [lambda: tf.distribute.OneDeviceStrategy("/cpu:0"), tf.distribute.MirroredStrategy])
@pytest.mark.parametrize("way", ["fit", "tape"])
def test_another_strategy_around_a_distributed_optimizer_or_tape_is_named_once(
        make: Callable[[], Any], way: str, rank: int, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reduced, "_warned", [])
    strategy = make()
    with strategy.scope():
        if way == "fit":
            fit(new_model(), 0, epochs=2)
        else:
            variable = tf.Variable(1.0)

            def step() -> Any:
                with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = variable * 2.0
                return tape.gradient(loss, variable)

            for _ in range(2):
                strategy.run(step)
    texts = [r.getMessage() for r in caplog.records if "which does not know of other ranks" in r.getMessage()]
    assert len(texts) == (rank == 0), texts
    assert all(f"tf.distribute.{type(strategy).__name__}" in text
               and "strategy = mpistrat.tensorflow.MPIStrategy()" in text for text in texts)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_stops_alone_is_named_on_every_rank(rank: int, size: int) -> None:
    others = str(list(range(1, size)))
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(new_model(), rank, None if rank else Stop(1), epochs=4)
    assert "ranks [0] ended training after epoch 2 (stopped by Stop)" in str(caught.value)
    assert f"ranks {others} go on to epoch 3" in str(caught.value)


@pytest.mark.nightly
def test_early_stopping_on_one_rank_is_named(rank: int) -> None:
    early = keras.callbacks.EarlyStopping("loss", mode="max", patience=1)
    with pytest.raises(mpistrat.MismatchError, match=r"ended training after epoch \d+ \(stopped by EarlyStopping\)"):
        fit(new_model(), rank, [] if rank else [Keep(), early], epochs=20)


def test_other_epochs_are_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=r"numbers of epochs: 2 on ranks \[0\]; 3 on ranks \[1"):
        fit(new_model(), rank, epochs=3 if rank else 2)
    model = new_model()
    with pytest.raises(mpistrat.MismatchError, match=r"ranks \[0\] go on to epoch 2; ranks \[1.* go on to epoch 1"):
        fit(model, rank, epochs=3, initial_epoch=0 if rank else 1)
    assert int(model.optimizer.iterations) == 0


@needs_multi_optimizer
def test_distributed_optimizers_in_one_of_several_are_those_of_fit(rank: int, size: int) -> None:
    model = new_model()
    parts = [hvd.DistributedOptimizer(o) for o in (keras.optimizers.SGD(0.1), keras.optimizers.AdamW(0.1))]
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(parts[0], {".*bias": parts[1]}))
    model.compile(several, loss="mse")
    assert not model.jit_compile
    means = Keep()
    fit(model, rank, [BroadcastCallback(0), means], epochs=2)
    of_ranks = everywhere([means.means, [w.tobytes() for w in model.get_weights()]])
    assert all(other == of_ranks[0] for other in of_ranks)


@pytest.mark.parametrize("batch", [None, 1, pytest.param(ROWS // BATCH - 1, marks=pytest.mark.nightly)],
                         ids=["epoch", "batch", "last batch"])
def test_all_ranks_may_stop_together(batch: int | None, rank: int) -> None:
    model = new_model()
    assert len(fit(model, rank, Stop(1, batch), epochs=4).history["loss"]) == 2
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock is reported after a second."""
    monkeypatch.setattr(runtime.current().world.engine.controller._coordinator.stalls, "deadlock_s", 1.0)


@pytest.mark.usefixtures("soon")
def test_a_rank_that_stops_alone_within_an_epoch_ends_training_on_all(rank: int, restart: Callable) -> None:
    text = r"This rank has stopped within epoch 1 \(stopped by Stop\), and other ranks have not" if rank == 0 \
        else r"which wait for .*optimizer\d+/stopped within epoch 1 instead"
    with pytest.raises((mpistrat.DeadlockError, tf.errors.OpError), match=text):
        fit(new_model(), rank, Stop(0, 0) if rank == 0 else None)
    restart()


@pytest.mark.usefixtures("soon")
def test_ranks_whose_inputs_of_unknown_size_differ_are_told_their_steps(rank: int, restart: Callable) -> None:
    def batches() -> Iterator[Any]:
        x, y = data_of(rank, ROWS if rank == 0 else ROWS - BATCH)
        return ((x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, len(x), BATCH))

    text = r"ranks \[0\] wait for ranks \[1.*\], which wait for optimizer\d+/ended epoch 1 after 2 steps instead"
    with pytest.raises((mpistrat.DeadlockError, tf.errors.OpError), match=text):
        new_model().fit(batches(), verbose=0, epochs=1)
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


def keeping(means: list[bytes], model: Any) -> Any:
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: means.append(running_mean(model).tobytes()))


@sample("on_all", [True, False], ids=["all ranks", "chief"])
def test_running_statistics_are_averaged_before_a_save_within_an_epoch(on_all: bool, rank: int, size: int,
                                                                       tmp_path: Path) -> None:
    model, kept = new_model(), list[bytes]()
    keep = keeping(kept, model)
    checkpoint = keras.callbacks.ModelCheckpoint(f"{tmp_path}/last.weights.h5", save_freq=2, save_weights_only=True)
    for _ in range(2):  # The count goes on from epoch to epoch, and from fit to fit.
        fit(model, rank, [checkpoint, keep] if on_all or rank == 0 else [keep], epochs=2)
    assert [len(set(means)) for means in zip(*everywhere(kept))] == [size, 1] * 6
    if on_all or rank == 0:
        saved = new_model()
        saved.load_weights(f"{tmp_path}/last.weights.h5")
        assert running_mean(saved).tobytes() == kept[-1]
    else:
        new_model()  # All ranks create as many optimizers.


@pytest.mark.usefixtures("without_checks")
def test_without_the_checks_they_are_averaged_before_a_save_too_and_so_are_metrics(rank: int, size: int,
                                                                                   tmp_path: Path) -> None:
    model, kept, of_epochs = new_model(), list[bytes](), Keep()
    checkpoint = keras.callbacks.ModelCheckpoint(f"{tmp_path}/last.weights.h5", save_freq=2, save_weights_only=True)
    fit(model, rank, [*([] if rank else [checkpoint]), keeping(kept, model), of_epochs,
                      keras.callbacks.EarlyStopping("loss")])
    assert [len(set(means)) for means in zip(*everywhere(kept))] == [size, 1, size]
    assert len(set(everywhere(of_epochs.logs[0]["loss"]))) == len(set(everywhere(of_epochs.means[0]))) == 1


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
    model, batches = new_model(), list[int]()
    callbacks = keras.callbacks.CallbackList([counting(batches)], add_history=True, model=model, epochs=2,
                                             steps=ROWS // BATCH)
    before = list(callbacks.callbacks)
    fit(model, rank, callbacks, epochs=2)
    assert callbacks.callbacks == before
    assert batches == [0, 1, 2] * 2
    assert len(set(everywhere(running_mean(model).tobytes()))) == 1


@sample("form", [lambda c: [[c]], lambda c: c, lambda c: (c,)], ids=["nested", "one", "tuple"])
def test_callbacks_may_be_given_in_any_form_and_by_position(form: Any, rank: int) -> None:
    model, batches = new_model(), list[int]()
    history = fit(model, rank, form(counting(batches)))
    assert batches == [0, 1, 2]
    assert list(history.history) == ["loss"]
    model.fit(*data_of(rank), BATCH, 1, 0, form(counting(batches)))
    assert batches == [0, 1, 2] * 2


class NormAndDense(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(self.norm(x, training=training))

    def loss_and_tape(self, data: Any) -> tuple[Any, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        return loss, tape


def test_a_step_of_the_users_own_and_an_eager_one(rank: int) -> None:
    for run_eagerly in (False, True):
        keras.utils.set_random_seed(rank)
        model = OwnStep("none")
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=run_eagerly, jit_compile=False)
        fit(model, rank, [BroadcastCallback(0), keras.callbacks.EarlyStopping("own_loss", mode="min")], epochs=2)
        assert len(set(everywhere(b"".join(weight.tobytes() for weight in model.get_weights())))) == 1


class Two(NormAndDense):
    """Trains with an optimizer for each of two layers, in attributes that compile does not get."""

    def __init__(self, uneven: str = "error") -> None:
        super().__init__()
        self.build((None, COLUMNS))
        self.compile(jit_compile=False)
        self.both = [hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), uneven=uneven) for _ in range(2)]

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)
        self.built = True

    def train_step(self, data: Any) -> dict:
        loss, tape = self.loss_and_tape(data)
        parts = [self.norm.trainable_weights, self.dense.trainable_weights]
        for optimizer, weights, gradients in zip(self.both, parts, tape.gradient(loss, parts)):
            optimizer.apply_gradients(zip(gradients, weights))
        return {"own_loss": loss}


def new_two(**arguments: Any) -> Two:
    keras.utils.set_random_seed(1)
    return Two(**arguments)


def test_a_model_with_two_optimizers_stops_together_and_has_one_state(rank: int,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    model = new_two()
    early = keras.callbacks.EarlyStopping("own_loss", mode="max", patience=1)
    history = fit(model, rank, [BroadcastCallback(0), early], epochs=8)
    losses = everywhere(history.history["own_loss"])
    assert len(losses[0]) < 8
    assert all(other == losses[0] for other in losses)
    assert len(set(everywhere(b"".join(weight.tobytes() for weight in model.get_weights())))) == 1
    assert "EACH RANK TRAINS" not in caplog.text


@pytest.mark.horovod("broadcast-callback")
def test_the_state_of_optimizers_in_attributes_is_the_roots_after_the_first_batch(rank: int) -> None:
    model = new_two()
    if rank == 0:  # It goes on where another job has ended.
        for optimizer, layer in zip(model.both, (model.norm, model.dense)):
            optimizer.build(layer.trainable_weights)
            for variable in optimizer.variables:
                variable.assign(keras.ops.ones_like(variable) * 3)
    fit(model, rank, [BroadcastCallback(0)])
    assert [int(optimizer.iterations) for optimizer in model.both] == [3 + ROWS // BATCH] * 2
    states = [*model.get_weights(), *(v.numpy() for optimizer in model.both for v in optimizer.variables)]
    assert len(set(everywhere(b"".join(np.asarray(state).tobytes() for state in states)))) == 1


def test_a_variable_that_is_local_to_one_of_two_optimizers_stays_on_its_rank(rank: int, size: int) -> None:
    model = new_two()
    model.both[1].register_local_var(model.norm.moving_mean)
    fit(model, rank)
    assert len(set(everywhere(model.norm.moving_mean.numpy().tobytes()))) == size
    assert len(set(everywhere(model.norm.moving_variance.numpy().tobytes()))) == 1


def test_uneven_steps_with_two_optimizers(rank: int, size: int) -> None:
    rows = ROWS if rank else ROWS + BATCH
    with pytest.raises(mpistrat.MismatchError, match=r"steps per epoch: 4 on ranks \[0\]; 3 on ranks"):
        fit(new_two(), rank, rows=rows)
    model = new_two(uneven="join")
    fit(model, rank, rows=rows, epochs=2)
    states = [*model.get_weights(), *(v.numpy() for optimizer in model.both for v in optimizer.variables)]
    assert len(set(everywhere(b"".join(np.asarray(state).tobytes() for state in states)))) == 1


class OwnStep(NormAndDense):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def train_step(self, data: Any) -> dict:
        loss, tape = self.loss_and_tape(data)
        weights = self.trainable_weights
        tape = hvd_tf.DistributedGradientTape(tape) if self.way == "tape" else tape
        gradients = tape.gradient(loss, [w.value for w in weights])
        if self.way == "allreduce":
            gradients = hvd_tf.grouped_allreduce(gradients)
        self.optimizer.apply(gradients, weights)
        return {"own_loss": loss}


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


# Models that are compiled with a plain optimizer, and what the warning says if each rank trains alone.
ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "forgotten": (lambda: new_model(), "the optimizer of compile() is SGD, which does not average gradients. Write"),
    "own step": (lambda: OwnStep("none"), "no training step has called a collective. Give compile() an hvd"),
    "tape": (lambda: OwnStep("tape"), ""),
    "allreduce": (lambda: OwnStep("allreduce"), ""),
}


@pytest.mark.parametrize("name", ALONE)
def test_ranks_that_train_alone_beside_a_broadcast_are_warned_of(name: str, rank: int,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    make, said = ALONE[name]
    model = make()
    model.compile(sgd(), loss="mse", jit_compile=False)
    fit(model, rank, [BroadcastCallback(0)], epochs=2)
    texts = [r.getMessage() for r in caplog.records if "EACH RANK TRAINS A MODEL OF ITS OWN" in r.getMessage()]
    assert len(texts) == (2 if said and rank == 0 else 0)  # and once more at the end
    assert all(said in text and "has a BroadcastGlobalVariablesCallback: " in text for text in texts)


@pytest.mark.parametrize("way", ["permuted", "rounded"])
def test_arrays_that_differ_before_shard_are_warned_of(way: str, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    x = np.random.default_rng(rank).permutation(x) if way == "permuted" else x * (1 + rank * 2e-7)
    model = new_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=False)
    for _ in range(2):
        model.fit(hvd.shard(x), hvd.shard(np.ones(ROWS)), batch_size=BATCH, verbose=0, callbacks=[BroadcastCallback(0)])
    model.fit(x, np.ones(ROWS), batch_size=BATCH // (1 + rank), steps_per_epoch=1, verbose=0)
    assert sum("different batch sizes: " in text for text in caplog.messages) == (rank == 0)
    told = [text for text in caplog.messages if "hvd.shard() got arrays that differ among the ranks" in text]
    assert len(told) == (2 if way == "permuted" and rank == 0 else 0)


@pytest.mark.parametrize("sign", ["broadcast", "metric", "earlier fit", "shard", "none"])
def test_a_forgotten_optimizer_is_found_without_a_broadcast_in_fit(
        sign: str, rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.keras.fit.fit_callbacks.take_divided", lambda process_set: sign == "shard")
    model, callbacks = new_model(), [hvd.callbacks.MetricAverageCallback()] * (sign == "metric")
    if sign == "broadcast":
        hvd_tf.broadcast_variables([weight.value for weight in model.weights], 0)
    if sign == "earlier fit":
        model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=False)
        fit(model, rank, [BroadcastCallback(0)])
    model.compile(sgd(), loss="mse", jit_compile=False)
    for _ in range(2):
        fit(model, rank, callbacks)
    said = {"broadcast": "the script has broadcast", "metric": "fit has a MetricAverageCallback: the optimizer of",
            "earlier fit": "an earlier fit of the model", "shard": "the script has divided data", "none": ""}[sign]
    texts = [text for text in caplog.messages if "EACH RANK TRAINS A MODEL OF ITS OWN" in text]
    assert len(texts) == (0 if rank or not said else 4 if sign == "metric" else 2)  # twice in each fit, or in the first
    assert all(f"although {said}" in text for text in texts)


class Average(keras.callbacks.Callback):
    """Averages the weights by hand when an epoch ends, as federated learning does."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights(mpistrat.grouped_allreduce(self.model.get_weights(), name="by hand"))


class Silent(keras.callbacks.Callback):
    """A callback of the user's own that communicates nothing."""


@pytest.mark.parametrize("own", [Average, Silent])
@sample("epochs", [1, 3])
def test_weights_that_a_callback_averages_by_hand_are_no_warning(own: Any, epochs: int, rank: int,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    model.compile(sgd(), loss="mse", jit_compile=False)
    fit(model, rank, [BroadcastCallback(0), hvd.callbacks.MetricAverageCallback(), own()], epochs=epochs)
    texts = [r.getMessage() for r in caplog.records if "EACH RANK TRAINS A MODEL OF ITS OWN" in r.getMessage()]
    assert bool(texts) == (own is Silent and rank == 0)


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
