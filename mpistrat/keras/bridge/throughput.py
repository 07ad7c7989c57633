"""The speed of training: the rows or steps of all ranks per second, for each epoch and for the whole of fit.

Only training counts, not validation or the first step, in which TensorFlow traces. Runs in the thread of fit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np

from ...api import array_ops, runtime
from ...api.process_sets import ProcessSet, global_process_set, resolved
from ...api.runtime import waits_between
from ...core.slowest import Waits, figure, shares_of, total
from .private_names import Callback, Logs
from .row_counts import UNKNOWN, RowCount
from .training import name_in_fit


@dataclass(frozen=True)
class Work:
    """The training of one rank."""

    rows: int  # UNKNOWN if steps have run but no row was counted
    steps: int  # The number of Keras' steps, each with one batch
    seconds: float  # The time from the beginning of the first step, or of the epoch, to the end of the last step
    waits: Waits = field(default=Waits(), compare=False)  # In the last part of the time, where collectives are known

    def __add__(self, other: "Work") -> "Work":
        return Work(UNKNOWN if UNKNOWN in (self.rows, other.rows) else self.rows + other.rows,
                    self.steps + other.steps, self.seconds + other.seconds, total([self.waits, other.waits]))


@dataclass(frozen=True)
class Speed:
    """The speed of training of all ranks together."""

    unit: str  # "rows", or "steps" if the rows of some rank are unknown. All ranks together make a step.
    per_second: float  # nan if nothing was measured


def speed_of(works: Sequence[Work]) -> Speed:
    """Return the speed of ranks that have done `works` in parallel."""
    seconds = max(work.seconds for work in works)
    is_known = all(work.rows != UNKNOWN for work in works)
    done = sum(work.rows for work in works) if is_known else max(work.steps for work in works)
    return Speed("rows" if is_known else "steps", done / seconds if done and seconds else float("nan"))


def line_of(speed: Speed, works: Sequence[Work], names: Sequence[str]) -> str:
    """Return the line that rank 0 prints at the end of fit. `works` and `names` are in rank order."""
    return (f"mpistrat: fit has trained {figure(speed.per_second)} {speed.unit} per second on {len(works)} ranks"
            f"{shares_of([work.waits for work in works], names)}.")


class Throughput(Callback):
    """Adds the rows per second of all ranks together to the logs of each epoch. Collective.

    The key is `rows_per_second`, or `steps_per_second` if the rows of some rank cannot be counted. All ranks together
    make one step. All ranks get the same number. Put the callback before callbacks that read the logs (CSVLogger,
    TensorBoard). Keras' own line of the epoch shows the number too. The time is that of the slowest rank, from the
    beginning of the epoch to the end of the last step, including waits for data, but not validation. The first step of
    fit does not count, because TensorFlow traces it. The value is nan for an epoch without a second step.

    At the end of fit rank 0 prints the speed of all epochs, also without this callback, unless `verbose=0`.

    Args:
        process_set: The ranks that take part. On other ranks the callback does nothing.
    """

    async_safe = True  # Keras may call on_train_batch_end in another thread, but waits for it before on_epoch_end.

    def __init__(self, process_set: ProcessSet = global_process_set):
        super().__init__()
        self._process_set = resolved(process_set)
        self._rows: RowCount | None = None  # None on ranks that take no part
        self._begun = self._steps = 0  # steps of fit that have begun, and steps of the epoch that have ended

    def on_train_begin(self, logs: Logs = None) -> None:
        self._rows, self._begun = None, 0
        if not self._process_set.included():
            return
        self._rows = rows = RowCount.of(self.model, "train_step")
        if (tracer := runtime.current().tracer) is not None:  # `mpistrat top` shows the rows, too.
            tracer.is_line_due = False  # The line of fit, unless fit is silent, has more.
            before = (tracer.rows() if tracer.rows is not None else 0) - rows.rows
            tracer.rows = lambda: before + rows.rows

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
        speed = speed_of(array_ops.allgather_object(self._work_since_begin(self._rows), name, self._process_set))
        if logs is not None:
            logs[f"{speed.unit}_per_second"] = speed.per_second

    def _begin(self) -> None:
        if self._rows is not None:
            self._steps_before, self._rows_before = self._steps, self._rows.rows
            self._began = self._ended = time.perf_counter()

    def _work_since_begin(self, counted: RowCount) -> Work:
        if self._begun < 2:
            return Work(0, 0, 0.0)
        steps, rows = self._steps - self._steps_before, counted.rows - self._rows_before
        return Work(UNKNOWN if steps and not rows else rows, steps, self._ended - self._began,
                    waits_between(self._began, self._ended, self._process_set.process_set_id or 0))


class FitThroughput(Throughput):
    """Prints the speed of the whole of fit on the first rank of a process set. Collective, with `name`; fit adds it.

    Args:
        is_silent: A function, the same on all ranks. If it returns True, the ranks exchange and print nothing.
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
        speed = speed_of(works)
        if self._process_set.rank() == 0 and not math.isnan(speed.per_second):
            host_of = runtime.current().topology.host_of
            names = [f"rank {rank} on {host_of[rank]}" for rank in self._process_set.ranks or range(len(works))]
            print(line_of(speed, works, names), flush=True)
