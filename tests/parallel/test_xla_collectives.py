"""Collectives in functions that XLA compiles: the same bits as outside of XLA, in program order, and their errors."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

import mpistrat.keras as khvd
import mpistrat.tensorflow as hvd
from mpistrat.api import runtime
from mpistrat.core import signal_handlers
from mpistrat.tensorflow import MPIStrategy
from mpistrat.tensorflow.graph import xla_collective
from mpistrat.tensorflow.xla import context, custom_call, ffi

from ..support.levels import sample
from .helpers import assert_close, assert_equal_on_all_ranks, in_graph

pytestmark = pytest.mark.skipif(ffi.api() is None, reason="this TensorFlow does not export XLA's FFI")


def by_xla(function: Callable) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


def nested(function: Callable) -> Any:
    inner = by_xla(function)
    return tf.function(lambda *inputs: inner(*inputs), autograph=False)


def numbers(shape: list[int], rank: int, seed: int = 0) -> Any:
    return tf.random.stateless_normal(shape, [rank, seed])


def slices_of(x: Any) -> Any:
    return hvd.allreduce(tf.IndexedSlices(x, tf.range(4), tf.constant([9, 3])), op=hvd.Sum).values


COLLECTIVES = {
    "average": hvd.allreduce, "max": lambda x: hvd.allreduce(x, op=hvd.Max),
    "adasum": lambda x: hvd.allreduce(x, op=hvd.Adasum),
    "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3, postscale_factor=1.7),
    "float16": lambda x: tf.cast(hvd.allreduce(tf.cast(x, tf.float16)), tf.float32),
    "bfloat16": lambda x: tf.cast(hvd.allreduce(tf.cast(x, tf.bfloat16)), tf.float32),
    "compressed": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "integers": lambda x: hvd.allreduce(tf.cast(10 * x, tf.int64), op=hvd.Sum),
    "booleans": lambda x: hvd.allreduce(x > 0, op=hvd.Min),
    "complex": lambda x: tf.math.real(hvd.allreduce(tf.complex(x, 2 * x))),
    "scalar": lambda x: hvd.allreduce(x[0, 0]), "empty": lambda x: hvd.allreduce(x[:0]),
    "transposed": lambda x: hvd.allreduce(tf.transpose(x)),
    "group": lambda x: hvd.grouped_allreduce([x, x[0], tf.cast(x, tf.float64)]), "slices": slices_of,
    "gather": hvd.allgather, "group of gathers": lambda x: hvd.grouped_allgather([x, x[:, 0]]),
    "broadcast": lambda x: hvd.broadcast(x, 1), "scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "scatter unevenly": lambda x: hvd.reducescatter(tf.concat([x, x[:1]], 0)),
}


def every_collective(x: Any) -> dict[str, list[Any]]:
    """By name its results: one function, since XLA takes long to compile each."""
    return {name: tf.nest.flatten(collective(x)) for name, collective in COLLECTIVES.items()}


@pytest.mark.horovod("xla")
def test_the_bits_are_those_of_a_function_without_xla(rank: int) -> None:
    compiled, plain = (way(every_collective)(numbers([4, 3], rank)) for way in (by_xla, in_graph))
    for name, results in compiled.items():
        for mine, other in zip(results, plain[name], strict=True):
            assert mine.dtype == other.dtype and mine.shape == other.shape, name
            np.testing.assert_array_equal(mine, other, err_msg=name)


@pytest.mark.parametrize("where", ["tape inside", "tape outside"])
def test_gradients(where: str, rank: int) -> None:
    def loss(x: Any) -> Any:
        """With another weight for each collective."""
        return tf.add_n([weight * tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for weight, name in enumerate(
            ["average", "group", "gather", "broadcast", "scatter unevenly"], start=1)
            for each in tf.nest.flatten(COLLECTIVES[name](x))])

    def gradient(way: Callable) -> Any:
        def inside(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x)
            return tape.gradient(value, x)

        if where == "tape inside":
            return way(inside)(numbers([4, 3], rank))
        x, function = numbers([4, 3], rank), way(loss)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = function(x) + function(2.0 * x)  # Two executions of one gradient.
        return tape.gradient(total, x)

    for way in (by_xla, nested):
        np.testing.assert_allclose(gradient(way), gradient(in_graph), rtol=1e-5, atol=1e-5)


def test_extents_that_are_not_known_while_tracing(rank: int, size: int) -> None:
    function = tf.function(lambda x: [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0)], jit_compile=True,
                           autograph=False, input_signature=[tf.TensorSpec([None, 2])])
    for rows in (3, 5):
        mean, gathered, first = function(tf.fill([rows, 2], float(rank)))
        np.testing.assert_array_equal(mean, np.full((rows, 2), (size - 1) / 2))
        np.testing.assert_array_equal(gathered[:, 0], np.repeat(np.arange(size), rows))
        np.testing.assert_array_equal(first, np.zeros((rows, 2)))
    assert function.experimental_get_tracing_count() == 1


# -- order ------------------------------------------------------------------------------------------------------------


def test_collectives_that_do_not_depend_on_each_other_run_in_program_order(
        monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Also where XLA computes in several threads, and in branches, loops and inner functions."""
    names: list[str] = []
    execute = xla_collective._CompiledCallSite.execute

    def noting(self: Any, call: Any) -> None:
        names.append(self.name.rsplit("/", 1)[-1])
        time.sleep(0.001 * ((len(names) + rank) % 3))
        execute(self, call)

    monkeypatch.setattr(xla_collective._CompiledCallSite, "execute", noting)

    def total(x: Any, name: str) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name=name)

    @by_xla
    def step(x: Any) -> Any:
        inner = tf.function(lambda y: total(y @ y, "inner"), autograph=False)
        parts = [total((x * k) @ x, f"part{k}") for k in range(6)]
        parts.append(tf.cond(x[0, 0] > 0, lambda: total(x, "branch"), lambda: x))
        parts.append(tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, total(y, "loop")), [0, x])[1])
        return tf.add_n([*parts, inner(x), total(x @ x, "last")])

    step(tf.ones([200, 200]))
    names.clear()
    for _ in range(3):
        value = step(tf.ones([200, 200]))
    assert names == 3 * [*(f"part{k}" for k in range(6)), "branch", *["loop"] * 3, "inner", "last"]
    assert value[0, 0] == 200 * size * sum(range(6)) + size + size ** 3 + 2 * 200 * size


