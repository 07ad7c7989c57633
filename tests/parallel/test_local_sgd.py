"""LocalSGD and DiLoCo on every rank: what they compute, the same bits after each synchronisation, and errors."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.tensorflow import DistributedGradientTape, MPIStrategy

from ..support.legs import DEFAULT, HOST_EACH, TWO_HOSTS, Leg, under
from ..support.levels import sample
from .helpers import assert_close, assert_equal_on_all_ranks, everywhere, values_of

STEPS, BATCH, COLUMNS = 5, 4, 6


def rows(rank: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(steps * BATCH, COLUMNS)).astype(np.float32)
    return x, np.tanh(x[:, :2] + x[:, -2:]).astype(np.float32)


def model_of(kind: str = "dense") -> Any:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2, dtype="float32")]
    if kind == "normalised":
        layers.insert(1, keras.layers.BatchNormalization(momentum=0.5))
    return keras.Sequential(layers if kind == "unbuilt" else [keras.Input((COLUMNS,)), *layers])


def fit(model: Any, optimizer: Any, rank: int, callbacks: Sequence[Any] = (), epochs: int = 2, steps: int = STEPS,
        compiled: dict[str, Any] | None = None, **arguments: Any) -> Any:
    model.compile(optimizer, loss="mse", **{"jit_compile": False, **(compiled or {})})
    return model.fit(*rows(rank, steps), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0,
                     callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks], **arguments)


class Watch(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[np.ndarray]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.kept.append(values_of(self.model.trainable_variables))

    def equal(self) -> list[bool]:
        return [all(np.array_equal(a, b) for other in everywhere(kept) for a, b in zip(kept, other, strict=True))
                for kept in self.kept]


# -- what is computed --------------------------------------------------------------------------------------------------


@sample("arguments", [{}, {"momentum": 0.9, "nesterov": True},
                                       {"momentum": 0.9, "gradient_accumulation_steps": 2},
                                       {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4}], ids=str)
def test_an_average_in_every_step_is_that_of_gradients(arguments: dict[str, Any], rank: int) -> None:
    local, together = model_of("normalised"), model_of("normalised")
    fit(local, keras.optimizers.SGD(0.1, **arguments), rank, [hvd.callbacks.LocalSGD(every=1)])
    fit(together, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, **arguments)), rank)
    assert_close(values_of(local.trainable_variables), values_of(together.trainable_variables), 1e-6, rtol=1e-4)
    assert_equal_on_all_ranks(values_of(local.weights))


def test_the_ranks_have_the_same_bits_after_the_warmup_and_then_every_so_many_steps(rank: int, size: int) -> None:
    model, watch = model_of(), Watch()
    local = hvd.callbacks.LocalSGD(every=np.int64(3), warmup=2, average_slots=True)
    fit(model, keras.optimizers.Adam(0.01), rank, [watch, local], steps=9, epochs=1)
    assert watch.equal() == ([True, True, False, False, True, False, False, True, False] if size > 1 else [True] * 9)
    assert_equal_on_all_ranks(values_of([*model.weights, *model.optimizer.variables]))
    assert local.steps == 9


def by_hand(point: list[np.ndarray], rounds: int,
            of_ranks: Callable[[list[np.ndarray], int], list[np.ndarray]]) -> list[np.ndarray]:
    """DiLoCo with SGD(0.7, momentum=0.9, nesterov=True) in numpy: `of_ranks` is the mean progress of a round."""
    velocity = [np.zeros_like(each) for each in point]
    for number in range(rounds):
        for i, gradient in enumerate(of_ranks(point, number)):
            velocity[i] = 0.9 * velocity[i] - 0.7 * gradient
            point[i] = point[i] + 0.9 * velocity[i] - 0.7 * gradient
    return point


def test_diloco_is_its_algorithm(rank: int) -> None:
    """Two steps of SGD in each round, against numpy's arithmetic of the outer steps."""
    x, y = rows(rank, 6)
    inner = model_of()
    inner.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)

    def progress(point: list[np.ndarray], number: int) -> list[np.ndarray]:
        for variable, value in zip(inner.trainable_variables, point, strict=True):
            variable.assign(value)
        for step in (2 * number, 2 * number + 1):
            inner.train_on_batch(x[step * BATCH:(step + 1) * BATCH], y[step * BATCH:(step + 1) * BATCH])
        return [mpistrat.allreduce(before - after, name="by hand") for before, after in
                zip(point, values_of(inner.trainable_variables), strict=True)]

    right = by_hand(values_of(inner.trainable_variables), 3, progress)
    model, watch = model_of(), Watch()
    fit(model, keras.optimizers.SGD(0.1), rank, [hvd.callbacks.DiLoCo(
        2, keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)), watch], steps=6, epochs=1)
    assert_close(values_of(model.trainable_variables), right, 1e-6, rtol=1e-4)
    assert watch.equal()[1::2] == [True] * 3
    assert_equal_on_all_ranks(values_of(model.weights))


