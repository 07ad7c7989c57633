"""SyncBatchNormalization for models of Keras 2 (tf_keras). See mpistrat/keras/sync_batch_norm.py."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ...api.process_sets import ProcessSet, global_process_set
from ..bridge.private_names import serialise_as
from ..sync_batch_norm import checked, moments_of_all_ranks, with_axes


class SyncBatchNormalization(tf_keras.layers.BatchNormalization):
    """The layer mpistrat.keras.SyncBatchNormalization for models of Keras 2, with the same arguments."""

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any):
        process_set = checked(fused, process_set, kwargs)
        super().__init__(fused=False, **kwargs)
        self._process_set = process_set

    def _moments(self, inputs: tf.Tensor, reduction_axes: Sequence[int], keep_dims: bool,
                 mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        # Keras calls this while it trains, with float32 for half precision.
        if not self._process_set.included() or self._process_set.size() == 1:
            return super()._moments(inputs, reduction_axes, keep_dims, mask=mask)
        moments = moments_of_all_ranks(inputs, reduction_axes, mask, self._process_set)
        mean, variance = (with_axes(each, reduction_axes) for each in moments) if keep_dims else moments
        return mean, variance


# In a file, Keras names layers and their weights after the class.
SyncBatchNormalization.__name__ = tf_keras.layers.BatchNormalization.__name__
serialise_as(SyncBatchNormalization, tf_keras.layers.BatchNormalization)
