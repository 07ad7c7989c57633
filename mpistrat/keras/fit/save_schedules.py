"""SaveSchedule: the batches after which a ModelCheckpoint with a number as save_freq saves the model.

Called by what mpistrat adds to fit; local.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from keras.callbacks import Callback, ModelCheckpoint

from .running_statistics import AverageStatistics


@dataclass(frozen=True)
class SaveSchedule:
    """The state of a ModelCheckpoint's count, which goes on from epoch to epoch, and from fit to fit.

    Attributes:
        save_freq: Batches between two saves.
        seen: Batches since the last save.
        last: The number of the last batch in its epoch; None before the first.
    """

    save_freq: int
    seen: int = 0
    last: int | None = None

    def after(self, batch: int) -> "SaveSchedule":
        """The state after this batch. A step of several batches has the number of its last batch, as in Keras."""
        seen = self.seen + (batch + 1 if self.last is None or batch <= self.last else batch - self.last)
        return replace(self, seen=0 if seen >= self.save_freq else seen, last=batch)

    @property
    def saves(self) -> bool:
        """Whether the model is saved after the last batch."""
        return self.last is not None and self.seen == 0


_schedules: WeakKeyDictionary[Callback, SaveSchedule] = WeakKeyDictionary()


def schedules_of(callbacks: Sequence[Callback]) -> tuple[SaveSchedule, ...]:
    """The schedules of those callbacks that save the model within an epoch."""
    return tuple(_schedules.setdefault(callback, SaveSchedule(callback.save_freq)) for callback in callbacks
                 if isinstance(callback, ModelCheckpoint) and callback.save_freq != "epoch")


class AverageBeforeSaves(Callback):
    """Averages the running statistics before a callback of any rank saves the model within an epoch. Collective.

    fit adds it before the callbacks that save the model. `schedules` has those of the callbacks of all ranks.
    """

    def __init__(self, statistics: AverageStatistics, callbacks: Sequence[Callback]):
        super().__init__()
        self._statistics, self._callbacks = statistics, callbacks
        self.schedules: list[SaveSchedule] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._callbacks:
            if callback in _schedules:
                _schedules[callback] = _schedules[callback].after(batch)
        self.schedules = [schedule.after(batch) for schedule in self.schedules]
        if any(schedule.saves for schedule in self.schedules):
            self._statistics.average()