def test_functions_in_threads_in_another_order_on_each_rank(rank: int, size: int) -> None:
    results: dict[int, float] = {}

    def run(number: int) -> None:
        @by_xla
        def step(x: Any) -> Any:
            for k in range(3):
                x = hvd.allreduce(x @ x / 8.0, op=hvd.Sum, name=f"thread{number}.{k}") / size
            return x

        time.sleep(0.02 * ((number + rank) % 3))
        results[number] = float(step(tf.ones([8, 8]))[0, 0])

    threads = [threading.Thread(target=run, args=(number,), name=f"of {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == dict.fromkeys(range(3), 1.0)


def test_it_meets_ordinary_collectives_in_one_program(size: int) -> None:
    inner = by_xla(lambda x: hvd.allreduce(x, op=hvd.Sum))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        first = hvd.allreduce(x, op=hvd.Sum)
        return first + inner(x) + inner(x + 1) + hvd.allreduce(x, op=hvd.Max)

    for _ in range(3):
        assert step(tf.constant(1.0)) == size + size + 2 * size + 1


# -- training ---------------------------------------------------------------------------------------------------------


def new_model(batch_norm: Any) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input([6]), keras.layers.Embedding(9, 4), keras.layers.Flatten(),
                             keras.layers.Dense(8), batch_norm(), keras.layers.Dense(1)])


def data(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.integers(0, 9, (rows, 6))
    return x, x.sum(1, keepdims=True) / 20.0


@pytest.mark.filterwarnings("error:jit_compile")
@pytest.mark.parametrize("door", ["optimizer", "strategy"])
def test_fit(door: str, rank: int, size: int) -> None:
    """Keras runs the compiled step in an ordinary function. The last batch has fewer rows."""
    weights = []
    for jit_compile in (False, True):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0)
        if door == "optimizer":
            model = new_model(khvd.SyncBatchNormalization)
            model.compile(khvd.DistributedOptimizer(optimizer), "mse", jit_compile=jit_compile)
            model.fit(*data(22, rank), batch_size=8, verbose=0)
        else:
            with MPIStrategy().scope():
                model = new_model(keras.layers.BatchNormalization)
                model.compile(optimizer, "mse", jit_compile=jit_compile)
            model.fit(*data(10 * size, 0), batch_size=4 * size, verbose=0)
        assert model.jit_compile == jit_compile
        assert_equal_on_all_ranks(model.get_weights())
        weights.append(model.get_weights())
    assert_close(*weights, rtol=1e-4)


# -- errors -----------------------------------------------------------------------------------------------------------


