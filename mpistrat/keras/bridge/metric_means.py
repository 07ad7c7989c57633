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
    """Averages the metrics that all ranks of a process set have, and warns once if a rank lacks one, or has validated
    on more batches than another.
    """

    def __init__(self, process_set: ProcessSet):
        self._process_set, self._has_warned = process_set, False

    def replace(self, name: str, logs: dict[str, Any], rows: tuple[int, int] | None = None, batches: int = 0) -> None:
        """Replace the metrics in `logs` by their means. Collective. Metrics that some ranks lack stay as they are.

        Metrics are numbers and arrays of numbers, such as one for each class. Of another shape it is another metric.

        `rows` are this rank's rows of training and of validation, to weight by; None on all ranks: no weights.
        `batches` are those of its validation, if they are known. Raises ValueError on every rank, as weighted_means.
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
            problem = (f"fit cannot average metrics that only some ranks have: {where}. Callbacks that read them may "
                       "decide differently on each rank: give validation_data to all ranks.")
        elif rows is None and len({batches for _, batches, _ in found}) > 1:
            problem = (f"the ranks validate on different numbers of batches: "
                       f"{describe_by_rank([batches for _, batches, _ in found])}. The means of their metrics count "
                       "each rank alike. By rows: hvd.callbacks.MetricAverageCallback(weighted=True).")
        if problem and not self._has_warned and self._process_set.rank() == 0:
            logger.warning("mpistrat: %s", problem)
        self._has_warned |= bool(problem)


class AverageMetrics(Callback):
    """When an epoch ends, replaces metrics by their means if callbacks decide by them. Collective; fit adds it."""

    def __init__(self, name: str, process_set: ProcessSet):
        super().__init__()
        self._name, self._process_set, self._means = name, process_set, MetricMeans(process_set)
        self._is_needed = False

    def begin(self, readers: Sequence[Sequence[str]]) -> None:
        """Training begins; `readers` are the classes of callbacks on each rank that decide by metrics. Local."""
        found = {rank: of_rank for rank, of_rank in enumerate(readers) if of_rank}
        self._is_needed = bool(found)
        if found and self._process_set.rank() == 0:
            logger.info("rank 0: fit averages the metrics over the ranks at the end of each epoch, for %s on ranks %s",
                        ", ".join(sorted({name for names in found.values() for name in names})), rank_list(found))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._is_needed:
            self._means.replace(self._name, {} if logs is None else logs)


def _number(value: object) -> np.ndarray | None:
    """A number, an array or a tensor of numbers, in float64; None for anything else."""
    if not isinstance(value, int | float) and not hasattr(value, "dtype"):
        return None
    array = np.asarray(value)
    return None if array.dtype.kind in "OSUMm" else array.astype(np.float64)


def weighted_means(names: Sequence[str], rows: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The mean of each metric over the ranks, weighted by rows.

    Args:
        names: Those of the metrics; `val_...` are weighted by the rows of the validation.
        rows: For each rank its rows of training and of validation; UNKNOWN where there were batches but no rows.
        values: For each metric an array with those of the ranks.

    Raises:
        ValueError: Some rank does not know the rows that a metric needs, or no rank has any.
    """
    means = []
    for name, of_ranks in zip(names, values, strict=True):
        weights, step = (rows[:, 1], "test_step") if name.startswith("val_") else (rows[:, 0], "train_step")
        unknown = np.flatnonzero(weights == UNKNOWN).tolist()
        if unknown:
            raise ValueError(f"{name} cannot be weighted by rows: ranks {unknown} have had batches that the model's "
                             f"{step} did not get, or without a tensor that has rows, so their rows are not known. Use "
                             "MetricAverageCallback(weighted=False).")
        if not weights.any():
            raise ValueError(f"{name} cannot be weighted by rows: no rank has had any in {step}. Use "
                             "MetricAverageCallback(weighted=False).")
        # A rank without rows may have nan for a metric.
        means.append(np.average(of_ranks[weights > 0], axis=0, weights=weights[weights > 0]))
    return means


def shared_names(metrics: Sequence[dict[str, np.ndarray]]) -> tuple[list[str], dict[str, list[int]]]:
    """The names of the metrics that all ranks have, sorted, and the ranks of each other metric, with its shape."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, of_rank in enumerate(metrics):
        for name, value in of_rank.items():
            ranks.setdefault((name, np.shape(value)), []).append(rank)
    shared = sorted(name for (name, _), where in ranks.items() if len(where) == len(metrics))
    return shared, {f"{name} of shape {shape}" if shape else name: where for (name, shape), where in ranks.items()
                    if len(where) < len(metrics)}
