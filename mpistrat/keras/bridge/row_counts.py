"""The numbers of rows that a model has trained on and evaluated, counted inside of its compiled steps.

Keras counts the batches of fit, but not the rows, and the last batch of an epoch may be short. `train_step` and
`test_step` are public methods that get each batch, also in user-defined classes. So the count is exact for arrays,
datasets and generators, and does not run ahead of training, as a count in a dataset with prefetching would.
The callbacks call this module, in the thread of fit.
"""

import itertools

import keras
import tensorflow as tf

from ...tensorflow.xla.context import device_here

UNKNOWN = -1

_numbers = itertools.count()


class LocalScalar:
    """A local number that steps read or add to: one variable on the host, and one on the device of compiled steps.

    XLA refuses variables of another device. A tf.Variable made in a strategy's scope would belong to the strategy.
    """

    def __init__(self, dtype: tf.DType, value: int):
        self._dtype, self._value = dtype, value
        self._handles: dict[str, tf.Tensor] = {}  # by device

    def assign(self, value: int | bool) -> None:
        """Assign the number. Eager."""
        self._value = value
        for handle in self._handles.values():
            self._assign_to(handle)

    def add(self, value: tf.Tensor) -> None:
        """Add to the number, on the device of the step that is being traced."""
        tf.raw_ops.AssignAddVariableOp(resource=self._handle(), value=value)

    def read(self) -> tf.Tensor:
        """Return the assigned number, on the device of the step that is being traced."""
        return self._read_from(self._handle())

    def sum(self) -> int:
        """Return the sum of the additions on all devices, if the assigned number is 0. Eager."""
        return sum(int(self._read_from(handle)) for handle in self._handles.values())

    def _handle(self) -> tf.Tensor:
        device = device_here()
        if device not in self._handles:
            with tf.init_scope(), tf.device(device):
                handle = tf.raw_ops.VarHandleOp(dtype=self._dtype, shape=[], container="",
                                                shared_name=f"mpistrat_scalar_{next(_numbers)}")
                self._assign_to(handle)
            self._handles[device] = handle
        return self._handles[device]

    def _assign_to(self, handle: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.cast(self._value, self._dtype))

    def _read_from(self, handle: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=self._dtype), [])


class RowCount:
    """The number of rows that a step function of a model has got on this rank. It only grows; callers subtract."""

    def __init__(self) -> None:
        self._count = LocalScalar(tf.int64, 0)

    @property
    def rows(self) -> int:
        """The number of rows. Batches whose rows cannot be counted (see `rows_of`) add 0."""
        return self._count.sum()

    @classmethod
    def of(cls, model: keras.Model, step: str) -> "RowCount":
        """Return the count of a model's `train_step` or `test_step`. The first call makes Keras retrace it. Local.

        The wrapper stays on the model, so that the next fit need not trace again.
        """
        found = getattr(getattr(model, step), "mpistrat_rows", None)
        if isinstance(found, RowCount):
            return found
        count, original = cls(), getattr(model, step)

        @tf.autograph.experimental.do_not_convert
        def counting_step(data: object) -> object:
            rows = rows_of(data)
            if rows is not None:
                count._count.add(rows)
            return original(data)

        counting_step.mpistrat_rows = count
        setattr(model, step, counting_step)
        make_function = {"train_step": model.make_train_function, "test_step": model.make_test_function}[step]
        make_function(force=True)
        return count


def rows_of(data: object) -> tf.Tensor | None:
    """Return the rows of a batch, int64: the first dimension of the first tensor that is no scalar. None if none."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) else \
                tf.cast(leaf.nrows(), tf.int64) if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0]
    return None
