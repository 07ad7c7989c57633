"""Keras' optimizers add the rows of tf.IndexedSlices in one order, so that repeated rows have one sum on all ranks.

Keras adds slices to a variable with TensorFlow's ResourceScatterAdd and ResourceScatterSub. On the CPU these run in
several threads from 1024 rows on, and add the rows that have the same index in the order in which the threads come to
them: the ranks, which have the same slices, come to other bits. ResourceScatterNdAdd and ResourceScatterNdSub do the
same row after row, and take no longer (ScatterFunctorBase and ScatterNdFunctor in
https://github.com/tensorflow/tensorflow/tree/v2.21.0/tensorflow/core/kernels). XLA makes the same of both. What Keras
makes dense it sums with UnsortedSegmentSum, whose threads each have rows of the result.

On a GPU all of these add by atomic additions. There rows that repeat are summed before they are added, by
UnsortedSegmentSum, which has one order with the variable that init() sets (set_cuda_variables). In steps that XLA
compiles for a GPU gradients are dense before they are averaged (reduce_gradients). Elsewhere rows that repeat are not
summed before: Keras' optimizers square each of them, and so they do in one process.

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
    if isinstance(value, tf.IndexedSlices):
        _scatter(tf.raw_ops.ResourceScatterNdAdd, variable, value)
    else:
        original(self, variable, value)


@replaces(Optimizer, "assign_sub", _REASON, "variable.scatter_sub(value)")
def assign_sub(original: Function, self: Optimizer, variable: keras.Variable | tf.Variable, value: object) -> None:
    if isinstance(value, tf.IndexedSlices):
        _scatter(tf.raw_ops.ResourceScatterNdSub, variable, value)
    else:
        original(self, variable, value)


def _scatter(operation: Callable, variable: keras.Variable | tf.Variable, slices: tf.IndexedSlices) -> None:
    resource = variable.value if isinstance(variable, keras.Variable) else variable
    rows = as_tensor(tf.IndexedSlices(tf.cast(slices.values, resource.dtype), slices.indices))
    if _adds_atomically(resource):
        rows = with_unique_rows(rows)
    operation(ref=resource.handle, indices=rows.indices[:, tf.newaxis], updates=rows.values)


def _adds_atomically(resource: tf.Variable) -> bool:
    """Whether rows are added to a variable in any order, and can be summed before."""
    return "GPU" in resource.device and not is_compiled()
