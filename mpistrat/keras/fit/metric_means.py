"""The metrics of an epoch, replaced by their means over the ranks. Called by callbacks, in the thread of fit."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...api import ops as array_ops
from ...api.process_sets import ProcessSet
from ...core.topology import describe_by_rank, rank_list
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

        `rows` are this rank's rows of training and of validation, to weight by; None on all ranks: no weights.
        `batches` are those of its validation, if they are known. Raises ValueError on every rank, as weighted_means.
        """
        own = {key: float(value) for key, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str)}
        found = array_ops.allgather_object((rows, batches, own), name, self._process_set)
        names, missing = shared_names([metrics for *_, metrics in found])
        values = np.array([[metrics[key] for key in names] for *_, metrics in found])
        means = np.mean(values, axis=0) if rows is None else \
            weighted_means(names, np.array([weights for weights, *_ in found]), values)
        logs.update(zip(names, means.tolist(), strict=True))
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
