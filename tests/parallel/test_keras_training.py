"""Training with Keras on every rank: the same weights everywhere, those of one process, and the callbacks."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.core.install import numbers
from mpistrat.tensorflow import MPIStrategy

from ..programs.features.keras_models import Subclassed
from ..support.levels import sample
from .helpers import assert_close, assert_equal_on_all_ranks, loaded_again, values_of

STEPS, BATCH, COLUMNS, EPOCHS = 4, 8, 5, 3
accumulates = pytest.mark.skipif(numbers(keras.__version__) < [3, 5], reason="this Keras accumulates clipped gradients")


def global_data(size: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows, one global batch after the other; within each, the ranks' parts one after the other."""
    generator = np.random.default_rng(11)
    x = generator.standard_normal((STEPS * size * BATCH, COLUMNS)).astype(np.float32)
    y = np.tanh(x @ generator.standard_normal((COLUMNS, 1))).astype(np.float32)
    return x, y


def shard(array: np.ndarray, rank: int, size: int) -> np.ndarray:
    return array.reshape(STEPS, size, BATCH, -1)[:, rank].reshape(STEPS * BATCH, -1)


def new_model(kind: str, seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    if kind == "subclassed":
        return Subclassed()
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((COLUMNS,)), *layers] if kind == "input" else layers)


def fit(model: Any, optimizer: Any, data: tuple[np.ndarray, np.ndarray], batch: int, epochs: int = EPOCHS,
        callbacks: Sequence[Any] = (), **arguments: Any) -> Any:
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model.fit(*data, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks),
                     **arguments)


def fit_on_all_ranks(model: Any, optimizer: Any, rank: int, size: int, **arguments: Any) -> Any:
    x, y = global_data(size)
    return fit(model, optimizer, (shard(x, rank, size), shard(y, rank, size)), BATCH, **arguments)


