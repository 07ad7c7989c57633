"""evaluate and predict on a rank without rows: the model gets one row of zeros, which is removed from the outputs.

A global batch with fewer rows than ranks leaves some ranks without rows, and so does the end of a rank's data. These
ranks take part in the collectives of the step. But TensorFlow fails for some models without rows, in one process too
(the constants that grappler folds have one row: "Incompatible shapes: [1,1,1,32] vs. [0,64,64,3]" in EfficientNet), and
the other ranks would wait. Training gets no row of zeros, since the row would count: layers may take the mean over the
rows of all ranks.

The functions run in a replica, while TensorFlow traces the step.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ...keras.bridge.measures import rows_of
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import TensorFlowTrainer, all_layers
from ...tensorflow.xla import context as xla
from .step_state import state, strategy_of


@contextlib.contextmanager
def never_called_without_rows(model: keras.Model, data: object) -> Iterator[None]:
    """A context for tracing a step of `model` on `data`."""
    strategy, before = strategy_of(model), state.called
    # XLA compiles a function for each number of rows, and does not fold in this way.
    is_needed = strategy is not None and strategy.num_replicas_in_sync > 1 and not xla.is_compiled()
    state.called = (model, is_empty) if is_needed and (is_empty := _is_empty(data)) is not None else None
    try:
        yield
    finally:
        state.called = before


def _is_empty(data: object) -> tf.Tensor | None:
    """Return whether a batch has no rows: a constant True if the shape has none, None if it has some."""
    known = {leaf.shape[0] for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor) and leaf.shape.rank}
    if 0 in known:
        return tf.constant(True)
    rows = rows_of(data) if not known or None in known else None
    return None if rows is None else rows == 0


@replaces(TensorFlowTrainer, "predict_step", "a model of which TensorFlow fails without rows would fail",
          "y_pred = self(x, training=False)")
def predict_step(original: Function, self: keras.Model, data: object) -> object:
    with never_called_without_rows(self, data):
        return original(self, data)


@replaces(keras.Model, "__call__", "likewise", "super().__call__(*args, **kwargs)")
def call(original: Function, self: keras.Model, *args: object, **kwargs: object) -> Any:
    if state.called is None or state.called[0] is not self:
        return original(self, *args, **kwargs)
    is_empty = state.called[1]
    args, kwargs = keras.tree.map_structure(lambda value: _with_rows(value, is_empty), (args, kwargs))
    counted = [v for layer in (self, *all_layers(self)) for metric in layer._metrics for v in metric.variables]
    before = [tf.identity(v.value) for v in counted]
    outputs = original(self, *args, **kwargs)
    for variable, value in zip(counted, before, strict=True):
        variable.assign(tf.where(is_empty, value, variable.value))
    return keras.tree.map_structure(lambda value: _without_rows(value, is_empty), outputs)


def _with_rows(value: tf.Tensor, is_empty: tf.Tensor) -> Any:
    if not _may_be_empty(value):
        return value

    def zeros() -> tf.Tensor:
        # Sizes of a row that the spec of the input does not give are unknown here.
        return tf.zeros(tf.concat([[1], tf.maximum(tf.shape(value)[1:], 1)], 0), value.dtype)

    return _either(is_empty, zeros, value)


def _without_rows(value: tf.Tensor, is_empty: tf.Tensor) -> Any:
    is_known = tf.get_static_value(is_empty)  # Then the model had one row, by the shape too.
    if not (_may_be_empty(value) or (is_known and isinstance(value, tf.Tensor) and value.shape.rank)):
        return value
    result = _either(is_empty, lambda: value[:0], value)
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        result._keras_mask = _without_rows(mask, is_empty)
    return result


def _may_be_empty(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0 and (
        value.shape.rank is None or not value.shape[0])


def _either(is_empty: tf.Tensor, other: Function, value: tf.Tensor) -> tf.Tensor:
    if tf.get_static_value(is_empty):  # The shape keeps 0 rows, which Keras' losses use.
        return other()
    result = tf.cond(is_empty, other, lambda: tf.identity(value))
    if value.shape.rank is not None:
        result.set_shape([None, *value.shape[1:]])
    return result
