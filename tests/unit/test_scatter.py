"""Keras' optimizers add rows of slices that repeat in one order."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
pytest.importorskip("mpistrat.keras")

from mpistrat.keras.bridge import patches  # noqa: E402

SHAPE, REPEATS = (3, 2), 5
OPTIMIZERS = {
    **{name: getattr(keras.optimizers, name) for name in (
        "SGD", "Adagrad", "Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop")},
    **{name: getattr(keras.optimizers, name) for name in ("Lamb", "Muon", "ScheduleFreeAdamW")
       if hasattr(keras.optimizers, name)},  # not in Keras 3.0
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
    "clipped": lambda: keras.optimizers.SGD(global_clipnorm=0.1),
    "accumulated": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    "moving average": lambda: keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad()),
}


def repeated(dtype: str = "float32") -> tf.IndexedSlices:
    """Rows of which the second is never given, and the others many times; their sums depend on the order."""
    values = np.random.default_rng(5).normal(size=(2 * REPEATS, 2)) * 3.0 ** np.arange(2 * REPEATS)[:, None]
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant([2, 0] * REPEATS), tf.constant(SHAPE))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_adds_rows_in_several_threads(name: str) -> None:
    patches.apply()
    optimizer, variable = OPTIMIZERS[name](), keras.Variable(np.ones(SHAPE, "float32"))
    optimizer.build([variable])

    @tf.function
    def step() -> None:
        optimizer.apply([repeated()], [variable])

    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [node.op for part in (graph.node, *(function.node_def for function in graph.library.function))
             for node in part]
    assert not {"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"} & set(nodes)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_are_added_one_after_the_other(sign: int, dtype: str) -> None:
    patches.apply()
    slices, optimizer = repeated(dtype), keras.optimizers.SGD()
    variable = keras.Variable(np.ones(SHAPE), dtype=dtype)
    expected = np.ones(SHAPE, dtype)
    (optimizer.assign_add if sign > 0 else optimizer.assign_sub)(variable, slices)
    for row, value in zip(slices.indices.numpy(), slices.values.numpy(), strict=True):
        expected[row] += np.asarray(sign * value, dtype)
    np.testing.assert_array_equal(variable.numpy(), expected)


def test_rows_are_summed_before_they_are_added_where_that_has_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.apply()
    given: list[int] = []
    scatter_add = tf.raw_ops.ResourceScatterNdAdd
    monkeypatch.setattr("mpistrat.keras.optimizers.optimizer._adds_atomically", lambda resource: True)
    monkeypatch.setattr(tf.raw_ops, "ResourceScatterNdAdd", lambda **inputs: (
        given.append(inputs["updates"].shape[0]), scatter_add(**inputs)))
    slices, variable = repeated(), keras.Variable(np.ones(SHAPE, "float32"))
    keras.optimizers.SGD().assign_add(variable, slices)
    assert given == [2]
    np.testing.assert_allclose(variable.numpy(), 1 + tf.convert_to_tensor(slices).numpy(), rtol=1e-6)


@pytest.mark.parametrize(("slices", "expected"), [
    (([[1.0, 2.0], [3.0, 4.0]], (2, 0), SHAPE), [[-2, -3], [1, 1], [0, -1]]),
    ((np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.array(SHAPE)), np.ones(SHAPE))], ids=["lists", "no row"])
def test_slices_may_be_made_of_tuples_and_lists_and_have_no_row(slices: Any, expected: Any) -> None:
    patches.apply()
    variable = keras.Variable(np.ones(SHAPE, "float32"))
    keras.optimizers.SGD().assign_sub(variable, tf.IndexedSlices(*slices))
    np.testing.assert_array_equal(variable.numpy(), expected)
