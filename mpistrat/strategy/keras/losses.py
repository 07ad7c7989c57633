"""Losses under MPIStrategy: the weight of each rank's part of a batch, and the losses that user-defined steps log.

The loss of a global batch is the mean of the ranks' losses, weighted by their numbers of rows. This is right if Keras
divides the loss by the number of rows. But Keras divides some losses by the number of valid tokens of a mask, by the
sum of sample weights, or not at all. Here such a loss is multiplied by a factor, so that the weighted mean equals the
loss of one process. For the factor the divisor is summed over the ranks, in one small collective for each such loss. So
the result is right for several outputs with different masks, for terms that are added to a loss, and for evaluation.

The functions run in a replica, while TensorFlow traces the step.
"""

import functools
import logging

import keras
import tensorflow as tf

from ...api import runtime
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import BaseTrainer
from ...keras.bridge.private_names import trainer as keras_trainer
from ...tensorflow.bridge.types import TensorLike
from . import step_state
from .step_state import state, strategy_here

logger = logging.getLogger(__name__)
_loss_module = keras_trainer.loss_module


@replaces(_loss_module, "reduce_weighted_values",
          "a loss divided by valid tokens or sample weights would count by rows, and a sum of rows would be logged as "
          "if all ranks had as many", "loss = reduce_values(values, sample_weight, reduction)")
def reduce_weighted_values(original: Function, values: TensorLike, sample_weight: TensorLike | None = None,
                           mask: TensorLike | None = None, reduction: str | None = "sum_over_batch_size",
                           dtype: str | None = None) -> tf.Tensor:
    loss = original(values, sample_weight, mask, reduction, dtype)
    if state.weight is None or strategy_here() is None or reduction in ("none", None) or _is_part():
        return loss
    if state.in_compute_loss is not None and state.losses_within == 1 and reduction != "sum" \
            and tf.convert_to_tensor(values).shape.rank == 0:
        _tell_of_number(state.in_compute_loss.name)
        if loss.shape.rank == 0 and not step_state.is_scaled(loss):
            loss = _loss_module.scale_loss_for_distribution(loss)  # Keras leaves it out.
    if reduction == "sum":
        if not state.has_sums:  # A user-defined step divides the sum.
            return loss
        factor = tf.math.divide_no_nan(1.0, step_state.share())
    else:
        divisor = _divisor(sample_weight, mask, reduction)
        if divisor is None:
            return loss
        factor = tf.math.divide_no_nan(step_state.share(divisor), step_state.share())
    loss = tf.math.multiply_no_nan(loss, tf.cast(factor, loss.dtype))
    state.scaled.append(loss)
    return loss


def _divisor(sample_weight: TensorLike | None, mask: TensorLike | None, reduction: str | None) -> tf.Tensor | None:
    """Return the number by which Keras divides a loss, up to a factor equal on all ranks; None: the number of rows."""
    if reduction == "mean_with_sample_weight":
        mask = _loss_module.apply_mask(sample_weight, mask, "float32", reduction)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


@functools.cache
def _tell_of_number(model: str) -> None:
    if runtime.current().topology.rank == 0:
        logger.warning("%s: the loss function returns one number for a batch, so training uses the mean of the ranks' "
                       "numbers, weighted by rows. That is the loss of the global batch for a mean over rows, but not "
                       "for a ratio (Dice) or a comparison of rows. Return a number per row if you can.", model)


@replaces(_loss_module.Loss, "__call__", "a loss that calls other losses would be divided by the number of ranks twice",
          "losses = self.call(y_true, y_pred)")
def call_loss(original: Function, self: keras.Loss, *args: object, **kwargs: object) -> tf.Tensor:
    state.losses_within += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        state.losses_within -= 1


def _is_part() -> bool:
    """Return whether a loss of `compile` has called the loss that runs now. Only the outermost loss is weighted."""
    return state.in_compute_loss is not None and state.losses_within > 1


@replaces(_loss_module, "scale_loss_for_distribution",
          "a mean of losses that a step of the user's keeps would be divided by the number of ranks",
          "1.0 / num_replicas")
def scale_loss(original: Function, value: tf.Tensor) -> tf.Tensor:
    if state.weight is not None and strategy_here() is not None and _is_part():
        return value
    loss = original(value)
    if state.weight is not None and loss is not value:
        state.scaled.append(loss)
    return loss


@replaces(_loss_module, "unscale_loss_for_distribution",
          "losses of reduction=None, which are not scaled, would be logged times the number of ranks", "num_replicas")
def unscale_loss(original: Function, value: tf.Tensor) -> tf.Tensor:
    return value if strategy_here() is not None and value.shape.rank else original(value)


@replaces(BaseTrainer, "compute_loss", "the sum of several losses would be logged divided by "
          "the number of ranks", "ops.sum(losses)")
def compute_loss(original: Function, self: keras.Model, *args: object, **kwargs: object) -> tf.Tensor:
    before, state.in_compute_loss = state.in_compute_loss, self
    try:
        loss = original(self, *args, **kwargs)
    finally:
        state.in_compute_loss = before
    if state.weight is not None and strategy_here() is not None:
        state.scaled.append(loss)
    return loss


@replaces(keras.metrics.Mean, "update_state", "a scalar, as a loss is, would count by ranks and not by rows",
          "num_samples = 1")
def update_mean(original: Function, self: keras.metrics.Mean, values: TensorLike,
                sample_weight: TensorLike | None = None) -> object:
    values = step_state.unscaled(values)
    if state.rows is not None and strategy_here() is not None and isinstance(values, tf.Tensor):
        if values.shape.rank == 0 and state.weight is not None:
            values = tf.where(state.rows == 0, tf.zeros_like(values), values)  # It may be NaN.
            sample_weight = step_state.share() if sample_weight is None else sample_weight
        elif values.shape.rank and values.dtype.is_floating and not hasattr(values, "_keras_mask") \
                and sample_weight is not None and len(tf.convert_to_tensor(sample_weight).shape) == 0:
            # `values` are the losses of rows, with their number as the weight. Keras' mean of no rows is NaN.
            values = tf.cast(values, self.dtype)  # as Keras does; a sum of halves may overflow
            values = tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
    return original(self, values, sample_weight)
