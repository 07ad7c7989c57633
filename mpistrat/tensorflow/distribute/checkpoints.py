"""tf.train.Checkpoint and CheckpointManager of a strategy's variables: called on all ranks, written by the chief.

Both are patched when the first strategy is made, and do what they always do where there is none of its variables.
"""

import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ...errors import ShutdownError
from . import files
from .variables import RankMirroredVariable, RankSyncOnReadVariable

_originals: dict[type, Any] = {}


def patch() -> None:
    """Replace what writes; once. Run with TensorFlow 2.21."""
    if not _originals:
        _originals.update({tf.train.Checkpoint: tf.train.Checkpoint._write,
                           tf.train.CheckpointManager: tf.train.CheckpointManager.save})
        tf.train.Checkpoint._write = _write
        tf.train.CheckpointManager.save = _save


def undo() -> None:
    """Put back what `patch` has replaced."""
    if _originals:
        tf.train.Checkpoint._write = _originals.pop(tf.train.Checkpoint)
        tf.train.CheckpointManager.save = _originals.pop(tf.train.CheckpointManager)


def with_values_of(trackable: Any) -> Any:
    """A context in which this rank knows the aggregated values of what `trackable` has, for it to write. Collective."""
    values = {}
    for variable in _of_strategy(trackable):
        if isinstance(variable, RankSyncOnReadVariable):
            try:
                values[id(variable)] = tf.convert_to_tensor(variable._get_cross_replica())
            except ShutdownError:
                # The others have ended, so that there is nothing of theirs to add.
                values[id(variable)] = variable._get_replica(0).read_value()
    return files.known(values)


def _of_strategy(trackable: Any) -> Iterable[Any]:
    """The variables of an MPIStrategy that a checkpoint of `trackable` has, in the same order on all ranks."""
    # A variable of Keras is no tf.Variable; it has one.
    found = (getattr(node, "_value", node) for node in tf.train.TrackableView(trackable).descendants())
    return (variable for variable in found if isinstance(variable, RankMirroredVariable | RankSyncOnReadVariable))


def _is_of_strategy(checkpoint: Any) -> bool:
    return tf.executing_eagerly() and not files.is_alone() and any(True for _ in _of_strategy(checkpoint))


def _write(self: Any, file_prefix: str, options: Any = None) -> str:
    """Checkpoint._write, which `write`, `save` and CheckpointManager call."""
    original = _originals[tf.train.Checkpoint]
    if not _is_of_strategy(self):
        return original(self, file_prefix, options)
    # A rank may still be looking for the newest checkpoint, and is not to find this one.
    files.meet()
    with with_values_of(self):
        files.write_once(f"{file_prefix}.index", lambda: original(self, file_prefix, options))
    return file_prefix


def _save(self: Any, *args: Any, **kwargs: Any) -> str | None:
    """CheckpointManager.save; all ranks then know what the one that wrote has kept and deleted."""
    together = _is_of_strategy(self.checkpoint)
    path = _originals[tf.train.CheckpointManager](self, *args, **kwargs)
    if not together or path is None:
        return path
    directory = os.path.abspath(self.directory)
    everybody = files.meet(value=(directory, self._maybe_delete, self._latest_checkpoint,
                                  self._last_preserved_timestamp))
    if everybody is not None:
        _, self._maybe_delete, self._latest_checkpoint, self._last_preserved_timestamp = next(
            told.value for told in everybody if told.value[0] == directory)
    return path
