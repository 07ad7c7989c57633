"""Horovod's elastic API for Keras: the state of a model, and callbacks that keep it up to date.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

Under `mpistrat run --elastic` the job survives the loss of ranks and hosts. The method `sync` of the state is
collective. In an elastic job the method `commit` is collective too.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from ..api import array_ops, missing_names, runtime
from ..api.elastic import ElasticSampler, HostsUpdatedInterrupt, ObjectState, Snapshot, keep_going, run
from ..tensorflow.bridge.arguments import checked
from ..tensorflow.elastic import Averaging, TensorFlowKerasState
from .bridge.private_names import Callback, Logs
from .bridge.training import in_fit, is_under_strategy

__all__ = ["CommitStateCallback", "ElasticSampler", "HostsUpdatedInterrupt", "KerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]

__getattr__ = missing_names.explain(__name__)
logger = logging.getLogger(__name__)


class KerasState(TensorFlowKerasState):
    """The state of a training script: a Keras model, its optimizer, and Python objects.

    Args:
        model: A model whose weights have been created.
        optimizer: Default: the optimizer of model.compile. The optimizer's variables are created if they do not exist.
        averaging: The hvd.callbacks.LocalSGD or DiLoCo with which the model is trained. In an elastic job the ranks
            synchronise before a commit, and the commit includes the state of the callback.
        kwargs: Python objects, which become attributes of the state, for example `epoch=0`.

    Raises:
        ValueError: The model has no weights yet.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None,
                 averaging: Averaging | None = None, **kwargs: Any):
        super().__init__(model, optimizer, averaging=averaging, **kwargs)


class CommitStateCallback(Callback):
    """Commits the state every few batches, and at the end of each epoch. Local, but collective in an elastic job.

    Args:
        state: The state. Put callbacks that change the state before this callback.
        batches_per_commit: The number of batches per commit. Each commit copies all variables to the host's memory.
    """

    @checked
    def __init__(self, state: ObjectState, batches_per_commit: int = 1):
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self._remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            self.state.commit()
            self._remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Sets `state.batch` to the index (from 0) of the last finished batch, and to 0 when the epoch ends. Local."""

    def __init__(self, state: ObjectState):
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Adds 1 to `state.epoch` at the end of each epoch. Local."""

    def __init__(self, state: ObjectState):
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch += 1  # Not from `epoch`: Keras counts from fit()'s initial_epoch.


# -- the callback Elastic: fit goes on in its epoch and batch after the loss of ranks or hosts -------------------------
#
# In each generation the script calls fit alike. The callback finds the newest commit, so that fit begins in the epoch
# of the commit. The finished batches of this epoch are read, but not trained.

_fits = 0  # The number of calls of fit with Elastic in this process, in an elastic job


