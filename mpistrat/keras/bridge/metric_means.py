"""The metrics of an epoch, replaced by their means over the ranks. Called in the thread of fit."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...api import array_ops
from ...api.process_sets import ProcessSet
from ...core.topology import describe_by_rank, rank_list
from .private_names import Callback, Logs
from .row_counts import UNKNOWN

logger = logging.getLogger(__name__)


class MetricMeans:
    """Averages the metrics that all ranks of a process set have. Logs one warning if a rank lacks a metric, or if the
    ranks have validated on different numbers of batches.
    """

    def __init__(self, process_set: ProcessSet):
        self._process_set, self._has_warned = process_set, False

    def replace(self, name: str, logs: dict[str, Any], rows: tuple[int, int] | None = None, batches: int = 0) -> None:
        """Replace the metrics in `logs` by their means. Collective. Metrics that some ranks lack are not changed.

        Metrics are numbers and arrays of numbers, such as one for each class. Arrays of different shapes are different
        metrics. `rows` are the weights: this rank's rows of training and of validation; None on all ranks: no weights.
        `batches` is its number of validation batches, if known. Raises ValueError on every rank, as weighted_means.
        """
        own = {key: number for key, value in logs.items() if (number := _number(value)) is not None}
        found = array_ops.allgather_object((rows, batches, own), name, self._process_set)
        names, missing = shared_names([metrics for *_, metrics in found])
        values = [np.array([metrics[key] for *_, metrics in found]) for key in names]
        means = [np.mean(of_ranks, axis=0) for of_ranks in values] if rows is None else \
            weighted_means(names, np.array([weights for weights, *_ in found]), values)
        for key, mean in zip(names, means, strict=True):
            is_rounded = not tf.is_tensor(logs[key]) or not logs[key].dtype.is_floating  # A mean of counts has digits.
            logs[key] = tf.cast(mean, logs[key].dtype) if mean.ndim and not is_rounded else \
                mean if mean.ndim else float(mean)
        problem = ""
        if missing:
            where = "; ".join(f"{key} on ranks {rank_list(ranks)}" for key, ranks in missing.items())
            problem = (f"fit cannot average metrics that only some ranks have: {where}. Callbacks that read these "
                       "metrics may decide differently on each rank. Give validation_data to all ranks.")
        elif rows is None and len({batches for _, batches, _ in found}) > 1:
            problem = (f"the ranks validate on different numbers of batches: "
                       f"{describe_by_rank([batches for _, batches, _ in found])}. The means of the metrics give all "
                       "ranks the same weight. To weight by rows: hvd.callbacks.MetricAverageCallback(weighted=True).")
        if problem and not self._has_warned and self._process_set.rank() == 0:
            logger.warning("mpistrat: %s", problem)
        self._has_warned |= bool(problem)


class AverageMetrics(Callback):
    """Replaces metrics by their means when an epoch ends, if callbacks decide by metrics. Collective; fit adds it."""

    def __init__(self, name: str, process_set: ProcessSet):
        super().__init__()
        self._name, self._process_set, self._means = name, process_set, MetricMeans(process_set)
        self._is_needed = False

    def begin(self, readers: Sequence[Sequence[str]]) -> None:
        """Begin training. `readers` has each rank's classes of callbacks that decide by metrics. Local."""
        found = {rank: of_rank for rank, of_rank in enumerate(readers) if of_rank}
        self._is_needed = bool(found)
        if found and self._process_set.rank() == 0:
            logger.info("rank 0: fit averages the metrics over the ranks at the end of each epoch, for %s on ranks %s",
                        ", ".join(sorted({name for names in found.values() for name in names})), rank_list(found))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._is_needed:
            self._means.replace(self._name, {} if logs is None else logs)


def _number(value: object) -> np.ndarray | None:
    """Return a number, or an array or tensor of numbers, as a float64 array. Return None for anything else."""
    if not isinstance(value, int | float) and not hasattr(value, "dtype"):
        return None
    array = np.asarray(value)
    return None if array.dtype.kind in "OSUMm" else array.astype(np.float64)


def weighted_means(names: Sequence[str], rows: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the mean of each metric over the ranks, weighted by rows.

    Args:
        names: The names of the metrics; `val_...` are weighted by the rows of the validation.
        rows: Each rank's rows of training and of validation; UNKNOWN if the rank had batches without rows.
        values: For each metric an array of the ranks' values.

    Raises:
        ValueError: The number of rows that a metric needs is unknown on a rank, or 0 on all ranks.
    """
    means = []
    for name, of_ranks in zip(names, values, strict=True):
        weights, step = (rows[:, 1], "test_step") if name.startswith("val_") else (rows[:, 0], "train_step")
        unknown = np.flatnonzero(weights == UNKNOWN).tolist()
        if unknown:
            raise ValueError(f"{name} cannot be weighted by rows. On ranks {unknown} the number of rows is unknown, "
                             f"because batches did not go through the model's {step}, or have no tensor with rows. Use "
                             "MetricAverageCallback(weighted=False).")
        if not weights.any():
            raise ValueError(f"{name} cannot be weighted by rows, since no rank has had rows in {step}. Use "
                             "MetricAverageCallback(weighted=False).")
        # The metric of a rank without rows may be nan.
        means.append(np.average(of_ranks[weights > 0], axis=0, weights=weights[weights > 0]))
    return means


def shared_names(metrics: Sequence[dict[str, np.ndarray]]) -> tuple[list[str], dict[str, list[int]]]:
    """Return the sorted names of metrics that all ranks have, and for each other metric (with shape) its ranks."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, of_rank in enumerate(metrics):
        for name, value in of_rank.items():
            ranks.setdefault((name, np.shape(value)), []).append(rank)
    shared = sorted(name for (name, _), where in ranks.items() if len(where) == len(metrics))
    return shared, {f"{name} of shape {shape}" if shape else name: where for (name, shape), where in ranks.items()
                    if len(where) < len(metrics)}
