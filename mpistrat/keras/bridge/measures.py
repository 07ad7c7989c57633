"""Measurements during fit: the rows of each rank, the means of metrics over the ranks, and the speed of all ranks.

Keras callbacks call these functions, in the thread that called fit.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...api import array_ops, runtime
from ...api.process_sets import ProcessSet, global_process_set, resolved
from ...api.runtime import waits_between
from ...core.slowest import Waits, figure, shares_of, total
from ...core.topology import describe_by_rank, rank_list
from ...tensorflow.xla.context import device_here
from .private_names import Callback, Logs
from .training import name_in_fit

logger = logging.getLogger(__name__)

# -- rows --------------------------------------------------------------------------------------------------------------
#
# Keras counts the batches of fit, but not the rows, and the last batch of an epoch may be short. `train_step` and
# `test_step` are public methods that get each batch, also in user-defined classes. So the count is exact for arrays,
# datasets and generators, and does not run ahead of training, as a count in a dataset with prefetching would.

UNKNOWN = -1  # A number of rows that is not known

_numbers = itertools.count()


class LocalScalar:
    """A number of this rank that training steps read or increase. Each device that runs steps has a variable for it.

    XLA needs a variable on the step's device. A tf.Variable is not used: a strategy would create it in its own way.
    """

    def __init__(self, dtype: tf.DType, value: int):
        self._dtype, self._value = dtype, value
        self._handles: dict[str, tf.Tensor] = {}  # by device

    def assign(self, value: int | bool) -> None:
        """Set the variables of all devices to `value`. For eager code."""
        self._value = value
        for handle in self._handles.values():
            self._assign_to(handle)

    def add(self, value: tf.Tensor) -> None:
        """Add to the variable on the device of the step that TensorFlow is tracing."""
        tf.raw_ops.AssignAddVariableOp(resource=self._handle(), value=value)

    def read(self) -> tf.Tensor:
        """Return the value of the variable on the device of the step that TensorFlow is tracing."""
        return self._read_from(self._handle())

    def sum(self) -> int:
        """Return the sum over all devices: the sum of all added values, if the number began at 0. For eager code."""
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


def row_count_of(model: keras.Model, step: str) -> LocalScalar:
    """Return the counter of the rows that the model's method `step` gets; `step` is "train_step" or "test_step". Local.

    The counter is never reset: callers subtract an earlier value. Batches whose rows cannot be counted (see `rows_of`)
    add 0. The first call wraps the method, so Keras traces it again. The wrapper stays for later fits.
    """
    original = getattr(model, step)
    if (found := getattr(original, "mpistrat_rows", None)) is not None:
        return found
    count = LocalScalar(tf.int64, 0)

    @tf.autograph.experimental.do_not_convert
    def counting_step(data: object) -> object:
        rows = rows_of(data)
        if rows is not None:
            count.add(rows)
        return original(data)

    counting_step.mpistrat_rows = count
    setattr(model, step, counting_step)
    make_function = {"train_step": model.make_train_function, "test_step": model.make_test_function}[step]
    make_function(force=True)
    return count


def rows_of(data: object) -> tf.Tensor | None:
    """Return a batch's number of rows (int64), the size of axis 0 of its first non-scalar tensor, or else None."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) else \
                tf.cast(leaf.nrows(), tf.int64) if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0]
    return None


# -- metrics -----------------------------------------------------------------------------------------------------------


