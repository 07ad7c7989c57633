"""Private methods of tf.data's datasets."""

from typing import Any

import tensorflow as tf


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions of a dataset, as TensorFlow wraps them."""
    return list(dataset._functions())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    return list(dataset._inputs())