class Elastic(Callback):
    """Commits weights, optimizer, epoch and batch, so that fit survives the loss of ranks and hosts. Collective.

    The callback is for jobs of `mpistrat run --elastic`, and does nothing in other jobs. Pass it to fit on all ranks,
    as the last callback. The model must already have weights, from an Input layer or `build`. After a loss of ranks,
    fit continues with the batch after the last commit, in the order of the dataset. A dataset that is shuffled in each
    epoch then has a new order. The logs of the interrupted epoch cover the batches after the commit.

    With a distributed optimizer each rank trains the rows that its script has chosen. Processes that survive keep their
    rows, and the rows of a lost rank are left out. New processes run the script from its start, and choose rows for the
    new number of ranks. If that changes the number of batches per epoch, fit continues at the finished fraction of the
    epoch, rounded down to a batch (to k with steps_per_execution=k). So the rows of up to one batch (or k) are trained
    twice. If the number of batches is unknown (a generator), fit assumes that it is inversely proportional to the
    number of ranks. With `MPIStrategy`, or with `hvd.elastic.ElasticSampler` in a loop of your own, the remaining ranks
    train the rows of a lost rank.

    Args:
        commit_every: Batches per commit, rounded up to a multiple of steps_per_execution. Epochs end with a commit.

    Raises:
        ValueError: `commit_every` is below 1.
    """

    @checked
    def __init__(self, commit_every: int = 100):
        super().__init__()
        self.commit_every = commit_every
        self.state: FitState | None = None
        self._remaining = commit_every
        self._train_function: Callable[[Iterator[Any]], Any] | None = None  # while batches are read only

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.state is not None:
            self.state.find_place(self.params["steps"], is_under_strategy(self.model))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._remaining = self.commit_every
        if self.state is not None and self.state.batch:
            self._skip(self.state.batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.state is None:
            return
        each = self.model.steps_per_execution
        done = (batch // each + 1) * each  # `batch` is the last one of the execution, the first before Keras 3.9.
        if done <= self.state.batch:
            return
        self.state.batch = done
        self._remaining -= each
        # No commit after the last batch, since the epoch ends with one. After a restart from such a commit the epoch
        # would have no batch, and so no loss for callbacks. The last execution may have fewer batches.
        if self._remaining <= 0 and (self.params["steps"] is None or done < self.params["steps"]):
            self._remaining = self.commit_every
            self.state.commit()

    def on_test_begin(self, logs: Logs = None) -> None:
        self.train_again()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.train_again()
        if self.state is not None:
            numbers = {name: np.asarray(value, np.float64) for name, value in (logs or {}).items()}
            self.state.past = [*self.state.past, (epoch, {
                name: number if number.ndim else float(number) for name, number in numbers.items()})]
            self.state.epoch, self.state.batch = epoch + 1, 0
            self.state.commit()

    def _skip(self, batches: int) -> None:
        """Make fit read the next `batches` batches without training. These batches have no logs.

        With steps_per_execution=k, k batches are skipped or trained together. `batches` is rounded down to a multiple
        of k, so that no batch stays untrained. Up to k - 1 finished batches are then trained twice.
        """
        self._train_function, each = self.model.train_function, self.model.steps_per_execution
        left = batches // each * each

        def read_first(iterator: Iterator[Any]) -> Any:
            nonlocal left
            if left <= 0:
                self.train_again()
                return self.model.train_function(iterator)
            for _ in range(each):
                next(iterator)
            left -= each
            return {}

        self.model.train_function = read_first
        self._tell(is_reading=True)
        # If no batch is left, Keras still asks for the metrics, which exist only after a batch was trained.
        self.model.get_metrics_result = dict

    def train_again(self) -> None:
        """Stop skipping batches that were trained before a restart, so that fit trains the model again. Local."""
        if self._train_function is not None:
            self.model.train_function, self._train_function = self._train_function, None
            del self.model.get_metrics_result
            self._tell(is_reading=False)

    def _tell(self, is_reading: bool) -> None:
        if self.model in in_fit:
            in_fit[self.model].is_reading = is_reading


class FitState(TensorFlowKerasState):
    """The progress of one call of fit. `fit` is the number of the call in the script, and `epoch` the current epoch."""

    batch: int  # The number of finished batches of the epoch
    size: int  # The number of ranks among which the rows were divided
    steps: int | None  # The number of batches per epoch, on the rank with the most; None if Keras did not know it
    past: list[tuple[int, dict[str, Any]]]  # The finished epochs, and their logs
    done_in: int  # The number of a later fit, if the newest commit belongs to it; else 0

    def __init__(self, model: keras.Model, fit: int, epoch: int, averaging: Averaging | None = None):
        # If this process survives a loss of ranks, it keeps its current rows.
        self._own_size = _size()
        super().__init__(model, averaging=averaging, fit=fit, epoch=epoch, batch=0, size=self._own_size, past=[],
                         done_in=0, steps=None)

    def find_place(self, steps: int | None, is_under_strategy: bool) -> None:
        """Scale the attribute `batch` to the present length of epochs, which is `steps` on this rank. Collective."""
        each: list[int | None] = array_ops.allgather_object(steps, name="elastic.steps")
        known = [count for count in each if count is not None]
        steps = max(known) if len(known) == len(each) else None
        if steps is not None and self.steps is not None:
            self.batch = self.batch * steps // self.steps
        elif not is_under_strategy:
            self.batch = self.batch * self.size // self._own_size
        self.steps, self.size = steps, self._own_size

    def _take(self, snapshot: Snapshot) -> None:
        if snapshot["values"]["fit"] > self.fit:
            self.done_in = snapshot["values"]["fit"]
        elif snapshot["values"]["fit"] == self.fit:
            super()._take(snapshot)


def run_fit(callback: Elastic, fit: Callable[[int], Any], model: keras.Model, initial_epoch: int,
            averaging: Averaging | None = None) -> Any:
    """Call `fit` with `initial_epoch`, and after each loss of ranks with the epoch of the last commit. Collective."""
    global _fits
    _fits += 1
    with model.distribute_strategy.scope() if model.distribute_strategy is not None else contextlib.nullcontext():
        state = FitState(model, _fits, initial_epoch, averaging)

    def train() -> Any:
        if state.done_in:
            logger.info("call %d of fit is skipped, since the newest commit was made in call %d", _fits, state.done_in)
            return keras.callbacks.History()
        callback.state = state
        try:
            history = fit(state.epoch)
        finally:
            callback.train_again()
        for epoch, logs in reversed([each for each in state.past if each[0] not in history.epoch]):
            history.epoch.insert(0, epoch)  # An epoch of an earlier generation
            for name, value in logs.items():
                history.history.setdefault(name, []).insert(0, value)
        return history

    try:
        return keep_going(state, train)
    finally:
        callback.state = None


def _size() -> int:
    return runtime.current().topology.size
