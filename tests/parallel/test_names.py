"""Names and orders in graphs: what pairs the collectives of different ranks, whatever each rank has built or traced."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd_keras
import mpistrat.tensorflow as hvd
from mpistrat.strategy.keras import step_state

from ..support.levels import sample

LIMIT_S = 60
DELAY_S = 0.03


def delayed(x: tf.Tensor, seconds: tf.Tensor | float) -> tf.Tensor:
    """`x`, after a while. TensorFlow may run other nodes before and meanwhile."""
    def wait(value: np.ndarray, seconds: np.float32) -> np.ndarray:
        time.sleep(float(seconds))
        return value

    later = tf.numpy_function(wait, [x, seconds], x.dtype, stateful=False)
    later.set_shape(x.shape)
    return later


def by_tape(x: tf.Tensor) -> tf.Tensor:
    w = tf.ones_like(x)
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_sum(w * x)
    return hvd.DistributedGradientTape(tape).gradient(loss, w)


def in_threads(work: Callable[[int], Any], names: Iterable[str | None]) -> list[Any]:
    """What `work(number)` returns in a thread of each of these names, or the error that it raises."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), name=name) for number, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [results[number] for number in range(len(threads))]


# -- the order of the program -----------------------------------------------------------------------------------------


@sample("average", [by_tape, hvd.allreduce], ids=["tape", "allreduce"])
def test_collectives_of_a_function_and_of_one_that_it_calls(average: Callable, rank: int, size: int) -> None:
    """The caller's is late on some ranks, and the callee's on the others."""
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return average(delayed(x, DELAY_S * (rank % 2)))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        first = average(delayed(x, DELAY_S * (1 - rank % 2)))
        branch = tf.cond(y[0] > 0, lambda: inner(y), lambda: y)
        return first, branch, average(x * 3.0)

    mean = (size - 1) / 2
    for _ in range(3):
        results = step(tf.fill([2], 1.0 + rank), tf.fill([2], 10.0 + rank))
        assert [r.numpy().tolist() for r in results] == [[1 + mean] * 2, [10 + mean] * 2, [3 + 3 * mean] * 2]


def test_functions_of_one_name_wait_for_each_other(rank: int, size: int) -> None:
    """The callee has the name of its caller, whose collective is in flight when the callee submits its own."""
    def made(inner: Callable | None, factor: float) -> Callable:
        @tf.function
        def call(x: tf.Tensor) -> list[tf.Tensor]:
            mine = hvd.allreduce(factor * x, op=hvd.Sum)
            return [mine, *(inner(x) if inner else [])]
        return call

    outer = made(made(made(None, 100.0), 10.0), 1.0)
    for step in range(3):
        time.sleep(DELAY_S * ((rank + step) % 2))
        total = sum(r + step for r in range(size))
        assert [float(s) for s in outer(tf.constant(float(rank + step)))] == [total, 10 * total, 100 * total]


