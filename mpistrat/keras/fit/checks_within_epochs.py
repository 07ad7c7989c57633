"""ChecksWithinEpochs: weights that drift apart are found within an epoch, not only when it ends.

The checks of fit add it, for distributed optimizers and under MPIStrategy. It runs in the thread of fit.
"""

from collections.abc import Callable
from typing import Any

from keras.callbacks import Callback

Logs = dict[str, Any] | None


class ChecksWithinEpochs(Callback):
    """Calls `check` before a batch when so many have passed, in the epoch or since the last call.

    With steps_per_execution it is before the next execution. Nothing is called after a batch, because Keras may do that
    in another thread while the next step runs.

    Args:
        check: Gets the place for messages: "fit: before batch 1001 of epoch 3". On all ranks it is called alike.
        every: The number of batches.
    """

    def __init__(self, check: Callable[[str], None], every: int):
        super().__init__()
        self._check, self._every = check, every
        self._epoch, self._next = 0, every

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._next = epoch, self._every

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if batch >= self._next:
            self._next = batch + self._every
            self._check(f"fit: before batch {batch + 1} of epoch {self._epoch + 1}")
