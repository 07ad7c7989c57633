"""Keras under MPIStrategy: what fit, evaluate and predict give is what one process gives on the global batches."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import mpistrat.keras  # noqa: E402
from mpistrat.tensorflow import MPIStrategy  # noqa: E402

from .strategy_helpers import assert_close, assert_equal_on_all_ranks, collectives_counted, global_data  # noqa: E402

COLUMNS, BATCH = 5, 12


@pytest.fixture(scope="module")
def strategy() -> MPIStrategy:
    return MPIStrategy()


class Subclassed(keras.Model):
    """A model that knows its input only when it sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


class OwnStep(keras.Sequential):
    """A model with a train_step of its own, whose logs are no metrics of the model."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(error ** 2) / tf.distribute.get_strategy().num_replicas_in_sync
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        return {"own": tf.reduce_mean(tf.abs(error))}


def dense(*extra: Any) -> list[Any]:
    return [keras.layers.Dense(6, activation="tanh"), *extra, keras.layers.Dense(1)]


def sequential(*extra: Any) -> Any:
    return keras.Sequential([keras.Input((COLUMNS,)), *dense(*extra)])


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **arguments)


def compiled(build: Callable = sequential, optimizer: Callable = sgd, loss: Any = "mse", **arguments: Any) -> Any:
    model = build()
    model.compile(optimizer(), loss=loss, metrics=["mae"], **arguments)
    return model


def both(strategy: MPIStrategy, rank: int, make: Callable = compiled) -> tuple[Any, Any]:
    """The same model under the strategy, from other seeds on each rank, and of one process."""
    keras.utils.set_random_seed(7)
    reference = make()
    keras.utils.set_random_seed(7 + rank)
    with strategy.scope():
        model = make()
    if model.built:
        assert_equal_on_all_ranks(model.get_weights())
    return model, reference


def fit_both(model: Any, reference: Any, rows: int = 60, epochs: int = 2, **arguments: Any) -> tuple[Any, Any]:
    """Train both on the same data; the histories."""
    x, y = global_data(rows)
    arguments = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, **arguments}
    if not model.built:
        reference.build((None, COLUMNS))
        with model.distribute_strategy.scope():
            model.build((None, COLUMNS))
        reference.set_weights(model.get_weights())
    return model.fit(x, y, **arguments).history, reference.fit(x, y, **arguments).history


def assert_same(model: Any, reference: Any, histories: tuple[Any, Any], atol: float = 1e-5) -> None:
    assert_equal_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights(), atol)
    ours, expected = histories
    assert set(ours) == set(expected)
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=atol, err_msg=name)


# -- fit, evaluate, predict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [60, 61, 73])
@pytest.mark.parametrize("build", [sequential, lambda: keras.Sequential(dense()), Subclassed])
def test_fit_evaluate_and_predict(strategy: MPIStrategy, build: Callable, rows: int, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(build))
    x, y = global_data(rows)
    assert_same(model, reference, fit_both(model, reference, rows, validation_data=(x[:40], y[:40])))
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=BATCH, verbose=0),
                               reference.evaluate(x, y, batch_size=BATCH, verbose=0), rtol=0, atol=1e-5)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, reference.predict(x, verbose=0), rtol=0, atol=1e-5)


def test_adam(strategy: MPIStrategy, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(optimizer=keras.optimizers.Adam))
    assert_same(model, reference, fit_both(model, reference))


def test_a_step_of_fit_is_one_collective(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with collectives_counted() as names:
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    steps = [name for name in names if name.startswith("strategy/multi_step")]
    assert len(steps) == 3 * 5
    assert all("gradients" in name for name in steps)


def test_shuffled_data_are_those_of_one_epoch(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank, lambda: compiled(optimizer=lambda: keras.optimizers.SGD(0.0)))
    x, y = global_data(64)
    loss = model.fit(x, y, batch_size=16, shuffle=True, verbose=0).history["loss"][0]
    assert loss == pytest.approx(model.evaluate(x, y, batch_size=16, verbose=0)[0], abs=1e-6)


def generator_of(x: np.ndarray, y: np.ndarray) -> Any:
    for start in range(0, len(x), BATCH):
        yield x[start:start + BATCH], y[start:start + BATCH]


class Batches(keras.utils.PyDataset):
    """Global batches."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __getitem__(self, i: int) -> Any:
        return self.x[i * BATCH:(i + 1) * BATCH], self.y[i * BATCH:(i + 1) * BATCH]