class Watch(keras.callbacks.Callback):
    """Keeps the weights and optimizer variables as they are before and after some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, list[np.ndarray]] = {}
        self.after: dict[int, list[np.ndarray]] = {}

    def _now(self) -> list[np.ndarray]:
        return values_of([*self.model.weights, *self.model.optimizer.variables])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before.setdefault(batch, self._now())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.setdefault(batch, self._now())


# -- the same weights -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["no input", "subclassed"])
def test_training_with_sgd_is_that_of_one_process_on_the_global_batches(kind: str, rank: int, size: int) -> None:
    model = new_model(kind, seed=5)
    fit_on_all_ranks(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), rank, size)
    assert_equal_on_all_ranks(model.get_weights())
    reference = new_model(kind, seed=5)
    fit(reference, keras.optimizers.SGD(0.1, momentum=0.9), global_data(size), BATCH * size)
    assert_close(model.get_weights(), reference.get_weights())


def test_training_eagerly_is_the_same(rank: int, size: int) -> None:
    model = new_model("input", seed=5)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", run_eagerly=True)
    x, y = global_data(size)
    model.fit(shard(x, rank, size), shard(y, rank, size), batch_size=BATCH, shuffle=False, verbose=0)
    assert_equal_on_all_ranks(model.get_weights())
    reference = new_model("input", seed=5)
    fit(reference, keras.optimizers.SGD(0.1), (x, y), BATCH * size, epochs=1)
    assert_close(model.get_weights(), reference.get_weights())


def test_on_a_machine_with_a_gpu_the_default_of_compile_trains(rank: int, size: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("input", seed=rank)
    with monkeypatch.context() as patch:  # Keras compiles the step by XLA where there is such a device.
        patch.setattr(tf.config, "list_physical_devices", lambda kind=None: [
            tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x, y = hvd.shard(*global_data(size))
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_equal_on_all_ranks(model.get_weights())


# -- BroadcastGlobalVariablesCallback ---------------------------------------------------------------------------------


@pytest.mark.horovod("broadcast-callback")
def test_a_model_with_an_input_layer_starts_from_the_roots_weights(rank: int, size: int) -> None:
    root, watch = size - 1, Watch()
    model = new_model("input", seed=rank)
    fit_on_all_ranks(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), rank, size,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(root), watch])
    reference = new_model("input", seed=root)
    assert_close(watch.before[0][:len(model.weights)], reference.get_weights(), 0)
    fit(reference, keras.optimizers.SGD(0.1, momentum=0.9), global_data(size), BATCH * size)
    assert_close(model.get_weights(), reference.get_weights())
    assert_equal_on_all_ranks(values_of([*model.weights, *model.optimizer.variables]))


@pytest.mark.horovod("broadcast-callback")
@sample("kind", ["no input", "subclassed"])
def test_a_model_that_is_built_by_its_first_batch_is_equal_after_it(kind: str, rank: int, size: int) -> None:
    watch = Watch()
    model = new_model(kind, seed=rank)
    fit_on_all_ranks(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), rank, size, epochs=1,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch])
    assert len(watch.after[0]) > len(model.weights) * 2  # The slots of Adam are there.
    assert_equal_on_all_ranks(watch.after[0])
    assert_equal_on_all_ranks(values_of([*model.weights, *model.optimizer.variables]))


@pytest.mark.horovod("broadcast-callback")
def test_the_optimizers_state_is_the_roots_too(rank: int, size: int) -> None:
    # As after loading a checkpoint that only the root has.
    model, watch = new_model("input", seed=rank), Watch()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (rank + 1)))
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables:
        if len(variable.shape):
            variable.assign(np.full(variable.shape, rank + 1.0))
    optimizer.iterations.assign(100 + rank)
    fit_on_all_ranks(model, optimizer, rank, size, epochs=1,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1), watch])
    iterations, rate, *slots = watch.before[0][len(model.weights):]
    assert (int(iterations), float(rate)) == (101, np.float32(0.02))
    assert len(slots) == 8 and all(np.all(slot == 2.0) for slot in slots)
    assert int(model.optimizer.iterations.numpy()) == 101 + STEPS
    assert_equal_on_all_ranks(values_of([*model.weights, *model.optimizer.variables]))


def test_variables_that_are_not_trained_are_broadcast(rank: int, size: int) -> None:
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    mean = model.layers[0].moving_mean
    mean.assign(np.full(mean.shape, rank + 1.0))
    watch = Watch()
    fit_on_all_ranks(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), rank, size, epochs=1,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch])
    assert_equal_on_all_ranks(watch.before[0])
    assert any(np.array_equal(value, np.ones(COLUMNS)) for value in watch.before[0])


def test_a_normalization_that_each_rank_has_adapted_computes_with_the_roots_statistics(rank: int, size: int) -> None:
    x, y = global_data(size)
    own = shard(x, rank, size) * (rank + 1) + rank
    normalization = keras.layers.Normalization()
    normalization.adapt(own)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.Sequential([normalization]), keras.layers.Dense(1)])
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), (own, shard(y, rank, size)), BATCH, epochs=1,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_equal_on_all_ranks(model.get_weights())
    assert_equal_on_all_ranks([model.predict(x, verbose=0), normalization(x)])


@pytest.mark.horovod("broadcast-callback-local")
def test_local_variables_stay_as_they_are(rank: int, size: int) -> None:
    model = new_model("input", seed=0)
    given, registered = model.layers[0].bias, model.layers[1].bias
    given.assign(np.full(given.shape, rank + 1.0))
    registered.assign(np.full(registered.shape, rank + 10.0))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[given])
    callback.register_local_var(registered)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callback.set_model(model)
    callback.on_train_begin()
    assert set(given.numpy()) == {rank + 1.0}
    assert set(registered.numpy()) == {rank + 10.0}


# -- other callbacks --------------------------------------------------------------------------------------------------


def keeping(kept: list[dict]) -> Any:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(dict(logs)))


@pytest.mark.horovod("metric-average")
def test_metrics_are_averaged_for_the_callbacks_that_follow(rank: int, size: int) -> None:
    own, shown = list[dict](), list[dict]()
    x, y = global_data(size)
    data = shard(x, rank, size), shard(y, rank, size)
    history = fit(new_model("input", seed=1), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), data, BATCH,
                  epochs=2, validation_data=data, callbacks=[
                      keeping(own), hvd.callbacks.MetricAverageCallback(), keeping(shown)])
    for epoch in range(2):
        everybody = mpistrat.allgather_object(own[epoch])
        assert len({logs["loss"] for logs in everybody}) == size
        for name in ("loss", "val_loss"):
            mean = np.mean([logs[name] for logs in everybody])
            assert shown[epoch][name] == pytest.approx(mean, rel=1e-12)
            assert history.history[name][epoch] == shown[epoch][name]
    assert_equal_on_all_ranks([history.history["loss"], history.history["val_loss"]])


@sample("weighted", [False, True])
def test_metrics_that_are_arrays_are_averaged(weighted: bool, rank: int, size: int) -> None:
    own, shown = list[dict](), list[dict]()
    classes, callback = 3, hvd.callbacks.MetricAverageCallback(weighted=weighted)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(classes, "softmax")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "categorical_crossentropy", metrics=[
        keras.metrics.F1Score(average=None, name="each"), keras.metrics.F1Score(average="macro", name="all")])
    x = np.random.default_rng(rank).normal(size=(8 * (1 + rank), 4)).astype(np.float32)
    y = np.eye(classes, dtype=np.float32)[x[:, :classes].argmax(1)]
    history = model.fit(x, y, batch_size=4 * (1 + rank), verbose=0, validation_data=(x, y), callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), keeping(own), callback, keeping(shown)])
    weights = [1 + r if weighted else 1 for r in range(size)]
    for name in ("each", "val_each", "all", "val_all"):
        of_ranks = mpistrat.allgather_object(np.asarray(own[0][name]))
        mean = np.average(of_ranks, axis=0, weights=weights)
        assert np.shape(shown[0][name]) == of_ranks[0].shape
        for found in (shown[0][name], history.history[name][0]):
            np.testing.assert_allclose(found, mean, rtol=1e-6)
        assert_equal_on_all_ranks([np.asarray(history.history[name][0])])


def number(value: Any) -> float:
    """A learning rate. A variable of Keras 3.0 has no __float__."""
    return float(keras.ops.convert_to_numpy(value))


class Driver:
    """Calls a callback as fit does, and notes the learning rate of each batch."""

    def __init__(self, callback: Any, optimizer: Any, steps: int | None = STEPS):
        self.callback, self.optimizer = callback, optimizer
        model = new_model("input", seed=0)
        model.compile(optimizer, loss="mse")
        callback.set_model(model)
        callback.set_params({"steps": steps})
        callback.on_train_begin()
        self.rates: list[float] = []
        self.logged: list[float] = []

    def run(self, epochs: int, steps: int = STEPS) -> "Driver":
        for epoch in range(epochs):
            self.callback.on_epoch_begin(epoch)
            for batch in range(steps):
                self.callback.on_train_batch_begin(batch)
                self.rates.append(number(self.optimizer.learning_rate))
                self.callback.on_train_batch_end(batch)
            logs: dict[str, float] = {}
            self.callback.on_epoch_end(epoch, logs)
            self.logged.append(logs["lr"])
        return self


@pytest.mark.horovod("lr-warmup")
def test_the_learning_rate_warms_up_to_its_full_value(rank: int, size: int) -> None:
    driver = Driver(hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2), keras.optimizers.SGD(0.8)).run(3)
    done = np.arange(1, 2 * STEPS + 1) / STEPS / 2  # The part of the warm-up that each batch completes.
    expected = [*(0.8 / size * (1 + done * (size - 1))), *[0.8] * STEPS]
    np.testing.assert_allclose(driver.rates, expected, rtol=1e-6)
    np.testing.assert_allclose(driver.logged, expected[STEPS - 1::STEPS], rtol=1e-6)


def test_the_chief_alone_says_that_the_warm_up_is_done(rank: int, capsys: pytest.CaptureFixture) -> None:
    callback = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1)
    Driver(callback, keras.optimizers.SGD(0.8)).run(4)
    printed = capsys.readouterr().out
    assert printed == ("\nEpoch 2: the learning-rate warm-up is done. The rate is 0.8.\n" if rank == 0 else "")


@pytest.mark.horovod("lr-schedule")
def test_a_staircase_schedule_changes_the_rate_at_epochs() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.5, start_epoch=1, end_epoch=3)
    driver = Driver(callback, keras.optimizers.SGD(0.1)).run(4)
    np.testing.assert_allclose(driver.logged, [0.1, 0.4, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(driver.rates[STEPS:], np.repeat([0.4, 0.2, 0.2], STEPS), rtol=1e-6)


@pytest.mark.horovod("lr-schedule")
def test_a_smooth_schedule_changes_the_rate_at_batches() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=lambda epoch: 1 + epoch, staircase=False)
    driver = Driver(callback, keras.optimizers.SGD(0.1)).run(2)
    np.testing.assert_allclose(driver.rates, 0.4 * (1 + np.arange(2 * STEPS) / STEPS), rtol=1e-6)


@pytest.mark.horovod("lr-momentum")
@sample("front, run_eagerly", [("optimizer", False), ("optimizer", True), ("strategy", False), ("central", False)])
def test_the_momentum_is_corrected_for_the_batch_of_the_change(front: str, run_eagerly: bool) -> None:
    """Each gradient is 1, so that the weights tell the rates and the momentum of all steps."""
    strategy = None if front == "optimizer" else MPIStrategy(**{"variables": "central"} if front == "central" else {})
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.8)
        model.compile(hvd.DistributedOptimizer(optimizer) if strategy is None else optimizer,
                      lambda y, prediction: prediction[:, 0], run_eagerly=run_eagerly)
    rows = STEPS * (1 if strategy is None else mpistrat.size())
    model.fit(np.ones((rows, 1)), np.zeros((rows, 1)), batch_size=rows // STEPS, epochs=3, verbose=0, callbacks=[
        hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5 ** epoch)])
    weight = velocity = 0.0
    for step in range(3 * STEPS):
        rate = 0.1 * 0.5 ** (step // STEPS)
        # The first batch of an epoch sees half the momentum, all others the whole.
        momentum = 0.4 if step in (STEPS, 2 * STEPS) else 0.8
        velocity = momentum * velocity - rate
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-6)


@pytest.mark.horovod("lr-momentum")
def test_there_is_no_momentum_to_correct() -> None:
    for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)):
        Driver(hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5 ** epoch), optimizer).run(2)


@pytest.mark.horovod("lr-errors")
def test_a_schedule_needs_a_rate_and_the_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"initial_lr=\) must be a number. Received: None"):
        hvd.callbacks.LearningRateScheduleCallback(None, multiplier=0.1)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    with pytest.raises(ValueError, match="steps_per_epoch is required"):
        Driver(callback, keras.optimizers.SGD(0.1), steps=None)
    Driver(hvd.callbacks.LearningRateWarmupCallback(0.1, steps_per_epoch=2), keras.optimizers.SGD(0.1), steps=None)
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    for optimizer in (schedule, keras.optimizers.SGD(lambda: 0.1)):
        with pytest.raises(mpistrat.InvalidRequestError, match="must be a number in the optimizer of compile"):
            Driver(hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), optimizer).run(1)


# -- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.horovod("load-model")
def test_a_loaded_model_goes_on_where_it_was_saved(rank: int, size: int, shared_dir: str) -> None:
    model = new_model("input", seed=4)
    fit_on_all_ranks(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), rank, size, epochs=1)
    path = os.path.join(shared_dir, "model.keras")
    if rank == 0:
        model.save(path)
    hvd.allreduce(0.0)
    loaded = hvd.load_model(path)
    assert type(loaded.optimizer).__name__ == "Adam"
    assert int(loaded.optimizer.iterations.numpy()) == STEPS
    x, y = (shard(array, rank, size) for array in global_data(size))
    for either in (model, loaded):
        either.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(values_of([*loaded.weights, *loaded.optimizer.variables]),
                 values_of([*model.weights, *model.optimizer.variables]), 1e-7, rtol=1e-6)
    assert_equal_on_all_ranks(loaded.get_weights())


def test_a_loaded_model_has_the_arguments_that_load_model_gets(rank: int, size: int, shared_dir: str) -> None:
    model = new_model("input", seed=4)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    path = os.path.join(shared_dir, "model.keras")
    if rank == 0:
        model.save(path)
    mpistrat.barrier()
    loaded = hvd.load_model(path, uneven="join")
    x, y = (shard(array, rank, size)[:BATCH * (1 + (rank == 0))] for array in global_data(size))
    loaded.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(loaded.optimizer.iterations.numpy()) == 2
    assert_equal_on_all_ranks(loaded.get_weights())


class MyAdam(keras.optimizers.Adam):
    """Keras does not know this one."""


@pytest.mark.horovod("load-model")
def test_load_model_takes_the_users_optimizers() -> None:
    model = new_model("input", seed=4)
    model.compile(MyAdam(0.01), loss="mse")
    loaded = loaded_again(model, custom_optimizers=[MyAdam])
    assert isinstance(loaded.optimizer, MyAdam) and type(loaded.optimizer) is not MyAdam


@keras.saving.register_keras_serializable(package="elsewhere")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.horovod("load-model")
def test_load_model_takes_the_users_schedules_and_optimizers_in_others() -> None:
    model = new_model("input", seed=4)
    model.compile(keras.optimizers.LossScaleOptimizer(MyAdam(Halving())), loss="mse")
    loaded = loaded_again(model, custom_optimizers=[MyAdam], custom_objects={"Halving": Halving})
    assert isinstance(loaded.optimizer.inner_optimizer, MyAdam)
    assert float(loaded.optimizer.learning_rate) == 1.0


@accumulates
@pytest.mark.horovod("load-model")
@sample("is_mean", [None, True, False], ids=["not said", "mean", "sum"])
def test_load_model_says_what_it_makes_of_accumulated_gradients(
        is_mean: bool | None, rank: int, size: int, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model("input", seed=4)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2), loss="mse")
    loaded = loaded_again(model, **{} if is_mean is None else {"average_aggregated_gradients": is_mean})
    assert ("Give load_model average_aggregated_gradients=True for the mean" in caplog.text) == (is_mean is None)
    bias, before = loaded.trainable_variables[-1], loaded.trainable_variables[-1].numpy()
    for number in (1.0, 2.0):
        gradients = [tf.fill(v.shape, number * (rank + 1)) for v in loaded.trainable_variables]
        loaded.optimizer.apply(gradients, loaded.trainable_variables)
    step = (1.0 + 2.0) * (size + 1) / 2 / (1 if is_mean is False else 2)
    np.testing.assert_allclose(bias.numpy(), before - step, rtol=1e-6)


def test_load_model_takes_a_model_without_an_optimizer() -> None:
    assert getattr(loaded_again(new_model("input", seed=4)), "optimizer", None) is None


@pytest.mark.horovod("keras-collectives")
def test_the_short_forms_of_the_collectives(rank: int, size: int) -> None:
    assert float(hvd.allreduce(rank + 1.0, op=hvd.Sum)) == size * (size + 1) / 2
    assert float(hvd.allreduce(rank + 1.0, name="named", average=True)) == (size + 1) / 2
    assert hvd.allreduce(np.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).numpy().tolist() == \
        [2.0 * size] * 2
    assert hvd.allgather([rank]).numpy().tolist() == list(range(size))
    assert int(hvd.broadcast(rank, size - 1)) == size - 1


@accumulates
@sample("way", ["optimizer", "strategy"])
def test_a_fit_goes_on_with_gradients_that_it_has_accumulated(rank: int, size: int, way: str) -> None:
    """Rank 0 broadcasts its sums, or writes them to a file, so they have to be the mean of all ranks."""
    x, y = (array[:3 * size * BATCH] for array in global_data(size))
    own = [array.reshape(3, size, BATCH, -1)[:, rank].reshape(3 * BATCH, -1) for array in (x, y)]
    strategy = MPIStrategy() if way == "strategy" else None

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    reference = new_model("input", 5)
    fit(reference, optimizer(), (x, y), size * BATCH, 1)
    reference.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = new_model("input", 5)
        fit(model, optimizer() if strategy is not None else hvd.DistributedOptimizer(optimizer()),
            (x, y) if strategy is not None else own, BATCH * (size if strategy is not None else 1), 1)
    assert_equal_on_all_ranks(model.optimizer.variables)
    if strategy is None:
        model.fit(*own, batch_size=BATCH, shuffle=False, verbose=0,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    else:
        model.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0)
    assert_close(values_of(model.weights), values_of(reference.weights))
