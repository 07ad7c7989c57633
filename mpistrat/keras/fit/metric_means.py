"""The metrics of an epoch, replaced by their means over the ranks. Called by callbacks, in the thread of fit."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...api import ops as array_ops
from ...api.process_sets import ProcessSet
from ...core.topology import rank_list
from .row_counts import UNKNOWN

logger = logging.getLogger(__name__)


class MetricMeans:
    """Averages the metrics that all ranks of a process set have, and warns once if a rank lacks one."""

    def __init__(self, process_set: ProcessSet):
        self._process_set, self._has_warned = process_set, False

    def replace(self, name: str, logs: dict[str, Any], rows: tuple[int, int] | None = None) -> None:
        """Replace the metrics in `logs` by their means. Collective. Metrics that some ranks lack stay as they are.

        `rows` are this rank's rows of training and of validation, to weight by; None on all ranks: no weights. Raises
        ValueError on every rank, as weighted_means.
        """
        own = {key: float(value) for key, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str)}
        found = array_ops.allgather_object((rows, own), name, self._process_set)
        names, missing = shared_names([metrics for _, metrics in found])
        values = np.array([[metrics[key] for key in names] for _, metrics in found])
        means = np.mean(values, axis=0) if rows is None else \
            weighted_means(names, np.array([weights for weights, _ in found]), values)
        logs.update(zip(names, means.tolist(), strict=True))
        if missing and not self._has_warned and self._process_set.rank() == 0:
            logger.warning("rank 0: fit cannot average metrics that only some ranks have: %s. Callbacks that read them "
                           "may decide differently on each rank: give validation_data to all ranks.",
                           "; ".join(f"{key} on ranks {rank_list(ranks)}" for key, ranks in missing.items()))
        self._has_warned |= bool(missing)


def weighted_means(names: Sequence[str], rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of each metric over the ranks, weighted by rows.

    Args:
        names: Those of the metrics; `val_...` are weighted by the rows of the validation.
        rows: For each rank its rows of training and of validation; UNKNOWN where there were batches but no rows.
        values: For each rank its metrics.

    Raises:
        ValueError: Some rank does not know the rows that a metric needs, or no rank has any.
    """
    means = []
    for name, of_ranks in zip(names, values.T):
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
        means.append(np.sum(weights[weights > 0] * of_ranks[weights > 0]) / np.sum(weights))
    return np.array(means)


def shared_names(metrics: Sequence[dict[str, float]]) -> tuple[list[str], dict[str, list[int]]]:
    """The names of the metrics that all ranks have, sorted, and the ranks of each other metric."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(metrics):
        for name in of_rank:
            ranks.setdefault(name, []).append(rank)
    missing = {name: where for name, where in ranks.items() if len(where) < len(metrics)}
    return sorted(ranks.keys() - missing.keys()), missing