@sample("compression", ["int8", "bf16"])
def test_compressed_progress_of_diloco_is_near(compression: str, rank: int, size: int) -> None:
    """Between made-up hosts; on one, int8 changes nothing."""
    def trained(of: str) -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(2048, activation="tanh"),
                                  keras.layers.Dense(2)])  # of more than 16 KiB, and of several blocks
        fit(model, keras.optimizers.SGD(0.05), rank,
            [hvd.callbacks.DiLoCo(2, compression=getattr(hvd.Compression, of))], steps=8)
        assert_equal_on_all_ranks(values_of(model.weights))
        return values_of(model.weights)

    with under(DEFAULT):
        right, on_one = trained("none"), trained(compression)
    with under(TWO_HOSTS if size > 2 else HOST_EACH):
        plain, between = trained("none"), trained(compression)
        kept = hvd.Compression.error_feedback()
    mpistrat.init()
    assert [*kept] == (["local_sgd/progress[0]"] if compression == "int8" else [])
    assert_close(plain, between, 2e-3)
    is_exact = all(np.array_equal(a, b) for a, b in zip(right, on_one, strict=True))
    assert is_exact == (compression == "int8")
    assert not all(np.array_equal(a, b) for a, b in zip(plain, between, strict=True))


KINDS: dict[str, Callable[[], Any]] = {
    "local": lambda: hvd.callbacks.LocalSGD(every=2), "slots": lambda: hvd.callbacks.LocalSGD(3, average_slots=True),
    "diloco": lambda: hvd.callbacks.DiLoCo(2, keras.optimizers.SGD(0.7))}


@pytest.mark.parametrize(("way", "kind"), [
    ("unbuilt", "local"), ("xla", "slots"), ("accumulation", "diloco"), *(pytest.param(
        *repeated, marks=pytest.mark.nightly) for repeated in (
            ("unbuilt", "diloco"), ("executions", "diloco"), ("float16", "slots")))])
def test_the_ranks_end_with_the_same_weights_and_statistics_and_no_warning(
        way: str, kind: str, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """And train: the loss falls. Each way is of what goes together with it."""
    compiled = {"xla": {"jit_compile": True}, "executions": {"steps_per_execution": 2}}.get(way, {})
    optimizer = keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2 if way == "accumulation" else None)
    before = keras.mixed_precision.dtype_policy()
    try:
        keras.mixed_precision.set_dtype_policy("mixed_float16" if way == "float16" else "float32")
        model = model_of("unbuilt" if way == "unbuilt" else "normalised")
        with caplog.at_level(logging.WARNING, logger="mpistrat"):
            history = fit(model, optimizer, rank, [KINDS[kind]()], epochs=4, compiled=compiled,
                          validation_data=rows(99))
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    assert_equal_on_all_ranks(values_of(model.weights))
    losses = mpistrat.allreduce(np.array(history.history["val_loss"]), name="losses")
    assert losses[-1] < losses[0]
    assert not [each for each in caplog.records if each.name.startswith(("mpistrat.keras", "mpistrat.tensorflow"))]


