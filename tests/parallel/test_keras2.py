"""Keras 2 (tf_keras) on every rank, in processes whose tf.keras it is: test_parallel.py sets TF_USE_LEGACY_KERAS."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from mpistrat.core.errors import MismatchError

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    pytest.skip("tf.keras is Keras 3 in this process", allow_module_level=True)
keras = pytest.importorskip("tf_keras")
tf = pytest.importorskip("tensorflow")

import mpistrat.tensorflow.keras as hvd  # noqa: E402

from ..support.levels import sample  # noqa: E402
from .helpers import assert_equal_on_all_ranks, both_ways, eagerly, either_way, everywhere, in_graph  # noqa: E402

old = keras.optimizers.legacy
Scaled = keras.mixed_precision.LossScaleOptimizer
SHAPES = [(3, 2), (4,)]
# -- gradients --------------------------------------------------------------------------------------------------------


def gradients_of(rank: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng((rank, step))
    return [generator.normal(0.3, 4.0, shape).astype(np.float32) for shape in SHAPES]


def mean_of(size: int, steps: Iterable[int]) -> list[np.ndarray]:
    """The gradients of these steps: the sum over the steps, the mean over the ranks."""
    parts = [gradients_of(rank, step) for rank in range(size) for step in steps]
    return [np.sum(np.array(each, np.float64), axis=0).astype(np.float32) / np.float32(size)
            for each in zip(*parts, strict=True)]


def after(optimizer: Any, steps: Sequence[Sequence[np.ndarray]], way: Callable = eagerly) -> list[np.ndarray]:
    """What variables are, and the variables of the optimizer, when these gradients have been applied."""
    variables = [tf.Variable(np.random.default_rng(7).standard_normal(shape).astype(np.float32)) for shape in SHAPES]

    def step(*values: Any) -> None:
        optimizer.apply_gradients(zip(values, variables, strict=True))

    function = way(step)
    for values in steps:
        function(*[tf.constant(value) for value in values])
    state = optimizer.variables
    return [v.numpy() for v in [*variables, *(state() if callable(state) else state)]]


def assert_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], atol: float = 1e-6,
                 rtol: float = 2e-5) -> None:
    assert_equal_on_all_ranks(found)
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=rtol, atol=atol)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "sgd clips": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.1, clipnorm=1.0, use_ema=True),
    "adam of a schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "legacy sgd": lambda: old.SGD(0.1, momentum=0.9, clipvalue=0.5),
    "legacy adam": lambda: old.Adam(0.1, amsgrad=True, decay=0.1),
    "legacy adam of a schedule": lambda: old.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "legacy ftrl": lambda: old.Ftrl(0.1),
    "legacy transformed": lambda: old.SGD(0.1, gradient_transformers=[lambda pairs: [(2 * g, v) for g, v in pairs]]),
    "scaled": lambda: Scaled(keras.optimizers.Adam(0.1)),
    "scaled legacy": lambda: Scaled(old.Adam(0.1), dynamic=False, initial_scale=8.0),
}


@pytest.mark.horovod("optimizer-old")
@either_way
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_with_the_mean(name: str, way: Callable, rank: int, size: int) -> None:
    make = OPTIMIZERS[name]
    optimizer = hvd.DistributedOptimizer(make())
    assert isinstance(optimizer, type(make())) and type(optimizer).__name__ == type(make()).__name__
    found = after(optimizer, [gradients_of(rank, step) for step in range(3)], way)
    assert_close(found, after(make(), [mean_of(size, [step]) for step in range(3)], way))


@pytest.mark.horovod("backward-passes")
@both_ways
@sample("name", ["adam", "legacy sgd", "legacy adam of a schedule"])
@sample("is_mean", [False, True], ids=["sum", "mean"])
def test_passes_are_accumulated(name: str, way: Callable, is_mean: bool, rank: int, size: int) -> None:
    make = OPTIMIZERS[name]
    optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=is_mean)
    found = after(optimizer, [gradients_of(rank, step) for step in range(5)], way)  # The fifth waits for its update.
    updates = [[each / np.float32(1 + is_mean) for each in mean_of(size, [step, step + 1])] for step in (0, 2)]
    assert_close(found, after(make(), updates, way))


@pytest.mark.parametrize("arguments, tolerance", [
    ({"compression": hvd.Compression.fp16}, 1e-2), ({"gradient_predivide_factor": 2.0}, 1e-5),
    ({"groups": 2}, 1e-5), ({"num_groups": 1}, 1e-5), ({"op": hvd.Sum}, 1e-5)], ids=str)
def test_arguments_do_what_they_do_with_keras_3(arguments: dict[str, Any], tolerance: float, rank: int, size: int
                                                ) -> None:
    found = after(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments), [gradients_of(rank, 0)], in_graph)
    factor = np.float32(size if arguments.get("op") == hvd.Sum else 1)
    expected = after(keras.optimizers.SGD(0.1), [[each * factor for each in mean_of(size, [0])]])
    assert_close(found, expected, tolerance, tolerance)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(0.1), lambda: old.Adam(0.1)], ids=["new", "legacy"])
def test_slices_are_those_of_all_ranks(make: Callable, is_dense: bool, rank: int, size: int) -> None:
    def trained(optimizer: Any, rows: Sequence[int], factor: float) -> np.ndarray:
        table = tf.Variable(tf.ones((7, 2)))
        for _ in range(2):
            slices = tf.IndexedSlices(tf.fill((len(rows), 2), factor), tf.constant(rows), tf.constant((7, 2)))
            optimizer.apply_gradients([(slices, table)])
        return table.numpy()

    of_rank = [[r, 5, 5] for r in range(size)]
    found = trained(hvd.DistributedOptimizer(make(), sparse_as_dense=is_dense), of_rank[rank], 1.0)
    assert_equal_on_all_ranks([found])
    # A dense gradient moves all rows of Adam's slots.
    expected = trained(make(), [row for rows in of_rank for row in rows], 1.0 / size)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_local_variables_keep_their_own_gradient_and_state(rank: int, size: int) -> None:
    for make in (lambda: keras.optimizers.Adam(0.1), lambda: old.Adam(0.1)):
        optimizer = hvd.DistributedOptimizer(make())
        shared, own = tf.Variable([1.0]), tf.Variable([1.0])
        optimizer.register_local_var(own)
        optimizer.apply_gradients([(tf.constant([float(rank)]), shared), (tf.constant([float(1 + rank)]), own)])
        from mpistrat.keras.bridge.training import _local_slots
        slots = _local_slots(optimizer, optimizer._mpistrat.reducer)
        assert len(slots) == 2
        moments = sorted(float(slot.numpy().item()) for slot in slots)
        np.testing.assert_allclose(moments, [0.001 * ((1 + rank) / size) ** 2, 0.1 * (1 + rank) / size], rtol=1e-4)
        assert_equal_on_all_ranks([shared.numpy()])


@either_way
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.1), lambda: old.SGD(0.1)], ids=["new", "legacy"])
def test_all_ranks_skip_a_step_with_an_overflow_on_one(make: Callable, inside: bool, way: Callable, rank: int,
                                                        size: int) -> None:
    scaled = Scaled(hvd.DistributedOptimizer(make()), initial_scale=8.0) if inside \
        else hvd.DistributedOptimizer(Scaled(make(), initial_scale=8.0))
    gradients = gradients_of(rank, 0)
    if rank == size - 1:
        gradients[0][0, 0] = np.inf
    found = after(scaled, [gradients, gradients_of(rank, 1)], way)
    expected = after(make(), [mean_of(size, [1])])
    assert_close(found[:2], expected[:2], 0.0, 1e-5)
    assert float(scaled.loss_scale) == 4.0
    assert_equal_on_all_ranks(found)


@pytest.mark.horovod("optimizer-from-config")
@pytest.mark.parametrize("name", ["adam", "legacy sgd", "legacy adam of a schedule"])
def test_an_optimizer_of_its_configuration_is_distributed(name: str, rank: int, size: int) -> None:
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), backward_passes_per_step=2)
    copy = type(optimizer).from_config(optimizer.get_config())
    found = after(copy, [gradients_of(rank, step) for step in (0, 1)])
    assert_close(found, after(OPTIMIZERS[name](), [mean_of(size, [0, 1])]))


def test_what_cannot_be_distributed_is_refused() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="only supports Average and Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"does not work with LossScaleOptimizerV3\. Keras 2 accumulates no gradients"):
        hvd.DistributedOptimizer(Scaled(keras.optimizers.SGD(0.1)), backward_passes_per_step=2)
    inside = Scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2))
    with pytest.raises(ValueError, match="backward_passes_per_step does not work in a LossScaleOptimizer of Keras 2"):
        after(inside, [gradients_of(0, 0)])
    with pytest.raises(ValueError, match=r"does not say how gradients are averaged"):
        type(optimizer).from_config(keras.optimizers.SGD(0.1).get_config())


# -- fit --------------------------------------------------------------------------------------------------------------


def rows(size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((12 * size, 3)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def own_rows(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of each batch of four rows a rank."""
    return tuple(each.reshape(-1, size, 4, each.shape[1])[:, rank].reshape(-1, each.shape[1])
                 for each in rows(size))  # type: ignore[return-value]


