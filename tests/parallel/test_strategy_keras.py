"""Keras under MPIStrategy: what is special to it. What every strategy should do is in test_features.py."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras
from mpistrat.core.handle import Entry
from mpistrat.core.request import Request
from mpistrat.tensorflow import Compression, MPIStrategy
from mpistrat.tensorflow.xla import context

from ..programs.features.keras_steps import OwnStep
from ..programs.features.keras_training import BATCH, COLUMNS, both, compiled, dense, fit_both, sequential, sgd
from ..support.levels import sample
from .strategy_helpers import assert_close, assert_equal_on_all_ranks, collectives_counted, global_data


def test_a_step_of_fit_is_one_collective(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with collectives_counted() as names:
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    steps = [name for name in names if "()/strategy/" in name or name.startswith("optimizer")]
    assert len(steps) == 3 * 5
    assert len(set(steps)) == 1 and "/" not in steps[0]


def sent(submitted: list[Entry]) -> list[Request]:
    """Those that reduce gradients."""
    return [entry.request for entry in submitted if entry.request.name.startswith("optimizer")]


@sample("clips", [{}, {"global_clipnorm": 0.5}], ids=str)
@sample("name", ["fp16", "bf16"])
def test_gradients_are_sent_compressed_and_the_share_of_rows_is_not(name: str, clips: dict, rank: int,
                                                                    submitted: list[Entry]) -> None:
    model, reference = both(MPIStrategy(compression=getattr(Compression, name)), rank,
                            lambda: compiled(optimizer=lambda: sgd(**clips)))
    x, y = global_data(61)
    for each in (model, reference):
        each.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    assert_equal_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights(), 1e-2)
    wire_dtype = {"fp16": "float16", "bf16": "bfloat16"}[name]
    assert sorted(spec.dtype for spec in sent(submitted)[0].tensors) == sorted([*[wire_dtype] * 4, "float32"])


@pytest.mark.nightly
def test_groups_of_gradients_are_a_collective_each(rank: int, submitted: list[Entry]) -> None:
    strategy = MPIStrategy(groups=3)
    model, reference = both(strategy, rank)
    fit_both(strategy, model, reference, rows=61, epochs=1)
    steps = -(-61 // BATCH)
    # The last has the number of rows too.
    assert [len(request.tensors) for request in sent(submitted)] == [2, 1, 2] * steps


@pytest.mark.nightly
@pytest.mark.parametrize("is_dense", [True, False])
def test_slices_are_sent_dense_if_wished(is_dense: bool, rank: int, submitted: list[Entry]) -> None:
    def embedding() -> Any:
        return keras.Sequential([keras.Input((2,)), keras.layers.Embedding(20, 3), keras.layers.Flatten(),
                                 keras.layers.Dense(1)])

    model, reference = both(MPIStrategy(sparse_as_dense=is_dense), rank, lambda: compiled(embedding, loss="mse"))
    x, y = np.random.default_rng(0).integers(0, 20, (24, 2)), np.ones((24, 1), np.float32)
    for each in (model, reference):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(model.get_weights(), reference.get_weights(), 1e-5)
    assert any("values" in request.name for request in sent(submitted)) is not is_dense


@pytest.mark.parametrize("argument", [{"compression": Compression.fp16}, {"groups": 2}, {"sparse_as_dense": True}],
                         ids=str)
def test_arguments_that_differ_are_an_error_on_every_rank(argument: dict, rank: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=rf"disagree on MPIStrategy\({next(iter(argument))}=\): "):
        MPIStrategy(**argument if rank == 0 else {})


def test_groups_are_a_number() -> None:
    with pytest.raises(ValueError, match=r"MPIStrategy\(groups=\) must be an integer"):
        MPIStrategy(groups=[[]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups should be"):
        MPIStrategy(groups=0)


@pytest.mark.usefixtures("no_warning_yet")
@pytest.mark.parametrize("is_same", [True, False])
def test_the_same_data_on_all_ranks_are_warned_of(is_same: bool, strategy: MPIStrategy, rank: int,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(BATCH * 2)
    data = tf.data.Dataset.from_tensor_slices((x + (0 if is_same else rank), y)).batch(BATCH)
    model.fit(strategy.distribute_datasets_from_function(lambda _: data), epochs=1, steps_per_epoch=2, verbose=0)
    found = [record.getMessage() for record in caplog.records if "the same data" in record.getMessage()]
    assert len(found) == (1 if is_same and rank == 0 else 0)
    assert all("distribute_datasets_from_function" in text for text in found)


@pytest.mark.usefixtures("no_warning_yet")
def test_gradients_that_a_replica_reduces_are_no_sign_of_the_same_data(strategy: MPIStrategy, rank: int, size: int,
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        weights, optimizer = keras.Variable(tf.ones(3)), keras.optimizers.SGD(1.0)

    @tf.function
    def step() -> None:
        gradient = tf.distribute.get_replica_context().all_reduce("sum", [tf.constant([4.0, 0.0, rank])])
        clipped, _ = tf.clip_by_global_norm(gradient, 1.0)
        optimizer.apply([clipped[0] / size], [weights])

    for _ in range(4):
        strategy.run(step)
    whole = np.array([4.0 * size, 0.0, size * (size - 1) / 2])
    assert_close(weights.numpy(), 1 - 4 * whole / np.linalg.norm(whole), 1e-6)
    assert not any("the same data" in text for text in caplog.messages)


@pytest.mark.parametrize(("case", "said"), [
    ("batch", r"different numbers of steps per epoch: 2 on ranks \[0\]; 4 on ranks .* pass the same data, batch_size="),
    ("size", r"different batch sizes: 12 on ranks \[0\]; 13 on ranks .* pass the same batch_size="),
    ("begin", r"begin with different epochs: 0 on ranks \[0\]; 2 on ranks"),
    ("stop", r"ranks \[0\] ended training after epoch 2 \(stopped by EarlyStopping\); ranks .* go on to epoch 3"),
])
def test_ranks_with_other_steps_or_epochs_are_an_error(case: str, said: str, strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    early = [keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1)] if case == "stop" and not rank else []
    size = {"batch": BATCH // 2, "size": BATCH + 1}.get(case, BATCH) if rank else BATCH
    with pytest.raises(mpistrat.MismatchError, match=said):
        model.fit(*global_data(2 * BATCH), batch_size=size, epochs=4, callbacks=early, verbose=0,
                  initial_epoch=2 if case == "begin" and rank else 0)


def test_a_users_arrays_are_not_written_to(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(60)
    model.fit(((x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, 60, BATCH)), verbose=0)
    np.testing.assert_array_equal(y, global_data(60)[1], "TensorFlow has written to the user's arrays")


def test_compilation_is_switched_off_where_xla_cannot(strategy: MPIStrategy, rank: int,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "why_not", lambda: "there is none")
    with strategy.scope():
        model = compiled(jit_compile=True)
    with pytest.warns(UserWarning, match=r"jit_compile=True is switched off: .*\(there is none\)"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_a_model_outside_of_the_scope_is_warned_of(strategy: MPIStrategy, rank: int) -> None:
    model = compiled()
    with pytest.warns(UserWarning, match=r"built outside of strategy\.scope"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


@sample("optimizer", [lambda: "adam", lambda: keras.optimizers.SGD(0.1), sgd], ids=["name", "SGD", "with slots"])
def test_compile_outside_of_the_scope(strategy: MPIStrategy, optimizer: Callable, rank: int) -> None:
    """As with MirroredStrategy. The metric, whose variables exist already, is one that all ranks have too."""
    with strategy.scope():
        model = sequential()
    reference = sequential()
    reference.set_weights(model.get_weights())
    for m in (model, reference):
        m.compile(optimizer(), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    fit_both(strategy, model, reference, rows=61)
    assert_equal_on_all_ranks(model.optimizer.variables)


def test_an_optimizer_that_is_made_outside_of_the_scope_applies_gradients_in_a_loop(strategy: MPIStrategy,
                                                                                    size: int) -> None:
    optimizer = sgd()
    with strategy.scope():
        variable = keras.Variable(np.ones(3, np.float32))

    def step(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    strategy.run(tf.function(step), args=(tf.ones(3),))
    assert_close([variable], [np.full(3, 1 - 0.1 * size)])


class CountOfRows(keras.metrics.Metric):
    """The number of rows. Its result is its state, as in Keras' documentation."""

    def __init__(self, dtype: str):
        super().__init__(name="rows")
        self.count = self.add_variable((), "zeros", dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], self.count.dtype))

    def result(self) -> Any:
        return self.count


