"""Horovod's elastic API for Keras: the state of a model, and callbacks that keep it up to date.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

Under `mpistrat run --elastic` the job survives the loss of ranks and hosts. `sync` is collective; in an elastic job
`commit` is collective too.
"""

from typing import Any

import keras

from ..api import missing_names
from ..api.elastic import ElasticSampler, HostsUpdatedInterrupt, ObjectState, run
from ..tensorflow.elastic import Averaging, TensorFlowKerasState
from .bridge.private_names import Callback, Logs

__all__ = ["CommitStateCallback", "ElasticSampler", "HostsUpdatedInterrupt", "KerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]

__getattr__ = missing_names.explain(__name__)


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer, and Python objects that are the state of a training script.

    Args:
        model: A model that has its weights already.
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
    """Commits the state after some batches, and after each epoch. Local, but collective in an elastic job.

    Args:
        state: The state. Put callbacks that change it before this one.
        batches_per_commit: The number of batches per commit. Each commit copies all variables to the host's memory.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1):
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be at least 1. Received: {batches_per_commit}")
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
    """Sets `state.batch` to the number of the last batch in the epoch, and to 0 at the end of the epoch. Local."""

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
