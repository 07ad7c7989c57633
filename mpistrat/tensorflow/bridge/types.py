"""Types for annotations. mypy can check only few of them, since TensorFlow and Keras have no type information."""

from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

# What a collective on one tensor returns.
Tensor: TypeAlias = tf.Tensor | tf.IndexedSlices
# What tf.convert_to_tensor accepts.
TensorLike: TypeAlias = tf.types.experimental.TensorLike
Reducible: TypeAlias = TensorLike | tf.IndexedSlices
# None stands for a variable that the loss does not depend on.
OptionalGradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
# A tensor or a nested structure of tensors, as tf.nest has it.
Structure = TypeVar("Structure")
# The result of a callback that runs outside of TensorFlow.
Arrays = list[np.ndarray]


class Variable(Protocol):
    """A tf.Variable or a Keras variable."""

    name: str
    dtype: tf.DType
    shape: tf.TensorShape

    def assign(self, value: TensorLike) -> object:
        """Overwrite the value."""
