"""Horovod's short forms of the collectives for Keras scripts, and load_model."""

from typing import Any

import keras
import tensorflow as tf

from ..core.request import ReduceOp
from ..tensorflow import ops
from ..tensorflow.compression import Compression
from .optimizer import DistributedOptimizer, is_distributed


def allreduce(value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None, compression: Any = Compression.none) -> Any:
    """As mpistrat.tensorflow.allreduce."""
    return ops.allreduce(value, average=average, op=op, name=name, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor, compression=compression)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """As mpistrat.tensorflow.allgather."""
    return ops.allgather(value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """As mpistrat.tensorflow.broadcast."""
    return ops.broadcast(value, root_rank, name=name)


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None,
               compression: Any = Compression.none, legacy_opts: bool = False) -> keras.Model:
    """Load a Keras model and wrap its optimizer, with its state, in DistributedOptimizer. Not collective.

    Args:
        filepath: As for keras.models.load_model.
        custom_optimizers: Optimizer classes that the file names and Keras does not know.
        custom_objects: As for keras.models.load_model.
        compression: One of Compression.
        legacy_opts: Accepted for Horovod's sake; Keras 3 has no legacy optimizers.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None and not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
