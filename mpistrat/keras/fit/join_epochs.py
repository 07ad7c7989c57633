"""JoinEpochs: ranks with fewer batches wait at the end of an epoch, and then get the weights of the others.

The ranks wait in join(), which negotiation/subtree.py describes. `own_callbacks` adds the callback for an optimizer
with uneven="join". The callback runs in the thread that called fit.
"""

from collections.abc import Sequence

import keras
import numpy as np

from ...api import array_ops
from ...tensorflow.ops import broadcast_
from ..bridge.private_names import Callback, Logs
from ..bridge.training import Training
from ..callbacks import LearningRateScheduleCallback


class JoinEpochs(Callback):
    """Calls join() after the last batch of each epoch. Collective; fit adds it for uneven="join", before all others.

    Until all ranks have joined, gradients are averaged over the ranks that still have batches. The rank with the most
    batches has made all updates, so its trainable weights and optimizer state, except local variables, are broadcast to
    all ranks: before the validation of the epoch, and before callbacks read or save the model. (This rank need not be
    the last to join: with accumulated gradients some batches do not communicate.)
    """

    def __init__(self, training: Training):
        super().__init__()
        self._training = training
        self._has_joined = True

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._has_joined = False

    def on_test_begin(self, logs: Logs = None) -> None:
        self._join()  # Keras validates before the epoch ends for callbacks.

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._join()

    def _join(self) -> None:
        if self._has_joined:
            return
        self._has_joined = True
        process_set = self._training.process_set
        array_ops.join(process_set)
        calls = array_ops.allgather([self._training.calls], f"{self._training.name}/calls", process_set)
        variables = [*self.model.trainable_variables, *self._training.variables]
        ranks = process_set.ranks
        assert ranks is not None  # The set is registered, since it has joined.
        most = ranks[int(np.argmax(calls))]  # The first of ranks with as many batches; the root is a rank of the job.
        broadcast_(self._training.shared(variables), most, f"{self._training.name}/joined", process_set)


def use_longest_epoch(callbacks: Sequence[keras.callbacks.Callback], steps: Sequence[int | None]) -> None:
    """Let schedules within an epoch use the steps of the rank with most batches, so that all ranks have equal rates.

    `steps` has each rank's steps per epoch, or None where Keras does not know. Called before the callbacks begin.
    """
    known = [count for count in steps if count is not None]
    for callback in callbacks:
        if isinstance(callback, LearningRateScheduleCallback) and not callback.steps_per_epoch and known:
            callback.steps_per_epoch = max(known)