@pytest.mark.parametrize("kind", ["dataset", "generator", "PyDataset", "DistributedDataset", "from function"])
def test_other_kinds_of_data(strategy: MPIStrategy, kind: str, rank: int, size: int) -> None:
    model, reference = both(strategy, rank)
    x, y = global_data(60)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def from_function(context: Any) -> Any:
        own = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(BATCH))
    data = {"dataset": lambda: dataset, "generator": lambda: generator_of(x, y), "PyDataset": lambda: Batches(x, y),
            "DistributedDataset": lambda: strategy.experimental_distribute_dataset(dataset),
            "from function": lambda: strategy.distribute_datasets_from_function(from_function)}[kind]()
    ours = model.fit(data, verbose=0, shuffle=False).history
    np.testing.assert_array_equal(y, global_data(60)[1], "TensorFlow has written to the user's arrays")
    expected = reference.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False).history
    assert_same(model, reference, (ours, expected))


def test_sample_weights(strategy: MPIStrategy, rank: int) -> None:
    model, reference = both(strategy, rank)
    assert_same(model, reference, fit_both(model, reference, sample_weight=np.linspace(0, 2, 60).astype(np.float32)))


def test_class_weights(strategy: MPIStrategy, rank: int) -> None:
    def make() -> Any:
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("sgd", loss="sparse_categorical_crossentropy")
        return model
    model, reference = both(strategy, rank, make)
    x, y = global_data(60)
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "class_weight": {0: 1.0, 1: 3.0}}
    labels = (y[:, 0] > 0).astype(np.int32)
    histories = [m.fit(x, labels, **arguments).history for m in (model, reference)]
    assert_same(model, reference, tuple(histories))


# -- ways to compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"steps_per_execution": 3}, {"run_eagerly": True}])
def test_ways_to_run_steps(strategy: MPIStrategy, arguments: dict, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(**arguments))
    assert_same(model, reference, fit_both(model, reference))


def test_a_loss_that_is_a_sum(strategy: MPIStrategy, rank: int) -> None:
    def make() -> Any:
        return compiled(optimizer=lambda: keras.optimizers.SGD(0.001),
                        loss=keras.losses.MeanSquaredError(reduction="sum"))
    model, reference = both(strategy, rank, make)
    fit_both(model, reference, 61)
    assert_close(model.get_weights(), reference.get_weights(), 1e-5)


@pytest.mark.parametrize("arguments", [
    {"clipnorm": 0.01}, {"global_clipnorm": 0.02}, {"clipvalue": 0.005}, {"weight_decay": 0.01},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}, {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.02}], ids=str)
def test_what_an_optimizer_can_do(strategy: MPIStrategy, arguments: dict, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(optimizer=lambda: sgd(**arguments)))
    assert_same(model, reference, fit_both(model, reference))


def test_mixed_precision(strategy: MPIStrategy, rank: int) -> None:
    def make() -> Any:
        return compiled(lambda: keras.Sequential([keras.Input((COLUMNS,)),
                                                  *[type(layer)(layer.units, dtype="mixed_float16")
                                                    for layer in dense()]]),
                        optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0))
    model, reference = both(strategy, rank, make)
    assert_same(model, reference, fit_both(model, reference), atol=1e-2)


def test_an_overflow_on_one_rank_is_an_overflow_on_all(strategy: MPIStrategy, rank: int, size: int) -> None:
    with strategy.scope():
        model = compiled(optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0))
    before = model.get_weights()
    x, y = global_data(4 * size)
    x[0] = np.inf  # in the first rank's part of the only batch
    model.fit(x, y, batch_size=4 * size, shuffle=False, verbose=0)
    assert_close(model.get_weights(), before, 0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 32.0


def test_a_train_step_of_ones_own(strategy: MPIStrategy, rank: int) -> None:
    def make() -> Any:
        model = OwnStep([keras.Input((COLUMNS,)), *dense()])
        model.compile(sgd(), loss="mse")
        return model
    model, reference = both(strategy, rank, make)
    assert_same(model, reference, fit_both(model, reference))


def test_compilation_is_switched_off_with_a_warning(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True is switched off"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_a_model_outside_of_the_scope_is_warned_of(strategy: MPIStrategy, rank: int) -> None:
    model = compiled()
    with pytest.warns(UserWarning, match=r"built outside of strategy\.scope"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_a_distributed_optimizer_is_refused(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(optimizer=lambda: mpistrat.keras.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match="would average gradients twice"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_layers_may_be_frozen_in_between(strategy: MPIStrategy, rank: int) -> None:
    model, reference = both(strategy, rank)
    fit_both(model, reference)
    for m in (model, reference):
        m.layers[0].trainable = False
        with (strategy if m is model else tf.distribute.get_strategy()).scope():
            m.compile(sgd(), loss="mse", metrics=["mae"])
    assert_same(model, reference, fit_both(model, reference))


def test_on_batch(strategy: MPIStrategy, rank: int, size: int) -> None:
    model, reference = both(strategy, rank)
    x, y = global_data(4 * size)
    own = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        logs = model.train_on_batch(x[own], y[own])
        np.testing.assert_allclose(logs, reference.train_on_batch(x, y), rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.test_on_batch(x[own], y[own]), reference.test_on_batch(x, y), rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x[own]), reference.predict_on_batch(x), rtol=0, atol=1e-5)
    assert_equal_on_all_ranks(model.get_weights())


# -- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [
    lambda: keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True),
    lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5, factor=0.1)], ids=["stop", "plateau"])
