"""Keras' optimizers add the rows of tf.IndexedSlices in one order, so that repeated rows have one sum on all ranks.

Keras adds slices to a variable with TensorFlow's ResourceScatterAdd and ResourceScatterSub. On the CPU they use several
threads from 1024 rows on, and add rows with the same index in the order of the threads, so ranks with the same slices
get different bits. ResourceScatterNdAdd and ResourceScatterNdSub add row after row, and take no longer. (See
ScatterFunctorBase and ScatterNdFunctor: https://github.com/tensorflow/tensorflow/tree/v2.21.0/tensorflow/core/kernels.)
XLA compiles both to the same code. When Keras makes slices dense, it sums with UnsortedSegmentSum, in which each thread
has its own rows of the result.

On a GPU all of these operations use atomic additions. There repeated rows are summed before they are added, by
UnsortedSegmentSum, which is deterministic with the variable that init() sets (set_cuda_variables). In steps that XLA
compiles for a GPU gradients are dense before they are averaged (reduce_gradients). Elsewhere repeated rows are not
summed first, because Keras' optimizers square each row, also in one process.

Applied with the first DistributedOptimizer, the first MPIStrategy, and the first slices of a DistributedGradientTape.
"""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...tensorflow.list_ops import as_tensor, with_unique_rows
from ...tensorflow.xla.context import is_compiled
from ..bridge.patches import Function, replaces

_REASON = "rows that repeat would have another sum on each rank"


@replaces(Optimizer, "assign_add", _REASON, "variable.scatter_add(value)")
def assign_add(original: Function, self: Optimizer, variable: keras.Variable | tf.Variable, value: object) -> None:
    _add(tf.raw_ops.ResourceScatterNdAdd, original, self, variable, value)


@replaces(Optimizer, "assign_sub", _REASON, "variable.scatter_sub(value)")
def assign_sub(original: Function, self: Optimizer, variable: keras.Variable | tf.Variable, value: object) -> None:
    _add(tf.raw_ops.ResourceScatterNdSub, original, self, variable, value)


def _add(operation: Callable, original: Function, optimizer: Optimizer, variable: keras.Variable | tf.Variable,
         value: object) -> None:
    """Scatter slices into a variable by `operation`; other values go to Keras' own function."""
    if not isinstance(value, tf.IndexedSlices):
        original(optimizer, variable, value)
        return
    resource = variable.value if isinstance(variable, keras.Variable) else variable
    rows = as_tensor(tf.IndexedSlices(tf.cast(value.values, resource.dtype), value.indices))
    if _adds_atomically(resource):
        rows = with_unique_rows(rows)
    operation(ref=resource.handle, indices=rows.indices[:, tf.newaxis], updates=rows.values)


def _adds_atomically(resource: tf.Variable) -> bool:
    """Return whether TensorFlow adds rows to a variable in any order. If so, repeated rows must be summed first."""
    return "GPU" in resource.device and not is_compiled()
