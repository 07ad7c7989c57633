"""JoinEpochs: ranks with fewer batches wait at the end of an epoch, and then get the weights of the others.

They wait in join(), which negotiation/joined.py describes. `fit.own_callbacks` adds the callback for an optimizer with
uneven="join". It runs in the thread that called fit.
"""

from collections.abc import Sequence
from typing import Any

import keras

from ..api import ops as array_ops
from ..tensorflow.ops import broadcast_variables
from .callbacks import LearningRateScheduleCallback
from .fit_optimizers import FitOptimizers


class JoinEpochs(keras.callbacks.Callback):
    """Calls join() after the last batch of each epoch. Collective; fit adds it for uneven="join", before all others.

    Until all ranks have joined, gradients are averaged over the ranks that still have batches. The rank with the most
    batches has made all updates, so all ranks get its trainable weights and optimizer state then: before the validation
    of the epoch, and before callbacks read or save the model. It need not be the last to join: with accumulated
    gradients it may have batches after its last update.

    Args:
        optimizers: Those of the model. Their local variables stay as they are.
    """

    def __init__(self, optimizers: FitOptimizers):
        super().__init__()
        self._optimizers = optimizers
        self._has_joined = True
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._has_joined, self._batches = False, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches = batch + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._join()  # Keras validates before the epoch ends for callbacks.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._join()

    def _join(self) -> None:
        if self._has_joined:
            return
        self._has_joined = True
        process_set = self._optimizers.process_set
        last = array_ops.join(process_set)
        batches: list[int] = array_ops.allgather_object(self._batches, "uneven.batches", process_set=process_set)
        longest = [rank for rank, count in zip(process_set.ranks or [], batches, strict=True) if count == max(batches)]
        variables = [*self.model.trainable_variables, *self._optimizers.variables]
        broadcast_variables(self._optimizers.shared(variables), last if last in longest else longest[0], process_set)


def use_longest_epoch(callbacks: Sequence[keras.callbacks.Callback], steps: Sequence[int | None]) -> None:
    """Let learning rates that change within an epoch follow the rank with most batches, so that ranks have the same.

    Args:
        callbacks: Those of fit, before they begin.
        steps: Steps per epoch of each rank; None where Keras does not know them.
    """
    known = [count for count in steps if count is not None]
    for callback in callbacks:
        if isinstance(callback, LearningRateScheduleCallback) and not callback.steps_per_epoch and known:
            callback.steps_per_epoch = max(known)