class Largest(keras.metrics.Metric):
    """The largest prediction, which is no sum over the ranks."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", aggregation="only_first_replica")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        largest = mpistrat.tensorflow.allreduce(tf.reduce_max(y_pred), op=mpistrat.Max)
        self.value.assign(tf.maximum(self.value, largest))

    def result(self) -> Any:
        return self.value


@pytest.mark.nightly
@pytest.mark.parametrize("metric", [lambda: CountOfRows("float32"), lambda: CountOfRows("int32"), Largest],
                         ids=["float32", "int32", "largest"])
def test_the_result_of_a_metric_may_be_its_state(strategy: MPIStrategy, metric: Callable, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(metrics=(metric(),)))
    fit_both(strategy, model, reference, rows=61)


class Pair(keras.Model):
    """Two models that a train_step trains, and no call(). The second is built by the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = sequential(keras.layers.BatchNormalization())
        self.second = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        self.error = keras.metrics.Mean("error")

    def compile(self, **arguments: Any) -> None:
        super().compile(**arguments)
        self.of_first, self.of_second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            error = tf.reduce_mean((self.second(self.first(x)) - y) ** 2)
            loss = error / tf.distribute.get_strategy().num_replicas_in_sync
        for optimizer, part in ((self.of_first, self.first), (self.of_second, self.second)):
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.error.update_state(error)
        return {"error": self.error.result()}


