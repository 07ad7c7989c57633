"""The collectives with Horovod's signatures for Keras scripts, and load_model.

Each collective passes its arguments on to the function of mpistrat.tensorflow, which has another argument order.
mpistrat.keras exports these functions to users.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ...core.request import Average, ReduceOp
from ...tensorflow import ops, scatter_ops
from ...tensorflow.bridge.types import Reducible, Tensor
from ...tensorflow.compression import Compression, Compressor
from ...tensorflow.kerases import accumulated_passes, is_keras2_in_use
from ..bridge.private_names import distributed_in
from ..clone import replace_optimizer
from .optimizer import DistributedOptimizer

logger = logging.getLogger(__name__)


def allreduce(value: Reducible, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None,
              compression: type[Compressor] = Compression.none) -> Tensor:
    """Return the reduction of `value` over all ranks, as mpistrat.tensorflow.allreduce does. Collective."""
    return ops.allreduce(value, average=average, op=op, name=name, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor, compression=compression)


def allgather(value: Reducible, name: str | None = None) -> tf.Tensor:
    """Return the values of all ranks, concatenated, as mpistrat.tensorflow.allgather does. Collective."""
    return ops.allgather(value, name=name)


def broadcast(value: Reducible, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return root_rank's `value` on every rank, as mpistrat.tensorflow.broadcast does. Collective."""
    return ops.broadcast(value, root_rank, name=name)


def reducescatter(value: Reducible, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """Return this rank's rows of the reduction, as mpistrat.tensorflow.reducescatter does. Collective."""
    return scatter_ops.reducescatter(value, op=op, name=name)


def load_model(filepath: str | os.PathLike, custom_optimizers: Iterable[type[keras.optimizers.Optimizer]] | None = None,
               custom_objects: Mapping[str, object] | None = None, compression: type[Compressor] = Compression.none,
               legacy_opts: bool = False, average_aggregated_gradients: bool | None = None,
               **arguments: Any) -> keras.Model:
    """Load a Keras model and wrap its optimizer, with its state, in DistributedOptimizer. Local.

    The model is one of Keras 3, or of Keras 2 where tf.keras is Keras 2 (tf_keras, with TF_USE_LEGACY_KERAS=1).

    Args:
        filepath: As for keras.models.load_model.
        custom_optimizers: User-defined optimizer classes that the file refers to.
        custom_objects: As for keras.models.load_model.
        compression: One of Compression.
        legacy_opts: Accepted for compatibility with Horovod, ignored. A file of Keras 2 says which optimizer it has.
        average_aggregated_gradients: For an optimizer that accumulates gradients. True: an update takes their mean, as
            in Keras. False: an update takes their sum, as in a DistributedOptimizer with backward_passes_per_step.
            None: the mean, with a warning, since the file does not say which.
        arguments: Further arguments of DistributedOptimizer, such as `uneven` or `process_set`, which no file contains.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    its_keras = tf.keras if is_keras2_in_use() else keras
    with its_keras.saving.custom_object_scope(objects):
        model = its_keras.models.load_model(filepath)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or distributed_in(optimizer):
            return model
        replace_optimizer(model, DistributedOptimizer(optimizer, compression=compression, **arguments))
    steps = accumulated_passes(optimizer)
    if steps and average_aggregated_gradients is None:
        logger.warning("the optimizer of %s accumulates the gradients of %d passes, and the file does not say whether "
                       "an update takes their mean or their sum. Updates take the mean now. Give load_model "
                       "average_aggregated_gradients=True for the mean, or False for the sum.", filepath, steps)
    elif steps and not average_aggregated_gradients:
        model.optimizer._mpistrat.arguments.factor = float(steps)
    return model