def test_files_and_validation_have_the_average(rank: int, shared_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a file within an epoch, between two averages; whatever comes first among the callbacks."""
    path, model = f"{shared_dir}/{{epoch}}-{{batch}}.weights.h5", model_of("normalised")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    local = hvd.callbacks.LocalSGD(every=3)
    fit(model, keras.optimizers.SGD(0.1), rank, [checkpoint, local, Watch()], epochs=1, validation_data=rows(5))
    mpistrat.barrier()
    other = model_of("normalised")
    for name in ("1-2", "1-4"):
        other.load_weights(f"{shared_dir}/{name}.weights.h5")
        assert_equal_on_all_ranks(values_of(other.weights))
    # The second is of the average after four steps: the same as with that in each file's step.
    again = model_of("normalised")
    fit(again, keras.optimizers.SGD(0.1), rank, [hvd.callbacks.LocalSGD(every=2)], epochs=1, steps=4)
    assert_close(values_of(other.trainable_variables), values_of(again.trainable_variables), 0)


def test_ranks_with_fewer_batches_wait_for_the_others(rank: int, size: int) -> None:
    for local in (hvd.callbacks.LocalSGD(every=2, uneven="join"), hvd.callbacks.DiLoCo(every=2, uneven="join")):
        model = model_of()
        fit(model, keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)), rank, [local],
            steps=3 + 2 * rank)
        assert_equal_on_all_ranks(values_of([*model.weights, *local.variables]))
        assert int(local.variables[0]) == 2 * (3 + 2 * (size - 1))


def test_a_loop_of_ones_own(rank: int) -> None:
    """With a tape that averages in a scope, an eager loop, and an optimizer that the model does not know."""
    apart = mpistrat.ProcessSet([0])
    rest = mpistrat.ProcessSet(range(1, mpistrat.size()))
    sets = [mpistrat.add_process_set(each) for each in (apart, rest)] if mpistrat.size() > 2 else []
    scope = next((each for each in sets if each.included()), None)
    model, optimizer = model_of("normalised"), keras.optimizers.SGD(0.1, momentum=0.9)
    hvd.broadcast_variables(model.weights, 0)
    local = hvd.callbacks.LocalSGD(every=3, average_slots=True, scope=scope)
    with pytest.raises(ValueError, match=r"LocalSGD\.begin\(model\)"):
        local.step()
    optimizer.build(model.trainable_variables)
    local.begin(model, optimizer)
    x, y = rows(rank)
    for step in range(4):
        with DistributedGradientTape(tf.GradientTape(), process_set=scope) if scope else tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[step::4], training=True) - y[step::4]) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        local.step()
        if step == 2:
            assert_equal_on_all_ranks(values_of([*model.weights, *optimizer.variables]))
    local.synchronise()
    assert_equal_on_all_ranks(values_of([*model.weights, *optimizer.variables]))
    for each in sets:
        mpistrat.remove_process_set(each)


def test_gradients_are_averaged_within_a_scope_and_weights_over_all_ranks(rank: int, size: int) -> None:
    """With "hosts" on one host that is the training of a DistributedOptimizer."""
    local = hvd.callbacks.LocalSGD(every=100, scope="hosts")
    models = [model_of(), model_of()]
    fit(models[0], hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=local.process_set), rank, [local])
    fit(models[1], hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), rank)
    assert_close(values_of(models[0].weights), values_of(models[1].weights), 1e-7, rtol=1e-5)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "says"), [
    (lambda: hvd.callbacks.LocalSGD(every=0), r"LocalSGD\(every=\) must be at least 1. Received: 0"),
    (lambda: hvd.callbacks.DiLoCo(every=2.5), r"DiLoCo\(every=\) must be an integer. Received: 2.5"),
    (lambda: hvd.callbacks.LocalSGD(every=2, warmup=-1), r"LocalSGD\(warmup=\)"),
    (lambda: hvd.callbacks.LocalSGD(every=2, scope="host"), "scope must be None, \"hosts\" or a ProcessSet"),
    (lambda: hvd.callbacks.LocalSGD(every=2, uneven="wait"), "uneven must be"),
    (lambda: hvd.callbacks.DiLoCo(2, scope="hosts", uneven="join"), "Leave out one argument"),
    (lambda: hvd.callbacks.DiLoCo(every=2, outer="sgd"), r"DiLoCo\(outer=\) must be a Keras optimizer"),
    (lambda: hvd.callbacks.DiLoCo(2, hvd.DistributedOptimizer(keras.optimizers.SGD())), "must not be distributed"),
    (lambda: hvd.callbacks.DiLoCo(every=2, compression="int8"), "compression must be one of Compression"),
])
def test_arguments_are_checked(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_what_does_not_go_together_is_an_error_on_every_rank(rank: int, size: int) -> None:
    sgd, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)
    local, diloco = hvd.callbacks.LocalSGD(every=2), hvd.callbacks.DiLoCo(every=2)
    everybody = hvd.callbacks.LocalSGD(every=2, scope=mpistrat.global_process_set)
    shared = keras.optimizers.SGD(0.1)
    for optimizer, callbacks, says in [
            (sgd, [local, diloco], "fit has LocalSGD and DiLoCo among its callbacks"),
            (hvd.DistributedOptimizer(adam), [diloco], r"Pass the plain keras\.optimizers\.Adam\(...\) to compile\(\)"),
            (adam, [everybody], "process_set=local.process_set"),
            (shared, [hvd.callbacks.DiLoCo(2, shared)], "is the optimizer of the model too")]:
        with pytest.raises(ValueError, match=says):
            fit(model_of(), optimizer, rank, callbacks)
    with MPIStrategy().scope():
        under_strategy = model_of()
    with pytest.raises(ValueError, match="DiLoCo is for models that are made outside"):
        fit(under_strategy, keras.optimizers.SGD(0.1), rank, [diloco])
    if size > 1:
        with pytest.raises(mpistrat.MismatchError, match=r"in different ways: LocalSGD\(every=2, .*Give all ranks"):
            fit(model_of(), keras.optimizers.SGD(0.1), rank, [hvd.callbacks.LocalSGD(every=2 + rank)])
        sets = [mpistrat.add_process_set([each]) for each in range(size)]
        for scope in (None, sets[rank]):
            optimizer = keras.optimizers.SGD(0.1)
            optimizer = optimizer if scope is None else hvd.DistributedOptimizer(optimizer, process_set=scope)
            averaging = hvd.callbacks.LocalSGD(2, scope=scope)
            with pytest.raises(mpistrat.MismatchError, match=r"in different ways: none on ranks \[0\]; LocalSGD\("):
                fit(model_of(), optimizer, rank, [averaging] if rank else [])
        for each in sets:
            mpistrat.remove_process_set(each)
        model = model_of()
        with pytest.raises(mpistrat.MismatchError, match="in different ways"):
            hvd.callbacks.LocalSGD(every=2, warmup=rank).begin(model)
        model.trainable_variables[0].assign_add(tf.fill(model.trainable_variables[0].shape, float(rank)))
        with pytest.raises(mpistrat.MismatchError, match=r"LocalSGD.begin: the ranks have different weights"):
            hvd.callbacks.LocalSGD(every=2).begin(model)


def test_ranks_that_wait_for_one_without_the_callback_say_so(rank: int, size: int) -> None:
    """Without a broadcast the ranks do not meet when fit begins."""
    if size == 1:
        pytest.skip("nobody waits")
    with under(Leg("deadlock", {"MPISTRAT_DEADLOCK_S": "1"})):
        model = model_of()
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        words = "give this callback to fit on all ranks" if rank else "a deadlock"
        with pytest.raises(mpistrat.DeadlockError, match=words):
            if rank:
                model.fit(*rows(rank), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.LocalSGD(every=2)])
            mpistrat.barrier(name="elsewhere")
    mpistrat.init()


def test_weights_that_were_not_broadcast_are_an_error(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("nothing differs")
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(mpistrat.MismatchError, match="the ranks train different weights"):
        model.fit(*rows(rank), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.LocalSGD(every=100)])