def test_join_comes_after_the_collectives_of_functions_that_it_follows(rank: int, size: int) -> None:
    @tf.function
    def mean_of_ranks(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(delayed(x, DELAY_S * (1 - rank % 2)), name="mean")

    @tf.function
    def epoch(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean = mean_of_ranks(x)
        return mean, hvd.join()

    for step in range(3):
        mean, last = epoch(tf.constant(10.0 * step + rank))
        assert float(mean) == 10 * step + (size - 1) / 2 and 0 <= int(last) < size


# -- names ------------------------------------------------------------------------------------------------------------


def test_tensors_that_each_rank_makes_in_another_order(rank: int, size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        order = range(4) if rank % 2 else reversed(range(4))
        parts = {number: x * (1.0 + number) for number in order}
        return [hvd.allreduce(parts[number], op=hvd.Sum) for number in range(4)]

    assert [float(each) for each in step(tf.ones([]))] == [size * (1.0 + number) for number in range(4)]


@sample("average", [by_tape, hvd.allreduce], ids=["tape", "allreduce"])
def test_ranks_that_trace_a_function_more_often(average: Callable, rank: int, size: int) -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(average(x))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return inner(tf.reduce_mean(x, 0)) + average(tf.reduce_mean(x, 0))

    if rank == 0:
        inner.get_concrete_function(tf.TensorSpec([2], tf.float32))
    for number in range(4):
        rows = 5 - number if rank == 0 else 5
        assert step(tf.fill([rows, 2], 1.0 + rank)).numpy().tolist() == [size + 1.0] * 2


def test_a_rank_that_has_built_a_model_and_an_optimizer_before(rank: int, size: int) -> None:
    def build() -> tuple[Any, Any]:
        x = keras.Input((3,))
        y = hvd_keras.SyncBatchNormalization(momentum=0.0)(keras.layers.Identity()(x))
        model = keras.Model(x, hvd_keras.SyncBatchNormalization(momentum=0.0)(y))
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(model.trainable_variables)
        return model, optimizer

    if rank == 0:
        build()
    model, optimizer = build()

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) * float(rank))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step(tf.constant(np.random.default_rng(rank).normal(rank, 1.0, (4, 3)), tf.float32))
    rows = np.concatenate([np.random.default_rng(r).normal(r, 1.0, (4, 3)) for r in range(size)])
    np.testing.assert_allclose(model.layers[-2].moving_mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    beta = model.layers[-1].beta.numpy()
    np.testing.assert_allclose(beta, np.full(3, -4 * (size - 1) / 2), rtol=1e-4)


def test_a_rank_that_has_traced_a_function_of_a_strategy_before(rank: int, size: int) -> None:
    strategy = hvd.MPIStrategy()

    @tf.function
    def mean_of_ranks(x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return strategy.run(lambda: mean_of_ranks(x) * 2.0)

    if rank == 0:
        strategy.run(lambda: mean_of_ranks.get_concrete_function(tf.TensorSpec([], tf.float32)))
    assert float(step(tf.constant(1.0 + rank))) == size + 1.0


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_with_names_average_for_themselves(rank: int, size: int) -> None:
    def train(member: int) -> list[float]:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            return by_tape(x)

        results = []
        for number in range(5):
            time.sleep(DELAY_S / 3 * ((member + rank + number) % 2))
            results += [float(step(tf.constant(10.0 * member + rank))), float(hvd.allreduce(tf.constant(1.0 + member)))]
        return results

    expected = [[10.0 * member + (size - 1) / 2, 1.0 + member] * 5 for member in range(2)]
    assert in_threads(train, ["first member", "second member"]) == expected


@sample("eager", [False, True], ids=["graph", "eager"])
def test_threads_that_the_ranks_cannot_tell_apart_are_refused(eager: bool, rank: int,
                                                              restart: Callable[[], None]) -> None:
    together = threading.Barrier(2)

    def train(_: int) -> None:
        together.wait(LIMIT_S)
        try:
            (by_tape if eager else tf.function(by_tape))(tf.constant(1.0))
        finally:
            together.wait(LIMIT_S)

    for error in in_threads(train, [None, None]):
        assert "cannot tell the two apart" in str(error), error  # AutoGraph puts the text into an error of its own.
    restart()


def test_a_thread_that_is_alone_does_not_wait_for_two_that_another_rank_refuses(rank: int, size: int,
                                                                                restart: Callable[[], None]) -> None:
    together = threading.Barrier(2)

    def train(_: int) -> None:
        if rank == 0:  # Its second thread would come when the first has ended.
            hvd.allreduce(tf.constant(1.0))
            return
        together.wait(LIMIT_S)
        try:
            hvd.allreduce(tf.constant(1.0))
        finally:
            together.wait(LIMIT_S)

    for error in in_threads(train, [None] if rank == 0 else [None, None]):
        assert "are both alive on rank" in str(error), error
    restart()


def test_threads_without_names_may_have_process_sets_or_optimizers_of_their_own(rank: int, size: int) -> None:
    sets = [mpistrat.add_process_set([r]) for r in range(size)]
    optimizers = [hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]

    def train(member: int) -> float:
        v = keras.Variable(0.0)
        time.sleep(DELAY_S * ((member + rank) % 2))
        optimizers[member].apply([tf.constant(10.0 * member + rank)], [v])
        return float(v.numpy()) if member else float(hvd.allreduce(v.value, process_set=sets[rank]))

    mean = (size - 1) / 2
    assert in_threads(train, [None, None]) == [-mean, -10.0 - mean]
    for each in sets:
        mpistrat.remove_process_set(each)


@sample("names", [["fit 1", "fit 2"], [None, None]], ids=["names", "no names"])
def test_two_fits_in_two_threads(names: list[str | None], rank: int, size: int) -> None:
    models, seen = [], {}
    together = threading.Barrier(2)
    for _ in range(2):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        models.append(model)

    def losses_of(member: int, whose: str) -> Any:
        return keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.update({(member, whose): logs["loss"]}))

    def fit(member: int) -> None:
        together.wait(LIMIT_S)
        try:
            x = np.full((4, 2), 1.0 + rank + member, "float32")
            models[member].fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[
                hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), losses_of(member, "own"),
                hvd_keras.callbacks.MetricAverageCallback(), losses_of(member, "mean"),
                hvd_keras.callbacks.Throughput()])
        finally:
            together.wait(LIMIT_S)

    assert in_threads(fit, names) == [None, None]
    for member in range(2):
        losses = [(1.0 + r + member) ** 2 for r in range(size)]
        assert (seen[member, "own"], seen[member, "mean"]) == (losses[rank], pytest.approx(np.mean(losses)))