def new_model(optimizer: Any, seed: int = 3, layers: Sequence[Any] = (), **arguments: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh", input_shape=(3,)), *layers,
                              keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"], **arguments)
    return model


def weights_of(model: Any) -> list[np.ndarray]:
    state = model.optimizer.variables
    return [v.numpy() for v in [*model.weights, *(state() if callable(state) else state)]]


@pytest.mark.horovod("broadcast-callback", "metric-average")
@sample("name", ["adam", "legacy adam", "scaled"])
def test_fit_is_that_of_one_process(name: str, rank: int, size: int) -> None:
    """The ranks begin with other weights, and get those of rank 0."""
    x, y = own_rows(rank, size)
    model = new_model(hvd.DistributedOptimizer(OPTIMIZERS[name]()), seed=rank)
    weights = new_model("sgd").get_weights()
    if rank == 0:
        model.set_weights(weights)
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=(x, y), callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.Throughput()])
    one = new_model(OPTIMIZERS[name]())
    x, y = rows(size)
    expected = one.fit(x, y, batch_size=4 * size, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
    assert_close(weights_of(model), weights_of(one))
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-4)
    assert all(value > 0 for value in history.history["rows_per_second"])


def test_a_model_may_get_its_weights_from_the_first_batch(rank: int, size: int) -> None:
    """Keras 2 raises an error for those of such a Sequential before. With weight decay fit itself compares them."""
    for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.AdamW(0.01)):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        model.fit(*own_rows(rank, size), batch_size=4, epochs=2, verbose=0,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert_equal_on_all_ranks(weights_of(model))


class Towers(keras.Model):
    """Has two models inside, of which one has no weights before the first batch; and a layer and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = [keras.Sequential([keras.layers.Dense(4, input_shape=(3,))]),
                       keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])]
        self.factor = self.add_weight(name="factor", initializer="ones")
        self.seen = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        left, right = (tower(x) for tower in self.towers)
        return tf.reduce_sum(left * right, axis=1, keepdims=True) * self.factor


@pytest.mark.parametrize("door", ["optimizer", "strategy"])
def test_a_model_inside_may_get_its_weights_from_the_first_batch(door: str, rank: int, size: int) -> None:
    from mpistrat.keras.bridge.private_names import weights_of
    from mpistrat.tensorflow import MPIStrategy
    keras.utils.set_random_seed(rank)
    if door == "optimizer":
        model, data = Towers(), own_rows(rank, size)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    else:
        with MPIStrategy().scope():
            model, data = Towers(), rows(size)
            model.compile(keras.optimizers.SGD(0.1), "mse")
    assert [weight.shape for weight in weights_of(model)] == [(), (3, 4), (4,)]
    model.fit(*data, batch_size=4, epochs=2, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if door == "optimizer" else [])
    found = weights_of(model)
    assert len(found) == 9
    assert_equal_on_all_ranks([weight.numpy() for weight in found])


@pytest.mark.horovod("lr-warmup", "lr-schedule", "lr-momentum")
@sample("module", [keras.optimizers, old], ids=["new", "legacy"])
def test_learning_rates_rise_and_fall(module: Any, rank: int, size: int) -> None:
    x, y = own_rows(rank, size)
    model = new_model(hvd.DistributedOptimizer(module.SGD(0.01 * size, momentum=0.9)))
    rates, velocities = [], []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    class Velocities(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            state = self.model.optimizer.variables
            velocities.append([v.numpy() for v in (state() if callable(state) else state) if v.shape == (3, 4)])

    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[
        Velocities(), hvd.callbacks.LearningRateWarmupCallback(0.01 * size, 2),
        hvd.callbacks.LearningRateScheduleCallback(0.01 * size, 0.1, start_epoch=2), Velocities(), Seen()])
    warm = [0.01 * (1 + (size - 1) * (step + 1) / 6) for step in range(6)]
    np.testing.assert_allclose(rates, [*warm, *[0.01 * size] * 3], rtol=1e-5)
    before, since = velocities[10], velocities[11]  # of the sixth batch
    np.testing.assert_allclose(since[0], before[0] * np.float32(warm[5] / warm[4]), rtol=1e-4)


@pytest.mark.horovod("load-model")
@pytest.mark.parametrize("ending", [".h5", ".keras"])
@sample("module", [keras.optimizers, old], ids=["new", "legacy"])
def test_a_saved_model_goes_on(module: Any, ending: str, rank: int, size: int, shared_dir: str) -> None:
    if module is old and ending == ".keras":
        pytest.skip("Keras 2 itself does not read a legacy optimizer of such a file")
    x, y = own_rows(rank, size)
    path = os.path.join(shared_dir, f"model-{rank}{ending}")
    arguments: dict[str, Any] = {"batch_size": 4, "epochs": 1, "verbose": 0, "shuffle": False}
    model = new_model(hvd.DistributedOptimizer(module.Adam(0.1)))
    model.fit(x, y, **arguments)
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is module.Adam
    loaded = hvd.load_model(path)
    assert loaded.optimizer.is_distributed
    for each in (loaded, model):
        each.fit(x, y, **arguments)
    assert_close(weights_of(loaded), weights_of(model))


def test_callbacks_write_files_once(rank: int, size: int, shared_dir: str) -> None:
    x, y = own_rows(rank, size)
    written: list[str] = []

    class Model(keras.Model):
        def save(self, filepath: str, **kwargs: Any) -> None:
            written.append(os.path.basename(filepath))
            super().save(filepath, **kwargs)

    inputs = keras.Input((3,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    best = hvd.callbacks.BestModelCheckpoint("loss")
    best.filepath = os.path.join(shared_dir, "best.keras")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), best,
        keras.callbacks.ModelCheckpoint(os.path.join(shared_dir, "each.keras")),
        keras.callbacks.CSVLogger(os.path.join(shared_dir, "log.csv")),
        keras.callbacks.EarlyStopping("loss", patience=5)])
    assert (sorted(written) == ["best.keras", "best.keras", "each.keras", "each.keras"]) if rank == 0 else not written
    with open(os.path.join(shared_dir, "log.csv")) as file:
        assert len(file.readlines()) == 3
    assert everywhere(os.path.exists(best.filepath)) == [True] * size


def test_what_differs_among_the_ranks_is_an_error_on_all(rank: int, size: int, restart: Callable[[], None]) -> None:
    x, y = own_rows(rank, size)
    model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), seed=rank)
    with pytest.raises(Exception, match="the ranks train different weights"):
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    restart()
    model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    rest = len(x) if rank else 8
    with pytest.raises(MismatchError, match="different numbers of steps per epoch"):
        model.fit(x[:rest], y[:rest], batch_size=4, epochs=2, verbose=0)

    class Changes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if rank == size - 1:
                model.layers[0].bias.assign_add([1.0] * 4)

    with pytest.raises(MismatchError, match=r"at the end of epoch 2 the ranks have different weights"):
        model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Changes()])
    with pytest.raises(MismatchError, match=r"only ranks \[0\] have a MetricAverageCallback"):
        new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))).fit(
            x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()] if rank == 0 else [])


def test_each_rank_has_a_backup_of_its_own(rank: int, size: int, shared_dir: str) -> None:
    x, y = own_rows(rank, size)
    for directory, error in (("common", "with the same directory"), (f"of {rank}", "")):
        path = os.path.join(shared_dir, directory)
        for epochs in (1, 2):
            model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
            backup = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
            with pytest.raises(MismatchError, match=error) if error else contextlib.nullcontext():
                history = model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[backup])
    assert history.epoch == [1]
    assert_equal_on_all_ranks(weights_of(model))


def test_a_list_of_callbacks_that_the_script_has_made(rank: int, size: int) -> None:
    x, y = own_rows(rank, size)
    model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=1, steps=3, verbose=0)
    with pytest.raises(MismatchError, match="different values of the learning_rate of SGD"):
        model.optimizer.learning_rate = 0.1 + rank
        model.fit(x, y, batch_size=4, epochs=2, callbacks=callbacks)


def test_ranks_with_fewer_batches_join(rank: int, size: int) -> None:
    x, y = own_rows(rank, size)
    count = 12 if rank == size - 1 else 4
    model = new_model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), uneven="join"))
    model.fit(x[:count], y[:count], batch_size=4, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 6
    assert_equal_on_all_ranks(weights_of(model))


@pytest.mark.horovod("sync-batch-norm")
def test_batch_normalization_of_all_ranks(rank: int, size: int) -> None:
    x, y = own_rows(rank, size)
    model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), layers=[hvd.SyncBatchNormalization()])
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    one = new_model(keras.optimizers.SGD(0.1), layers=[keras.layers.BatchNormalization(fused=False)])
    x, y = rows(size)
    one.fit(x, y, batch_size=4 * size, epochs=2, verbose=0, shuffle=False)
    assert_close(weights_of(model), weights_of(one), 1e-5, 1e-3)
    assert type(model.layers[1]).__name__ == "BatchNormalization"
    with pytest.raises(ValueError, match="does not support fused=True"):
        hvd.SyncBatchNormalization(fused=True)


def test_running_statistics_are_averaged_and_a_step_of_the_users_own_is_counted(rank: int, size: int) -> None:
    class Model(keras.Sequential):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.of_rows = keras.metrics.Mean()  # Its sums are among the weights of the model.

        def train_step(self, data: Any) -> Any:
            self.of_rows.update_state(data[1] * (1 + rank))
            return super().train_step(data)

    keras.utils.set_random_seed(1)
    model = Model([keras.layers.BatchNormalization(input_shape=(3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", steps_per_execution=2)
    x, y = own_rows(rank, size)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(weighted=True),
        hvd.callbacks.Elastic()])
    assert_equal_on_all_ranks([weight.numpy() for layer in model.layers for weight in layer.weights])


def test_mixed_precision_in_fit(rank: int, size: int) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = new_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        assert isinstance(model.optimizer, Scaled) and not model.optimizer.inner_optimizer.name.startswith("loss")
        x, y = own_rows(rank, size)
        history = model.fit(x, y, batch_size=4, epochs=4, verbose=0,
                            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert history.history["loss"][-1] < history.history["loss"][0]
        assert_equal_on_all_ranks(weights_of(model))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.horovod("elastic-state")
@sample("module", [keras.optimizers, old], ids=["new", "legacy"])
def test_the_state_of_a_model_is_kept(module: Any, rank: int, size: int) -> None:
    model = new_model(hvd.DistributedOptimizer(module.Adam(0.1)), seed=rank)
    state = hvd.elastic.KerasState(model, epoch=rank)
    state.sync()
    assert state.epoch == 0
    assert_equal_on_all_ranks(weights_of(model))
    before = weights_of(model)
    x, y = own_rows(rank, size)
    model.fit(x, y, batch_size=4, verbose=0)
    assert np.any(weights_of(model)[0] != before[0])
    state.restore()
    for mine, right in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(mine, right)


# -- MPIStrategy ------------------------------------------------------------------------------------------------------


@sample("name", ["adam", "legacy adam", "scaled"])
def test_a_strategy_trains_as_one_process(name: str, rank: int, size: int) -> None:
    from mpistrat.tensorflow import MPIStrategy
    strategy = MPIStrategy()
    data = tf.data.Dataset.from_tensor_slices(rows(size)).batch(4 * size)
    with strategy.scope():
        model = new_model(OPTIMIZERS[name]())
    history = model.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=[
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])
    one = new_model(OPTIMIZERS[name]())
    expected = one.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=[
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])
    assert_close(weights_of(model), weights_of(one))
    for metric, values in expected.history.items():
        np.testing.assert_allclose(history.history[metric], values, rtol=1e-4)
    np.testing.assert_allclose(model.predict(data, verbose=0), one.predict(data, verbose=0), rtol=1e-3, atol=1e-5)


class OwnStep(keras.Sequential):
    """Returns other numbers than its metrics': a share, a loss of Keras', a metric by its name and by another one."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        prediction = self(x, training=False)
        near = tf.reduce_mean(tf.cast(abs(prediction - y) < 1.0, tf.float32))
        loss = self.compiled_loss(y, prediction)
        self.compiled_metrics.update_state(y, prediction)
        results = {metric.name: metric.result() for metric in self.metrics}
        return {"near": near, "loss_of_batch": loss, "rows": tf.shape(x)[0], "mae": results["mae"],
                "error": results["mae"]}

    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        return self.test_step(data)


def test_what_a_step_under_a_strategy_returns_is_that_of_all_rows(rank: int, size: int) -> None:
    from mpistrat.tensorflow import MPIStrategy
    strategy, (x, y) = MPIStrategy(), rows(size)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))  # One batch, of which each rank has as many rows.

    def new() -> Any:
        keras.utils.set_random_seed(3)
        model = OwnStep([keras.layers.Dense(1, input_shape=(3,))])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    with strategy.scope():
        model = new()
    one = new()
    for found, expected in ((model.evaluate(data, return_dict=True, verbose=0),
                             one.evaluate(data, return_dict=True, verbose=0)),
                            (model.fit(data, verbose=0).history, one.fit(data, verbose=0).history)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
