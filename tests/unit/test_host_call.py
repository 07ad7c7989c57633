"""Nodes of a graph that call Python with arrays."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.memory import aligned_empty  # noqa: E402
from mpistrat.tensorflow.host_call import host_call  # noqa: E402


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


@pytest.mark.parametrize("consume", [
    lambda x: x * 2.0, lambda x: tf.nn.relu(-x), lambda x: tf.add_n([x, x]), lambda x: tf.clip_by_value(x, 5.0, 6.0),
    lambda x: tf.reshape(x, [2, -1]) * 2.0, lambda x: tf.split(x, 2)[0] * 2.0, lambda x: tf.identity(x) * 2.0,
    lambda x: tf.cond(x[0] > 0.0, lambda: x * 2.0, lambda: x),
    lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), [0, x])[1],
    lambda x: tf.linalg.set_diag(tf.reshape(x, [100, 200]), tf.zeros([100])),
    lambda x: tf.tensor_scatter_nd_update(x, [[0]], [9.0]), lambda x: tf.sort(x, direction="DESCENDING") * 2.0])
def test_memory_that_tensorflow_is_given_is_not_written_to(consume: Any) -> None:
    """Other ranks read it too, see collectives/shared_results.py."""
    made = aligned_empty(80_000).view(np.float32)
    made[...] = 1.0

    @tf.function
    def program() -> Any:
        x, = host_call(lambda: [made], [], [tf.float32], True)
        x.set_shape([20_000])
        return consume(x)

    program()
    assert (made == 1.0).all()


def test_memory_that_a_variable_is_given_is_not_written_to() -> None:
    made = aligned_empty(80_000).view(np.float32)
    made[...] = 1.0
    variable = tf.Variable(tf.zeros([20_000]))

    @tf.function
    def program() -> None:
        x, = host_call(lambda: [made], [], [tf.float32], True)
        x.set_shape([20_000])
        variable.assign(x)
        variable.assign_add(x)
        variable.assign(x)
        variable.scatter_nd_update([[0]], [9.0])
        variable[1:3].assign([9.0, 9.0])

    program()
    variable.assign_sub(variable * 0.5)
    np.testing.assert_array_equal(variable.numpy()[:4], [4.5, 4.5, 4.5, 0.5])
    assert (made == 1.0).all()
