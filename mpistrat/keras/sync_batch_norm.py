"""SyncBatchNormalization: batch normalization with the mean and variance of the batches of all ranks together.

The layer computes mean and variance itself, from sums that are all-reduced. Keras calls the layer while it traces or
runs a step, on all ranks of the process set.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..core.errors import InvalidRequestError
from ..core.request import Sum
from ..tensorflow.bridge.types import Tensor
from ..tensorflow.ops import allreduce
from .bridge.private_names import serialise_as


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A BatchNormalization layer that normalizes by mean and variance over the rows of all ranks.

    In training, `call` is collective: two all-reduces sum the numbers of rows, the values and the squared deviations.
    So mean and variance are those of one process with all rows, also if the batches of the ranks have different sizes.
    The backward pass makes two more all-reduces. Float16 and bfloat16 inputs are normalized in float32. Inference does
    not communicate. In a file the layer is a keras.layers.BatchNormalization, so the file loads without mpistrat, too.

    Args:
        fused: Accepted for compatibility with Horovod; must be False.
        process_set: The ranks whose rows are normalized together.
        **kwargs: As for BatchNormalization. With Keras 2 (TF_USE_LEGACY_KERAS=1) the layer is a tf_keras layer.

    Raises:
        InvalidRequestError: `fused`, `renorm`, `synchronized` or `virtual_batch_size` is set, or `process_set` is not a
            ProcessSet.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any):
        process_set = checked(fused, process_set, kwargs)
        super().__init__(**kwargs)
        self._process_set = process_set

    def call(self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalize `inputs`. Collective over the process set in training."""
        if not (training and self.trainable) or not self._process_set.included() or self._process_set.size() == 1:
            return super().call(inputs, training=training, mask=mask)
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        channels = self.axis % len(x.shape)
        axes = [i for i in range(len(x.shape)) if i != channels]
        mean, variance = moments_of_all_ranks(x, axes, mask, self._process_set)
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(ops.cast(moving, value.dtype) * self.momentum + value * (1.0 - self.momentum))
        result = ops.batch_normalization(
            x, mean, variance, axis=self.axis, epsilon=self.epsilon,
            offset=ops.cast(self.beta, x.dtype) if self.center else None,
            scale=ops.cast(self.gamma, x.dtype) if self.scale else None)
        return ops.cast(result, self.compute_dtype)


def checked(fused: bool | None, process_set: ProcessSet, arguments: Mapping[str, object]) -> ProcessSet:
    """Check the arguments of a SyncBatchNormalization, and return its process set. Raises InvalidRequestError."""
    if fused in (True, None):
        raise InvalidRequestError("SyncBatchNormalization does not support fused=True. Leave it out.")
    for name in ("renorm", "synchronized", "virtual_batch_size"):
        if arguments.get(name):
            raise InvalidRequestError(f"SyncBatchNormalization does not support {name}={arguments[name]}. Leave it "
                                      "out.")
    return resolved(process_set)


def moments_of_all_ranks(x: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None, process_set: ProcessSet
                         ) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over `axes` of the rows of all ranks, without rows that `mask` excludes. Collective."""
    weight = tf.ones_like(x) if mask is None else \
        tf.cast(tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(x)), x.dtype)
    count_and_sum = allreduce(tf.stack([tf.reduce_sum(weight, axes), tf.reduce_sum(weight * x, axes)]), op=Sum,
                              process_set=process_set)
    count = tf.maximum(count_and_sum[0], 1.0)  # All rows of all ranks may be masked.
    mean = count_and_sum[1] / count
    # Deviations from the mean over all ranks, since the difference E[x^2] - E[x]^2 cancels digits.
    deviations = allreduce(tf.reduce_sum(weight * tf.square(x - with_axes(mean, axes)), axes), op=Sum,
                           process_set=process_set)
    return mean, deviations / count


def with_axes(moment: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Return a mean or variance with an axis of length 1 in place of each reduced axis in `axes`."""
    return functools.reduce(tf.expand_dims, sorted(axes), moment)


# In a file, Keras names layers and their weights after the class.
SyncBatchNormalization.__name__ = keras.layers.BatchNormalization.__name__
serialise_as(SyncBatchNormalization, keras.layers.BatchNormalization)
