"""Nodes of a graph that call Python with arrays."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.core.memory import aligned_empty  # noqa: E402
from mpistrat.tensorflow.bridge.python_op import host_call  # noqa: E402


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int64", "bool",
                                   "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("stateful", [True, False])
def test_arrays_go_in_and_come_out(dtype: str, shape: tuple[int, ...], stateful: bool) -> None:
    value = tf.cast(tf.ones(shape), dtype)

    @tf.function
    def program(x: Any) -> list[Any]:
        return host_call(lambda a, b: [b, a], [x, tf.constant(7, tf.int64)], [tf.int64, x.dtype], stateful)

    seven, same = program(value)
    assert (seven.numpy(), same.dtype, same.shape) == (7, value.dtype, value.shape)
    np.testing.assert_array_equal(same.numpy(), value.numpy())


def test_aligned_memory_is_not_copied() -> None:
    made = aligned_empty(4000).view(np.float32)
    seen = []

    def look(array: np.ndarray) -> list[np.ndarray]:
        seen.append(array.ctypes.data)
        return [array]

    @tf.function
    def program() -> Any:
        made_here, = host_call(lambda: [made], [], [tf.float32], True)
        return host_call(look, [made_here], [tf.float32], True)

    program()
    assert seen == [made.ctypes.data]


def test_a_stateful_call_is_made_once_and_in_order_though_nobody_uses_its_results() -> None:
    calls: list[int] = []

    def call(number: int) -> None:
        host_call(lambda: [np.array(calls.append(number) or 0)], [], [tf.int64], True)

    @tf.function
    def program() -> None:
        for number in range(5):
            call(number)

    program()
    program()
    assert calls == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("error, expected", [(ValueError("no such place"), tf.errors.InvalidArgumentError),
                                             (RuntimeError("no such place"), tf.errors.UnknownError)])
def test_what_is_raised_is_an_error_of_tensorflow(error: Exception, expected: type[Exception]) -> None:
    def fail(_: np.ndarray) -> list[np.ndarray]:
        raise error

    program = tf.function(lambda: host_call(fail, [tf.constant(1.0)], [tf.float32], True))
    with pytest.raises(expected, match="no such place"):
        program()


# -- how long a function lives ----------------------------------------------------------------------------------------


traced = partial(tf.function, autograph=False)  # AutoGraph keeps what it has seen.


class _Doubling:
    """A function whose life can be watched."""

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(2 * x)]


class _Watched:
    """Makes nodes that double, each with a function of its own."""

    def __init__(self) -> None:
        self.functions: list[weakref.ref] = []

    def double(self, x: Any) -> Any:
        function = _Doubling()
        self.functions.append(weakref.ref(function))
        result, = host_call(function, [x], [tf.float32], True)
        result.set_shape(x.shape)
        return result

    def doubles_gradients(self, x: Any) -> Any:
        return tf.custom_gradient(lambda x: (tf.identity(x), self.double))(x)

    def alive(self) -> int:
        gc.collect()
        return sum(function() is not None for function in self.functions)


X = np.ones(3, np.float32)


def concrete(w: _Watched) -> Callable[[], Any]:
    function = traced(lambda x: tf.cond(x[0] > 0.0, lambda: w.double(x), lambda: x))
    it = function.get_concrete_function(tf.TensorSpec([3]))
    return lambda: it(tf.constant(X))


def called_by_another(w: _Watched) -> Callable[[], Any]:
    inner = traced(w.double)
    outer = traced(lambda x: inner(x))
    outer(X)
    return lambda: outer(X)


def called_in_a_loop(w: _Watched) -> Callable[[], Any]:
    inner = traced(w.double)
    outer = traced(lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, inner(y)), [0, x])[1])
    outer(X)
    return lambda: outer(X)


def called_by_a_copy(w: _Watched) -> Callable[[], Any]:
    inner = traced(lambda x: tf.cond(x[0] > 0.0, lambda: w.double(x), lambda: x))
    first, second = traced(lambda x: inner(x)), traced(lambda x: inner(x))
    first(X)
    return lambda: second(X)


def of_a_method(w: _Watched) -> Callable[[], Any]:
    class Module(tf.Module):
        @traced
        def double(self, x: Any) -> Any:
            return w.double(x)

    it = Module().double.get_concrete_function(tf.TensorSpec([3]))
    return lambda: it(tf.constant(X))


def in_a_dataset(w: _Watched) -> Callable[[], Any]:
    iterator = iter(tf.data.Dataset.from_tensors(X).repeat(10).map(w.double).prefetch(1))
    return lambda: next(iterator)


def in_a_map(w: _Watched) -> Callable[[], Any]:
    function = traced(lambda x: tf.map_fn(w.double, x[tf.newaxis])[0])
    function(X)
    return lambda: function(X)


@pytest.mark.parametrize("make", [concrete, called_by_another, called_in_a_loop, called_by_a_copy, of_a_method,
                                  in_a_dataset, in_a_map])
def test_a_function_lives_as_long_as_something_can_run_it(make: Callable) -> None:
    watched = _Watched()
    run = make(watched)
    for _ in range(2):
        assert watched.alive() > 0
        np.testing.assert_array_equal(run(), 2 * X)
    del run
    assert watched.alive() == 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_gradient_keeps_its_function(nested: bool) -> None:
    watched, x = _Watched(), tf.constant(X)

    def call() -> Any:
        function = traced(lambda x: tf.cond(x[0] > 0.0, lambda: watched.doubles_gradients(x), lambda: x))
        return traced(lambda x: function(x))(x) if nested else function(x)

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call()
    gc.collect()
    np.testing.assert_array_equal(tape.gradient(y, x), 2 * X)


def test_a_function_lives_until_an_asynchronous_execution_is_over() -> None:
    began, go_on = threading.Event(), threading.Event()
    watched = _Watched()

    def hold(x: np.ndarray) -> list[np.ndarray]:
        began.set()
        go_on.wait(60)
        return [x]

    def program(x: Any) -> Any:
        held, = host_call(hold, [x], [tf.float32], True)
        held.set_shape([3])
        return watched.double(held)

    tf.config.experimental.set_synchronous_execution(False)
    try:
        result = traced(program)(tf.constant(X))
        assert began.wait(60)
        gc.collect()
        go_on.set()
        np.testing.assert_array_equal(result.numpy(), 2 * X)
    finally:
        go_on.set()
        tf.config.experimental.set_synchronous_execution(True)