def test_callbacks_decide_alike(strategy: MPIStrategy, callback: Callable, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(optimizer=lambda: keras.optimizers.SGD(0.7)))
    x, y = global_data(60)
    histories = [m.fit(x, y, batch_size=BATCH, epochs=6, shuffle=False, verbose=0, callbacks=[callback()],
                       validation_data=(x[:24], y[:24])).history for m in (model, reference)]
    assert_equal_on_all_ranks(model.get_weights())
    assert len(histories[0]["loss"]) == len(histories[1]["loss"])
    assert float(model.optimizer.learning_rate) == pytest.approx(float(reference.optimizer.learning_rate))


def test_a_callback_of_one_rank_sees_the_logs_of_all(strategy: MPIStrategy, rank: int) -> None:
    seen: list[float] = []
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))]
    model, reference = both(strategy, rank)
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks if rank == 0 else [])
    if rank == 0:
        ours = list(seen)
        seen.clear()
        reference.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        np.testing.assert_allclose(ours, seen, rtol=0, atol=1e-5)


# -- BatchNormalization, Dropout --------------------------------------------------------------------------------------


def test_running_statistics_are_averaged_before_they_are_used(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(lambda: sequential(keras.layers.BatchNormalization()))
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_equal_on_all_ranks(model.get_weights())
    assert_equal_on_all_ranks([model.evaluate(x, y, verbose=0)])


def test_statistics_of_the_global_batch(strategy: MPIStrategy, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(
        lambda: sequential(keras.layers.BatchNormalization(synchronized=True))))
    assert_same(model, reference, fit_both(model, reference), atol=2e-5)


def test_a_rank_without_rows_poisons_nothing(strategy: MPIStrategy, rank: int, size: int) -> None:
    with strategy.scope():
        model = compiled(lambda: sequential(keras.layers.BatchNormalization()))
    x, y = global_data(2 * size + 1)
    history = model.fit(x, y, batch_size=2 * size, epochs=2, shuffle=False, verbose=0).history
    assert_equal_on_all_ranks(model.get_weights())
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert np.isfinite(history["loss"]).all()


@pytest.mark.parametrize("differs", [True, False])
def test_ranks_drop_different_units_unless_asked_otherwise(differs: bool, rank: int, size: int) -> None:
    strategy = MPIStrategy(random_per_rank=differs)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    kept = strategy.run(tf.function(lambda: layer(tf.ones([64]), training=True)))
    everybody = mpistrat.allgather_object(np.asarray(kept).tobytes())
    assert len(set(everybody)) == (size if differs else 1)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".keras", ".h5", ".weights.h5"])
def test_saving_and_loading(strategy: MPIStrategy, suffix: str, rank: int, shared_dir: str) -> None:
    model, reference = both(strategy, rank)
    fit_both(model, reference)
    path = os.path.join(shared_dir, f"rank{rank}{suffix}")
    x, y = global_data(60)
    if suffix == ".weights.h5":
        model.save_weights(path)
        with strategy.scope():
            loaded = compiled()
        loaded.load_weights(path)
    else:
        model.save(path)
        with strategy.scope():
            loaded = keras.models.load_model(path, compile=suffix == ".keras")
    assert_close(loaded.get_weights(), model.get_weights(), 0)
    if suffix == ".keras":
        histories = [m.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history for m in (loaded, reference)]
        assert_same(loaded, reference, tuple(histories))


def test_export(strategy: MPIStrategy, rank: int, shared_dir: str) -> None:
    model, reference = both(strategy, rank)
    model.export(f"{shared_dir}/rank{rank}", verbose=False)
    served = tf.saved_model.load(f"{shared_dir}/rank{rank}")
    x, _ = global_data(6)
    np.testing.assert_allclose(served.serve(x), reference.predict(x, verbose=0), atol=1e-5)