def named_step(factor: float) -> Callable:
    """A function with the name of all others that this makes."""
    @tf.function
    def step(x: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(delayed(factor * x, seconds)) + by_tape(x)
    return step


def test_threads_run_functions_of_one_name_that_the_main_thread_has_traced(rank: int, size: int) -> None:
    steps = [named_step(10.0), named_step(100.0)]
    if rank:
        for step in steps:
            step.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([]))

    def train(member: int) -> list[float]:
        return [float(steps[member](tf.constant(1.0 + rank), tf.constant(DELAY_S * ((member + rank + number) % 2))))
                for number in range(5)]

    mean = (size + 1) / 2
    assert in_threads(train, ["first member", "second member"]) == [[11.0 * mean] * 5, [101.0 * mean] * 5]


def test_a_function_that_each_rank_has_traced_in_another_thread(rank: int, size: int) -> None:
    step = named_step(1.0)
    spec = tf.TensorSpec([])
    if rank:
        step.get_concrete_function(spec, spec)
    else:
        assert in_threads(lambda _: step.get_concrete_function(spec, spec) is None, ["tracer"]) == [False]
    assert float(step(tf.constant(1.0 + rank), tf.constant(0.0))) == size + 1.0
    found = in_threads(lambda _: float(step(tf.constant(1.0 + rank), tf.constant(0.0))), [None])
    assert found == [size + 1.0]


def test_one_function_in_two_threads_at_once_is_refused(rank: int, restart: Callable[[], None]) -> None:
    step = named_step(1.0)
    together = threading.Barrier(2)

    def train(_: int) -> None:
        together.wait(LIMIT_S)
        for _ in range(100):
            step(tf.constant(1.0), tf.constant(DELAY_S))

    for error in in_threads(train, ["first member", "second member"]):
        assert "two threads run one graph with this collective at the same time" in str(error), error
        assert "The ranks cannot tell the two apart" in str(error) and "test_names.py" in str(error), error
    restart()


@pytest.mark.nightly
def test_fits_of_a_strategy_in_two_threads_do_not_share_the_rows_of_a_batch(
        rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = hvd.MPIStrategy()
    assign, together = step_state.Flags.assign, threading.Barrier(2)
    x = np.random.default_rng(5).standard_normal((24 * size, 2)).astype("float32")

    def fitted(batch: int, wait: Callable[[], Any]) -> np.ndarray:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: wait())
        model.fit(x[:-1], x[:-1, :1], batch_size=batch, shuffle=False, verbose=0, callbacks=[begin])
        return model.layers[0].kernel.numpy()

    def late(flags: step_state.Flags, name: str, value: Any) -> None:
        """Another thread is late on each rank."""
        if name == "usual_rows":
            time.sleep(0.2 * ((value > 6) == bool(rank % 2)))
        assign(flags, name, value)

    batches = [12 * size, 3 * size]
    alone = [fitted(batch, lambda: None) for batch in batches]
    monkeypatch.setattr(step_state.Flags, "assign", late)
    both = in_threads(lambda number: fitted(batches[number], lambda: together.wait(LIMIT_S)), ["large", "small"])
    np.testing.assert_array_equal(both, alone)