@sample("way", [by_xla, nested])
def test_ranks_that_disagree_get_the_error_of_the_step(way: Callable, rank: int, restart: Callable[[], None]) -> None:
    function = way(lambda x: hvd.allreduce(x, name="sum"))
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"sum: the ranks disagree on shape: \(2,\) on ranks"):
        function(tf.ones([2 + min(rank, 1)]))
    restart()
    np.testing.assert_array_equal(function(tf.ones([2])), [1.0, 1.0])


def test_rows_that_differ_are_an_error_of_a_gather(rank: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="must pass the same number of rows to a collective"):
        by_xla(hvd.allgather)(tf.ones([5 if rank else 3]))


def test_what_xla_cannot_compile_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"XLA must know the shape of the result .* Leave jit_compile out"):
        by_xla(hvd.alltoall)(tf.ones([2 * size]))


@pytest.mark.horovod("xla")
@sample("name", ["average", "group", "gather", "broadcast"])
def test_without_the_custom_call_it_says_what_to_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "why_not", lambda: "there is none")
    for function in (by_xla(COLLECTIVES[name]), by_xla(in_graph(COLLECTIVES[name]))):
        with pytest.raises(ValueError, match=r"cannot be compiled by XLA\. Write model\.compile\(.*jit_compile=False\)"
                                             r".*\(There is none\.\)"):
            function(tf.ones([4, 3]))


def test_keras_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "why_not", lambda: "there is none")
    model = new_model(keras.layers.BatchNormalization)
    model.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    with pytest.raises(ValueError, match=r"cannot be compiled by XLA\. Write model\.compile\(.*, jit_compile=False\)"):
        model.fit(*data(8, 0), verbose=0)


def test_an_exception_in_the_handler_is_the_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    function = by_xla(lambda x: hvd.allreduce(x))
    monkeypatch.setattr(xla_collective._CompiledCallSite, "execute", lambda self, call: 1 // 0)
    with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError: integer division or modulo by zero"):
        function(tf.ones([2]))


def test_ctrl_c_ends_a_collective_that_waits(rank: int, size: int, restart: Callable[[], None]) -> None:
    def interrupt() -> None:
        while not runtime.current().world.traced.in_flight():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    assert not signal_handlers.are_installed()  # With handlers of the script the error comes when it is complete.
    function = by_xla(lambda x: hvd.allreduce(x, name="interrupted"))
    function(tf.ones([2]))
    if rank == 0:
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            function(tf.ones([2]))
        interrupter.join()
        for other in range(1, size):
            MPI.COMM_WORLD.send(None, other)
    else:
        MPI.COMM_WORLD.recv(source=0)  # The collective of rank 0 must not be complete when the signal comes.
        with pytest.raises(tf.errors.UnknownError, match=r"KeyboardInterrupt|Ctrl-C interrupted the collective"):
            for _ in range(2):  # The first is complete here if rank 0 had given its tensor before the signal came.
                function(tf.ones([2]))
    restart()
    np.testing.assert_array_equal(function(tf.ones([2])), [1.0, 1.0])


class _StopError(Exception):
    """Raised by a signal handler."""


def test_what_a_signal_handler_raises_comes_when_the_collective_is_complete(rank: int, size: int) -> None:
    def stop(*_: object) -> None:
        raise _StopError

    function = by_xla(lambda x: hvd.allreduce(x, op=hvd.Sum))
    function(tf.ones([2]))
    before = signal.signal(signal.SIGALRM, stop)
    try:
        time.sleep(0.2)  # until the engine has seen that there is a handler
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(_StopError):
                function(tf.ones([2]))
        else:
            time.sleep(0.6)
            function(tf.ones([2]))
    finally:
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(function(tf.ones([2])), [size, size])


# -- lifetime ---------------------------------------------------------------------------------------------------------


def test_a_compiled_graph_is_freed_with_its_function() -> None:
    def freed() -> "weakref.ref[Any]":
        @by_xla
        def step(x: Any) -> Any:
            return tf.cond(x[0] > 0, lambda: hvd.allreduce(x), lambda: x) + hvd.allreduce(x)

        x = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = step(x)
        tape.gradient(value, x)
        return weakref.ref(step.get_concrete_function(x).graph)

    graph = freed()
    gc.collect()
    assert graph() is None


def test_the_targets_end_with_the_graphs() -> None:
    gc.collect()
    before = len(custom_call._targets)
    by_xla(lambda x: hvd.allreduce(x))(tf.ones([2]))
    gc.collect()
    assert len(custom_call._targets) == before
