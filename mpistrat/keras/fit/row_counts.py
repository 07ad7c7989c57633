"""Rows that a model has trained on and evaluated, counted inside of its compiled steps, and means weighted by them.

Keras says how many batches a step of fit has seen, but not how many rows, and the last batch of an epoch may be short.
`train_step` and `test_step` are public methods that get each batch, those of the user's own classes too, so the count
is exact for arrays, datasets and generators, and does not run ahead of training as a dataset with prefetching would.
Called by the callbacks, in the thread of fit.
"""

import itertools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

UNKNOWN = -1

_numbers = itertools.count()


class LocalScalar:
    """A variable of this rank, on the CPU. A tf.Variable that is made in a strategy's scope would be the strategy's."""

    def __init__(self, dtype: tf.DType, value: int):
        self._dtype = dtype
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], container="",
                                                  shared_name=f"mpistrat_scalar_{next(_numbers)}")
            self.assign(value)

    def assign(self, value: int | bool) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.cast(value, self._dtype))

    def add(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def read(self) -> tf.Tensor:
        return tf.reshape(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype), [])


class RowCount:
    """The rows that one step of a model has got on this rank since it is counted. It only grows; callers subtract."""

    def __init__(self) -> None:
        self._count = LocalScalar(tf.int64, 0)

    @property
    def rows(self) -> int:
        """The number of rows. Batches in which none can be counted (`rows_of`) have none."""
        return int(self._count.read())

    @classmethod
    def of(cls, model: keras.Model, step: str) -> "RowCount":
        """The count of a model's `train_step` or `test_step`. The first call makes Keras trace the step anew. Local.

        The wrapper stays on the model, so that the next fit need not trace again.
        """
        found = getattr(getattr(model, step), "mpistrat_rows", None)
        if isinstance(found, RowCount):
            return found
        count = cls()
        setattr(model, step, count._counted(getattr(model, step)))
        make_function = {"train_step": model.make_train_function, "test_step": model.make_test_function}[step]
        make_function(force=True)
        return count

    def _counted(self, step: Callable[[object], object]) -> Callable[[object], object]:
        @tf.autograph.experimental.do_not_convert
        def counting_step(data: object) -> object:
            rows = rows_of(data)
            if rows is not None:
                self._count.add(rows)
            return step(data)

        counting_step.mpistrat_rows = self
        return counting_step


class RowsOfEpoch:
    """The rows of the current epoch of fit, and of its latest validation, on this rank.

    Attributes:
        has_trained: Whether a batch of the epoch has ended.
        has_evaluated: Whether a batch of the latest validation has ended.
    """

    def __init__(self, model: keras.Model):
        self._trained, self._tested = RowCount.of(model, "train_step"), RowCount.of(model, "test_step")
        self.begin()

    def begin(self) -> None:
        self.has_trained = self.has_evaluated = False
        self._before, self._evaluated = self._trained.rows, 0

    def begin_evaluation(self) -> None:
        self.has_evaluated = False
        self._before_evaluation = self._tested.rows

    def end_evaluation(self) -> None:
        """The validation has ended. A callback may evaluate other rows later in this epoch."""
        self._evaluated = self._tested.rows - self._before_evaluation

    def weights(self) -> tuple[int, int]:
        """The rows of training and of validation; UNKNOWN where there were batches but no rows."""
        trained = self._trained.rows - self._before
        return (UNKNOWN if self.has_trained and not trained else trained,
                UNKNOWN if self.has_evaluated and not self._evaluated else self._evaluated)


def weighted_means(names: Sequence[str], table: np.ndarray) -> np.ndarray:
    """The mean of each metric over the ranks, weighted by rows.

    Args:
        names: Those of the metrics; `val_...` are weighted by the rows of the validation.
        table: float64, a row for each rank: its rows of training, its rows of validation, and its metrics.

    Raises:
        ValueError: Some rank does not know the rows that a metric needs, or no rank has any.
    """
    means = []
    for name, values in zip(names, table[:, 2:].T):
        rows, step = (table[:, 1], "test_step") if name.startswith("val_") else (table[:, 0], "train_step")
        unknown = np.flatnonzero(rows == UNKNOWN).tolist()
        if unknown:
            raise ValueError(f"{name} cannot be weighted by rows: ranks {unknown} have had batches that the model's "
                             f"{step} did not get, or without a tensor that has rows, so their rows are not known. Use "
                             "MetricAverageCallback(weighted=False).")
        if not rows.any():
            raise ValueError(f"{name} cannot be weighted by rows: no rank has had any in {step}. Use "
                             "MetricAverageCallback(weighted=False).")
        # A rank without rows may have nan for a metric.
        means.append(np.sum(rows[rows > 0] * values[rows > 0]) / np.sum(rows))
    return np.array(means)


def rows_of(data: object) -> tf.Tensor | None:
    """The number of rows of a batch, int64: the first dimension of its first tensor that has one; None without any."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) else \
                tf.cast(leaf.nrows(), tf.int64) if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0]
    return None