class MetricMeans:
    """Averages the metrics that all ranks of a process set have.

    Logs one warning if a rank lacks a metric, or if the ranks have validated on different numbers of batches.
    """

    def __init__(self, process_set: ProcessSet):
        self._process_set, self._has_warned = process_set, False

    def replace(self, name: str, logs: dict[str, Any], rows: tuple[int, int] | None = None, batches: int = 0) -> None:
        """Replace the metrics in `logs` by their means over the ranks. Metrics that some ranks lack stay as they are.

        Collective. A metric is a number or an array of numbers; arrays of different shapes are different metrics.
        `rows` has this rank's training and validation rows, the weights. All ranks pass None for equal weights.
        `batches` is this rank's number of validation batches. Raises ValueError as weighted_means does.
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
                       f"{describe_by_rank([batches for _, batches, _ in found])}. The average of a metric gives all "
                       "ranks the same weight. To weight by rows, write MetricAverageCallback(weighted=True).")
        if problem and not self._has_warned and self._process_set.rank() == 0:
            logger.warning("mpistrat: %s", problem)
        self._has_warned |= bool(problem)


class AverageMetrics(Callback):
    """Averages metrics when an epoch ends, if a callback such as EarlyStopping reads them. Collective; fit adds it."""

    def __init__(self, name: str, process_set: ProcessSet):
        super().__init__()
        self._name, self._process_set, self._means = name, process_set, MetricMeans(process_set)
        self._is_needed = False

    def begin(self, readers: Sequence[Sequence[str]]) -> None:
        """Average from now on if a rank has callbacks that decide by metrics: `readers` are their classes by rank."""
        found = {rank: of_rank for rank, of_rank in enumerate(readers) if of_rank}
        self._is_needed = bool(found)
        if found and self._process_set.rank() == 0:
            logger.info("rank 0: fit averages the metrics over the ranks at the end of each epoch, because of the "
                        "callbacks %s on ranks %s",
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
    """Return the mean of each metric over the ranks, weighted by training rows, or for `val_...` by validation rows.

    `rows` has for each rank its training and its validation rows. `values` has for each name an array with an item per
    rank. Raises ValueError if the number of rows that a metric needs is UNKNOWN on a rank, or is 0 on all ranks.
    """
    means = []
    for name, of_ranks in zip(names, values, strict=True):
        weights, step = (rows[:, 1], "test_step") if name.startswith("val_") else (rows[:, 0], "train_step")
        unknown = np.flatnonzero(weights == UNKNOWN).tolist()
        if unknown:
            raise ValueError(f"{name} cannot be weighted by rows. On ranks {unknown} the number of rows is unknown, "
                             f"because batches did not go through the model's {step}, or their tensors have no batch "
                             "dimension. Use MetricAverageCallback(weighted=False).")
        if not weights.any():
            raise ValueError(f"{name} cannot be weighted by rows, since {step} got no rows on any rank. Use "
                             "MetricAverageCallback(weighted=False).")
        # The metric of a rank without rows may be nan.
        means.append(np.average(of_ranks[weights > 0], axis=0, weights=weights[weights > 0]))
    return means


def shared_names(metrics: Sequence[dict[str, np.ndarray]]) -> tuple[list[str], dict[str, list[int]]]:
    """Return the sorted names of metrics that all ranks have, and for each remaining metric the ranks that have it."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, of_rank in enumerate(metrics):
        for name, value in of_rank.items():
            ranks.setdefault((name, np.shape(value)), []).append(rank)
    shared = sorted(name for (name, _), where in ranks.items() if len(where) == len(metrics))
    return shared, {f"{name} of shape {shape}" if shape else name: where for (name, shape), where in ranks.items()
                    if len(where) < len(metrics)}


# -- speed -------------------------------------------------------------------------------------------------------------
#
# Only training counts, not validation or the first step, in which TensorFlow traces.


@dataclass(frozen=True)
class Work:
    """What one rank has trained: the numbers of rows and steps, and the time."""

    rows: int  # UNKNOWN if steps have run but no row was counted
    steps: int  # The number of Keras' steps, each with one batch
    seconds: float  # The time from the beginning of the first step, or of the epoch, to the end of the last step
    waits: Waits = field(default=Waits(), compare=False)  # In the last part of the time, where collectives are known

    def __add__(self, other: "Work") -> "Work":
        return Work(UNKNOWN if UNKNOWN in (self.rows, other.rows) else self.rows + other.rows,
                    self.steps + other.steps, self.seconds + other.seconds, total([self.waits, other.waits]))


def speed_of(works: Sequence[Work]) -> tuple[str, float]:
    """Return the unit, and the number of units per second, of ranks that have trained in parallel (`works`).

    The unit is "rows". If the number of rows of a rank is UNKNOWN, the unit is "steps", and all ranks together make one
    step. The number is nan if nothing was measured.
    """
    seconds = max(work.seconds for work in works)
    is_known = all(work.rows != UNKNOWN for work in works)
    done = sum(work.rows for work in works) if is_known else max(work.steps for work in works)
    return "rows" if is_known else "steps", done / seconds if done and seconds else float("nan")


