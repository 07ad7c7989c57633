"""Counts the steps and rows of fit for `mpistrat run --efficiency`. See process/step_timer."""

from typing import Any

from keras.callbacks import Callback

from ...process.step_timer import StepTimer
from .row_counts import RowCount

Logs = dict[str, Any] | None


class TimedSteps(Callback):
    """Ends the script after the last step that is timed. Local; fit adds it on all ranks, and on one rank alone."""

    def __init__(self, timer: StepTimer, is_global: bool):
        super().__init__()
        self._timer, self._is_global = timer, is_global

    def on_train_begin(self, logs: Logs = None) -> None:
        self._rows = RowCount.of(self.model, "train_step")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps = 0  # of this epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        ended, self._steps = batch + 1 - self._steps, batch + 1
        self._timer.end_step(ended, self._rows.rows or None, self._is_global)
        self._timer.end_script()