@pytest.mark.parametrize("methods", [{}, {"call": lambda self, noise: self.first(noise[:, 1:])}], ids=["none", "GAN's"])
def test_a_model_without_a_call_of_the_batches_trains(methods: dict, strategy: MPIStrategy, rank: int) -> None:
    model, reference = both(strategy, rank, type("Pair", (Pair,), methods))
    reference.first.set_weights(model.first.get_weights())
    for m in (model, reference):
        m.compile()
    x, y = global_data(60)
    ours, expected = (m.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0) for m in (model, reference))
    assert_equal_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights(), 1e-5)
    assert_close(ours.history["error"], expected.history["error"], 1e-5)


def test_gradients_that_are_applied_outside_of_a_replica_are_warned_of(strategy: MPIStrategy) -> None:
    with strategy.scope():
        variables, optimizer = [keras.Variable(1.0)], keras.optimizers.SGD(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply([tf.ones(())], variables)  # It may be there to make the slots.
    with pytest.warns(UserWarning, match=r"in a replica only.* strategy\.run\(step, args=\(batch,\)\)") as told:
        optimizer.apply([tf.ones(())], variables)
    assert told[0].filename == __file__


def test_a_model_outside_of_the_scope_may_be_evaluated(strategy: MPIStrategy, rank: int) -> None:
    model, (x, y) = compiled(), global_data(24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)


def test_a_distributed_optimizer_is_refused(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(optimizer=lambda: mpistrat.keras.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match="would average gradients twice"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_on_batch_takes_the_rows_of_a_rank(strategy: MPIStrategy, rank: int, size: int) -> None:
    model, reference = both(strategy, rank)
    x, y = global_data(4 * size)
    own = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        assert_close(model.train_on_batch(x[own], y[own]), reference.train_on_batch(x, y), 1e-5)
    assert_close(model.test_on_batch(x[own], y[own]), reference.test_on_batch(x, y), 1e-5)
    assert_close([model.predict_on_batch(x[own])], [reference.predict_on_batch(x)], 1e-5)
    assert_equal_on_all_ranks(model.get_weights())


class ReportsLosses(keras.Sequential):
    """Its train_step keeps means of what Keras has computed, and returns some of it."""

    def __init__(self) -> None:
        super().__init__([keras.Input((COLUMNS,)), *dense()])
        self.mean, self.of_function = keras.metrics.Mean("mean"), keras.metrics.Mean("of_function")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        self.mean.update_state(loss)
        self.of_function.update_state(keras.losses.MeanAbsoluteError()(y, predicted))
        return {"own": loss, "mean": self.mean.result(), "of_function": self.of_function.result()}


class LargestOfBatch(keras.layers.Layer):
    """Keeps the largest absolute value of its batch in a weight, as Keras' float8 does; NaN for a batch without rows.

    Its results are its inputs.
    """

    def build(self, shape: Any) -> None:
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest", dtype="float32")
        self.largest.overwrite_with_gradient = True

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def kept(values: Any, largest: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                value = tf.reduce_max(tf.abs(values)) + 0 * tf.reduce_mean(values)
                return upstream, tf.cast(value, largest.dtype)
            return values, gradient
        return kept(x, self.largest.value)


UNEVEN: dict[str, Callable[[], Any]] = {
    "synchronized": lambda: compiled(lambda: sequential(keras.layers.BatchNormalization(synchronized=True))),
    "our layer": lambda: compiled(lambda: sequential(mpistrat.keras.SyncBatchNormalization())),
    "accumulated": lambda: compiled(optimizer=lambda: sgd(gradient_accumulation_steps=2)),
    "losses of a step": lambda: compiled(ReportsLosses, metrics=()),
    "overwritten": lambda: compiled(lambda: sequential(LargestOfBatch())),
    "overwritten, accumulated": lambda: compiled(lambda: sequential(LargestOfBatch()),
                                                 lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.1)),
    "NaN without rows": lambda: compiled(lambda: OwnStep([keras.Input((COLUMNS,)), *dense()]), metrics=(),
                                         optimizer=lambda: keras.optimizers.LossScaleOptimizer(sgd(), 1.0)),
}


@sample("kind", UNEVEN)
def test_uneven_parts_of_a_global_batch_count_by_their_rows(strategy: MPIStrategy, kind: str, rank: int) -> None:
    """Batches of 13 rows, and one of a single row, which some rank has not."""
    model, reference = both(strategy, rank, UNEVEN[kind])
    fit_both(strategy, model, reference, rows=27, batch_size=13)


class NeedsRows(keras.layers.Layer):
    """Fails without rows, as some layers do in TensorFlow, and counts them by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.count = keras.metrics.Sum(name="count")
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        tf.debugging.assert_positive(tf.shape(x)[0])
        self.count.update_state(tf.shape(x)[0])
        return x


@pytest.mark.nightly
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_a_rank_without_rows_evaluates_and_predicts_none_of_its_own(strategy: MPIStrategy, eagerly: bool,
                                                                    rank: int) -> None:
    def build() -> Any:
        inputs = keras.Input((None,), dtype="int32")
        x = NeedsRows()(keras.layers.Embedding(5, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, {"each": x, "sum": keras.layers.LSTM(3)(x)})

    def make() -> Any:
        return compiled(build, loss={"each": "mse", "sum": "mse"}, metrics=(), run_eagerly=eagerly)

    model, reference = both(strategy, rank, make)
    x = np.array([[1, 2, 0], [3, 1, 0], [4, 4, 0]], np.int32)  # A mask leaves as many tokens of each row.
    y = {"each": np.ones((3, 3, 4), np.float32), "sum": np.ones((3, 3), np.float32)}
    for rows in (1, 3):
        part = {name: value[:rows] for name, value in y.items()}
        found, wanted = (each.evaluate(x[:rows], part, batch_size=2, verbose=0, return_dict=True)
                         for each in (model, reference))
        assert found.keys() == wanted.keys() and wanted["count"] == rows
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name
        found, wanted = (each.predict(x[:rows], batch_size=2, verbose=0) for each in (model, reference))
        for name, value in wanted.items():
            assert found[name].shape == value.shape
            np.testing.assert_allclose(found[name], value, atol=1e-5)


class Counting(keras.layers.Layer):
    """Counts rows and batches, and keeps the largest number of all ranks."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")
        self.batches = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
            self.batches.assign_add(1)
            largest = mpistrat.tensorflow.allreduce(tf.reduce_max(x), op=mpistrat.Max)
            self.largest.assign(tf.maximum(self.largest, largest))
        return x


@pytest.mark.parametrize("way", ["strategy", "optimizer"])
def test_state_of_a_layer_is_that_of_all_rows(strategy: MPIStrategy, way: str, rank: int, size: int) -> None:
    layer, (x, y) = Counting(), global_data(48)

    def build() -> Any:
        return keras.Sequential([keras.Input((COLUMNS,)), layer, keras.layers.Dense(1)])

    if way == "strategy":
        with strategy.scope():
            layer = Counting()
            model = compiled(build)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    else:
        model = compiled(build, optimizer=lambda: mpistrat.keras.DistributedOptimizer(sgd()))
        if rank == 0:  # Another fit has counted, and is broadcast.
            layer.rows.assign(5.0)
        model.fit(*mpistrat.shard(x, y), batch_size=BATCH // size, epochs=2, verbose=0,
                  callbacks=[mpistrat.keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    found = mpistrat.allgather_object([float(v) for v in (layer.rows, layer.batches, layer.largest)])
    assert found == [[2.0 * 48 + 5.0 * (way == "optimizer"), 8.0, float(x.max())]] * size


def test_policy_off_trains_on_all_rows_of_every_rank(strategy: MPIStrategy, rank: int, size: int) -> None:
    """A rank that has more rows goes on until it has read them, and the others with it."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    x, y = global_data(36)
    own = slice(0, 24 if rank else 36)
    with strategy.scope():
        model = compiled(metrics=(CountOfRows("int32"),))
    history = model.fit(tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(BATCH).with_options(options),
                        epochs=2, verbose=0)
    assert history.history["rows"] == [36 + 24 * (size - 1)] * 2
    assert int(model.optimizer.iterations.numpy()) == 2 * 3 * size


@pytest.mark.parametrize(("change", "place", "what"), [
    (lambda model: model.set_weights([w + 1 for w in model.get_weights()]), "", "weights, so they no longer train one"),
    pytest.param(lambda model: model.set_weights([w + 1 for w in model.get_weights()]), "on_train_batch_end", "weights",
                 marks=pytest.mark.nightly),
    pytest.param(lambda model: setattr(model.optimizer, "learning_rate", 0.5), "",
                 "values of the learning_rate of SGD: 0.5 on ", marks=pytest.mark.nightly),
    (lambda model: setattr(model.optimizer, "learning_rate", 0.5), "on_epoch_begin", "values of the learning_rate of"),
], ids=["weights", "weights within an epoch", "rate", "rate by a callback"])
def test_what_one_rank_changes_is_an_error_on_every_rank(strategy: MPIStrategy, change: Callable, place: str, what: str,
                                                         rank: int) -> None:
    with strategy.scope():
        model = compiled()
    if rank == 0 and not place:
        change(model)
    own = {place: lambda *_, **__: change(model)} if rank == 0 and place else {}
    when = "at the end of epoch 1" if place else "when training begins"
    with pytest.raises(mpistrat.MismatchError, match=f"fit: {when} the ranks have different {what}"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.LambdaCallback(**own)])


def test_a_loop_compares_the_weights_in_the_first_step(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        optimizer, variable = sgd(name="own"), keras.Variable(np.ones(3, np.float32), name="parameter")
    if rank == 0:
        variable.assign(np.zeros(3, np.float32))
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    with pytest.raises(mpistrat.MismatchError, match=r"in the first step of own .* the values of parameter differ"):
        strategy.run(step, args=(tf.ones(3),))


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


@pytest.mark.parametrize("differs", [True, False])
def test_ranks_drop_different_units_unless_asked_otherwise(differs: bool, rank: int, size: int) -> None:
    strategy = MPIStrategy(random_per_rank=differs)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    kept = strategy.run(tf.function(lambda: layer(tf.ones([64]), training=True)))
    everybody = mpistrat.allgather_object(np.asarray(kept).tobytes())
    assert len(set(everybody)) == (size if differs else 1)


# Keras itself slices a matrix only if its rows are in order, with and without a strategy; the columns need not be.
@pytest.mark.nightly
@pytest.mark.parametrize(("way", "kind"), [("matrix", "csr_matrix"), ("matrix", "coo_array"),
                                           ("generator", "csr_matrix"), ("generator", "csc_matrix")])
def test_scipy_matrices(strategy: MPIStrategy, kind: str, way: str, rank: int) -> None:
    """Those that a single process learns from, whatever the order of their elements."""
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x, y = global_data(60)
    x = np.where(x > 0.3, x, 0.0).astype(np.float32)

    def sparse(rows: np.ndarray, by_columns: bool) -> Any:
        row, column = np.nonzero(rows)
        order = np.lexsort([row, column] if by_columns else [-column, row])
        found = scipy_sparse.coo_matrix((rows[row, column][order], (row[order], column[order])), rows.shape)
        return getattr(scipy_sparse, kind)(found)

    batches = [(sparse(x[i:i + BATCH], True), y[i:i + BATCH]) for i in range(0, 60, BATCH)]

    def learned(scope: Any) -> list[np.ndarray]:
        with scope:
            model = keras.Sequential([keras.Input((x.shape[1],), sparse=True), keras.layers.Dense(3),
                                      keras.layers.Dense(1)])
            model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.05), loss="mse")
        data = (sparse(x, False), y) if way == "matrix" else ((batch for batch in batches),)
        model.fit(*data, batch_size=BATCH if way == "matrix" else None, shuffle=False, verbose=0)
        return model.get_weights()

    assert_close(learned(strategy.scope()), learned(contextlib.nullcontext()), 1e-5)
