"""Rows that a model has trained on and evaluated, counted inside of its compiled steps, and means weighted by them.

Keras says how many batches a step of fit has seen, but not how many rows, and the last batch of an epoch may be short.
`train_step` and `test_step` are public methods that get each batch, those of the user's own classes too, so the count
is exact for arrays, datasets and generators, and does not run ahead of training as a dataset with prefetching would.
Called by the callbacks, in the thread of fit.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

UNKNOWN = -1


class RowCounts:
    """The rows that one model has seen on this rank since it is counted. They only grow; callers take differences."""

    def __init__(self) -> None:
        with tf.init_scope():
            self._trained, self._evaluated = (
                tf.Variable(0, trainable=False, dtype=tf.int64, name=name, aggregation=tf.VariableAggregation.SUM,
                            synchronization=tf.VariableSynchronization.ON_READ)
                for name in ("rows_trained", "rows_evaluated"))

    @property
    def trained(self) -> int:
        """Rows of the batches of `train_step`."""
        return int(self._trained.numpy())

    @property
    def evaluated(self) -> int:
        """Rows of the batches of `test_step`."""
        return int(self._evaluated.numpy())

    @classmethod
    def of(cls, model: keras.Model) -> "RowCounts":
        """The counts of a model. The first call wraps its steps, and makes Keras trace them anew. Local.

        The wrappers stay on the model, so that the next fit need not trace again.
        """
        found = getattr(model.train_step, "mpistrat_rows", None)
        is_whole = getattr(model.test_step, "mpistrat_rows", None) is found
        if is_whole and isinstance(found, RowCounts):
            return found
        counts = cls()
        model.train_step = _counting(model.train_step, counts._trained, counts)
        model.test_step = _counting(model.test_step, counts._evaluated, counts)
        model.make_train_function(force=True)
        model.make_test_function(force=True)
        return counts


class RowsOfEpoch:
    """The rows of the current epoch of fit, and of its latest validation, on this rank.

    Attributes:
        has_trained: Whether a batch of the epoch has ended.
        has_evaluated: Whether a batch of the latest validation has ended.
    """

    def __init__(self, counts: RowCounts):
        self._counts = counts
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self.has_trained = self.has_evaluated = False
        self._before, self._evaluated = self._counts.trained, 0

    def begin_evaluation(self) -> None:
        """A validation begins."""
        self.has_evaluated = False
        self._before_evaluation = self._counts.evaluated

    def end_evaluation(self) -> None:
        """The validation has ended. A callback may evaluate other rows later in this epoch."""
        self._evaluated = self._counts.evaluated - self._before_evaluation

    def weights(self) -> tuple[int, int]:
        """The rows of training and of validation; UNKNOWN where there were batches but no rows."""
        trained = self._counts.trained - self._before
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
                             f"{step} did not get, so their rows are not known. Use "
                             "MetricAverageCallback(weighted=False).")
        if not rows.any():
            raise ValueError(f"{name} cannot be weighted by rows: no rank has had any in {step}. Use "
                             "MetricAverageCallback(weighted=False).")
        # A rank without rows may have nan for a metric.
        means.append(np.sum(rows[rows > 0] * values[rows > 0]) / np.sum(rows))
    return np.array(means)


def _counting(step: Callable[[object], object], variable: tf.Variable, counts: RowCounts) -> Callable[[object], object]:
    @tf.autograph.experimental.do_not_convert
    def counting_step(data: object) -> object:
        variable.assign_add(rows_of(data))
        return step(data)

    counting_step.mpistrat_rows = counts
    return counting_step


def rows_of(data: object) -> tf.Tensor:
    """The number of rows of a batch, int64: the first dimension of the first tensor in it, which is one of x.

    Raises:
        ValueError: The batch has no tensor, or the first one is a scalar.
    """
    first = next((leaf for leaf in tf.nest.flatten(data) if leaf is not None), None)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if first is None or len(first.shape) == 0:
        raise ValueError("the rows of a batch cannot be counted: its first tensor has no first dimension. Use "
                         f"MetricAverageCallback(weighted=False). Received: {first}")
    return tf.shape(first, tf.int64)[0]
