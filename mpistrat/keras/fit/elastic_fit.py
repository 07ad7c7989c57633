"""The callback Elastic: in an elastic job, fit goes on in its epoch and batch after the loss of ranks or hosts.

A script of the next generation calls fit as the one before did. Elastic, which fit has among its callbacks, finds the
newest commit, so that fit begins in that epoch. The batches of this epoch that are done are read, but not trained.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ...api import runtime
from ...api.elastic import Snapshot, keep_going
from ...tensorflow.distribute import MPIStrategy
from ...tensorflow.elastic import TensorFlowKerasState

logger = logging.getLogger(__name__)
Logs = dict[str, Any] | None

_fits = 0  # How often this process has called fit with Elastic, in the job.


class Elastic(keras.callbacks.Callback):
    """Commits weights, optimizer, epoch and batch, so that fit survives the loss of ranks and hosts. Collective.

    For jobs of `mpistrat run --elastic`; in other jobs it does nothing. Pass it to fit on all ranks, as the last
    callback. The model must have its weights, by an Input layer or by `build`. After a loss fit goes on with the next
    batch of the epoch: of the dataset's order, which is a new one if it is shuffled anew in each epoch. With a
    distributed optimizer and another number of ranks it goes on at the same share of the epoch, rounded down, so the
    rows of up to one batch are trained twice; `hvd.elastic.ElasticSampler` in a loop of your own repeats none.

    Args:
        commit_every: Batches between two commits. There is also one at the end of each epoch.

    Raises:
        ValueError: `commit_every` is below 1.
    """

    def __init__(self, commit_every: int = 100):
        super().__init__()
        if commit_every < 1:
            raise ValueError(f"commit_every must be at least 1. Received: {commit_every}")
        self.commit_every = commit_every
        self.state: FitState | None = None
        self._remaining = commit_every

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._remaining = self.commit_every
        if self.state is not None and self.state.batch:
            _skip(self.model, self.state.batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.state is None or batch < self.state.batch:
            return
        self.state.batch = batch + 1
        self._remaining -= 1
        if self._remaining <= 0:
            self._remaining = self.commit_every
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.state is not None:
            self.state.past = [*self.state.past, (epoch, {name: float(value) for name, value in (logs or {}).items()})]
            self.state.epoch, self.state.batch = epoch + 1, 0
            self.state.commit()


class FitState(TensorFlowKerasState):
    """Where a fit is.

    Attributes:
        fit: Which call of fit of the script it is.
        epoch, batch: The epoch, and how many of its batches are done.
        size: The number of ranks with which they were done.
        past: The epochs that are done, and their logs.
        done_in: A later fit of which the newest commit is; 0 if there is none.
    """

    batch: int
    size: int

    def __init__(self, model: keras.Model, fit: int, epoch: int):
        super().__init__(model, fit=fit, epoch=epoch, batch=0, size=_size(), past=[], done_in=0)

    def _take(self, snapshot: Snapshot) -> None:
        if snapshot["values"]["fit"] > self.fit:
            self.done_in = snapshot["values"]["fit"]
        elif snapshot["values"]["fit"] == self.fit:
            super()._take(snapshot)

    def rescale(self) -> None:
        """Count batches as the ranks that there are now do."""
        if not isinstance(self.model.distribute_strategy, MPIStrategy):
            self.batch = self.batch * self.size // _size()
        self.size = _size()


def run_fit(callback: Elastic, fit: Callable[[int], Any], model: keras.Model, initial_epoch: int) -> Any:
    """Call `fit` with the epoch in which it begins, again and again until it ends. Collective. In an elastic job only.
    """
    global _fits
    _fits += 1
    with model.distribute_strategy.scope() if model.distribute_strategy is not None else contextlib.nullcontext():
        state = FitState(model, _fits, initial_epoch)

    def train() -> Any:
        if state.done_in:
            logger.info("fit %d of this script is skipped: the newest commit is one of fit %d", _fits, state.done_in)
            return keras.callbacks.History()
        state.rescale()
        callback.state = state
        return _with_past(state.past, fit(state.epoch))

    try:
        return keep_going(state, train)
    finally:
        callback.state = None


def _with_past(past: list[tuple[int, dict[str, float]]], history: keras.callbacks.History) -> keras.callbacks.History:
    """A History also of the epochs that earlier generations have done."""
    for epoch, logs in reversed([each for each in past if each[0] not in history.epoch]):
        history.epoch.insert(0, epoch)
        for name, value in logs.items():
            history.history.setdefault(name, []).insert(0, value)
    return history


def _skip(model: keras.Model, batches: int) -> None:
    """Let the next `batches` batches be read only. Callbacks see them, with the metrics as they are."""
    train, each, left = model.train_function, model.steps_per_execution, batches

    def read_only(iterator: Iterator[Any]) -> dict[str, Any]:
        nonlocal left
        for _ in range(each):
            next(iterator)
        left -= each
        if left <= 0:
            model.train_function = train
        return dict(model.get_metrics_result())

    model.train_function = read_only


def _size() -> int:
    return runtime.current().topology.size
