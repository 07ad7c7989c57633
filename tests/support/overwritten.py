"""A layer with a weight that its "gradient" overwrites. Import it after `pytest.importorskip("keras")`."""

from typing import Any

import keras
import tensorflow as tf


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