def line_of(unit: str, per_second: float, works: Sequence[Work], names: Sequence[str]) -> str:
    """Return the line that rank 0 prints at the end of fit. `works` and `names` have an item per rank, in order."""
    return (f"mpistrat: fit has trained {figure(per_second)} {unit} per second on {len(works)} ranks"
            f"{shares_of([work.waits for work in works], names)}.")


class Throughput(Callback):
    """Writes the number of rows per second, for all ranks together, into the logs of each epoch. Collective.

    The key is `rows_per_second`, or `steps_per_second` if the rows of a rank cannot be counted. A step that all ranks
    make together counts once. All ranks get the same number. Put the callback before callbacks that read the logs
    (CSVLogger, TensorBoard). Keras prints the number, too. The speed depends on the time of the slowest rank, from the
    beginning of the epoch to the end of the last step, including waits for data, but not validation. The first
    step of fit does not count, because TensorFlow traces it. If the first epoch has no other step, its value is nan.

    At the end of fit rank 0 prints the speed over all epochs, even without this callback, unless `verbose=0`.

    Args:
        process_set: The ranks that take part. On other ranks the callback does nothing.
    """

    async_safe = True  # Keras may call on_train_batch_end in another thread, but waits for it before on_epoch_end.

    def __init__(self, process_set: ProcessSet = global_process_set):
        super().__init__()
        self._process_set = resolved(process_set)
        self._rows: LocalScalar | None = None  # None on ranks that take no part
        self._begun = self._steps = 0  # steps of fit that have begun, and steps of the epoch that have ended

    def on_train_begin(self, logs: Logs = None) -> None:
        self._rows, self._begun = None, 0
        if not self._process_set.included():
            return
        self._rows = rows = row_count_of(self.model, "train_step")
        if (tracer := runtime.current().tracer) is not None:  # `mpistrat top` shows the rows, too.
            tracer.is_line_due = False  # The line of fit, unless fit is silent, has more.
            before = (tracer.rows() if tracer.rows is not None else 0) - rows.sum()
            tracer.rows = lambda: before + rows.sum()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps = 0
        self._begin()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._begun += 1
        if self._begun == 2 and self._steps:  # The time before the second step of fit does not count.
            self._begin()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._steps, self._ended = max(self._steps, batch + 1), time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._rows is None:
            return
        name = name_in_fit(self.model, "epoch_throughput", self._process_set)
        unit, per_second = speed_of(array_ops.allgather_object(self._work_since_begin(self._rows), name,
                                                               self._process_set))
        if logs is not None:
            logs[f"{unit}_per_second"] = per_second

    def _begin(self) -> None:
        if self._rows is not None:
            self._steps_before, self._rows_before = self._steps, self._rows.sum()
            self._began = self._ended = time.perf_counter()

    def _work_since_begin(self, counted: LocalScalar) -> Work:
        if self._begun < 2:
            return Work(0, 0, 0.0)
        steps, rows = self._steps - self._steps_before, counted.sum() - self._rows_before
        return Work(UNKNOWN if steps and not rows else rows, steps, self._ended - self._began,
                    waits_between(self._began, self._ended, self._process_set.process_set_id or 0))


class FitThroughput(Throughput):
    """Prints the speed over all epochs of fit, on the first rank of a process set. Collective. fit adds this callback.

    The collective is named `name`. If `is_silent()`, which is equal on all ranks, is True, nothing is sent or printed.
    """

    def __init__(self, name: str, process_set: ProcessSet, is_silent: Callable[[], bool]):
        super().__init__(process_set)
        self._name, self._work, self._is_silent = name, Work(0, 0, 0.0), is_silent

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._rows is not None:
            self._work += self._work_since_begin(self._rows)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._is_silent():
            return
        *counts, waits = astuple(self._work)
        numbers = array_ops.allgather(np.array([[*counts, *waits]]), self._name, self._process_set)
        works = [Work(int(rows), int(steps), seconds, Waits(*waits)) for rows, steps, seconds, *waits in
                 numbers.tolist()]
        unit, per_second = speed_of(works)
        if self._process_set.rank() == 0 and not math.isnan(per_second):
            host_of = runtime.current().topology.host_of
            names = [f"rank {rank} on {host_of[rank]}" for rank in self._process_set.ranks or range(len(works))]
            print(line_of(unit, per_second, works, names), flush=True)
