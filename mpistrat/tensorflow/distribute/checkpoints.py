"""tf.train.Checkpoint and CheckpointManager of a strategy's variables: called on all ranks, written by the chief.

Both are patched when the first strategy is made, and do what they always do where there is none of its variables.

An asynchronous checkpoint (CheckpointOptions) is two of TensorFlow's objects: the user's, which copies the variables in
the thread that saves, and one within it, which writes the copies in a thread of its own. Only the former reads the
variables, so that values on all ranks are those of the moment of the call. The threads of the ranks meet before and
after the chief writes, in a name space of this checkpoint.
"""

import copy
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ...core.errors import ShutdownError
from .._private import unknown
from . import files, threads
from .variables import RankMirroredVariable, RankSyncOnReadVariable

_originals: dict[str, Any] = {}
_SPACE = "_mpistrat_name_space"  # an attribute of what writes asynchronously
_numbers: dict[str, itertools.count] = defaultdict(lambda: itertools.count(1))  # by the name space of the thread


def _replacements() -> list[tuple[type, str, Any]]:
    return [(tf.train.Checkpoint, "_write", _write), (tf.train.Checkpoint, "_async_checkpointer", _async_checkpointer),
            (tf.train.CheckpointManager, "save", _save)]


def patch() -> None:
    """Replace what writes; once. Run with TensorFlow 2.21."""
    if not _originals:
        for owner, name, replacement in _replacements():
            _originals[name] = getattr(owner, name)
            setattr(owner, name, replacement)


def check() -> None:
    """Raise MissingDependencyError where TensorFlow lacks something that is replaced."""
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in _replacements() if not hasattr(owner, name)]
    if missing:
        raise unknown(f"it has no {', '.join(missing)}")


def undo() -> None:
    """Put back what `patch` has replaced."""
    if _originals:
        for owner, name, _ in _replacements():
            setattr(owner, name, _originals.pop(name))


def with_values_of(trackable: Any) -> Any:
    """A context in which this rank knows the aggregated values of what `trackable` has, for it to write. Collective."""
    values = {}
    for variable in _of_strategy(trackable):
        if isinstance(variable, RankSyncOnReadVariable):
            try:
                values[variable.ref()] = tf.convert_to_tensor(variable._get_cross_replica())
            except ShutdownError:
                # The others have ended, so that there is nothing of theirs to add.
                values[variable.ref()] = variable._get_replica(0).read_value()
    return files.known(values)


def _of_strategy(trackable: Any) -> Iterable[Any]:
    """The variables of an MPIStrategy that a checkpoint of `trackable` has, in the same order on all ranks."""
    # A variable of Keras is no tf.Variable; it has one. (To ask a variable that is synchronised on reading for an
    # attribute that it does not have is a collective: TensorFlow looks for it in the value.)
    found = (node if isinstance(node, tf.Variable) else getattr(node, "_value", node)
             for node in tf.train.TrackableView(trackable).descendants())
    return (variable for variable in found if isinstance(variable, RankMirroredVariable | RankSyncOnReadVariable))


def _is_of_strategy(checkpoint: Any) -> bool:
    return tf.executing_eagerly() and not files.is_alone() and any(True for _ in _of_strategy(checkpoint))


def _write(self: Any, file_prefix: str, options: Any = None) -> str:
    """Checkpoint._write, which `write`, `save` and CheckpointManager call."""
    original = _originals["_write"]
    if not _is_of_strategy(self) or _is_asynchronous(options):
        return original(self, file_prefix, options)
    space = getattr(self, _SPACE, None)
    if space is not None:
        with threads.name_space(space):
            return _write_copies(self, file_prefix, options)
    # A rank may still be looking for the newest checkpoint, and is not to find this one.
    files.meet()
    with with_values_of(self):
        files.write_once(f"{file_prefix}.index", lambda: original(self, file_prefix, options))
    return file_prefix


def _write_copies(checkpoint: Any, file_prefix: str, options: Any) -> str:
    """Write what has been copied, in the thread that does so; the variables themselves have gone on."""
    files.meet()
    files.write_once(f"{file_prefix}.index", lambda: _originals["_write"](checkpoint, file_prefix, options))
    for callback in getattr(options, "experimental_write_callbacks", None) or ():
        if isinstance(callback, _Managed):
            _share_state(callback.manager)
    return file_prefix


def _is_asynchronous(options: Any) -> bool:
    return bool(options is not None and options.experimental_enable_async_checkpoint)


def _async_checkpointer(self: Any) -> Any:
    """Checkpoint._async_checkpointer, which makes what writes asynchronously; in the thread that saves.

    It is made by the first save. So the ranks agree on which of a thread's asynchronous checkpoints this is.
    """
    helper = _originals["_async_checkpointer"](self)
    writer = helper.checkpointer()
    if not hasattr(writer, _SPACE) and _is_of_strategy(self):
        thread = threads.prefix()
        setattr(writer, _SPACE, f"{thread}checkpoint{next(_numbers[thread])}")
    return helper


class _Managed:
    """Among the callbacks of an asynchronous write, for a CheckpointManager whose state the ranks are to share."""

    def __init__(self, manager: Any):
        self.manager = manager

    def __call__(self) -> None:
        """Nothing; TensorFlow calls it where a checkpoint is written."""


def _save(self: Any, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None) -> str | None:
    """CheckpointManager.save; all ranks then know what the one that wrote has kept and deleted."""
    together = _is_of_strategy(self.checkpoint)
    if together and _is_asynchronous(options):
        options = copy.copy(options)
        options.experimental_write_callbacks = [_Managed(self), *(options.experimental_write_callbacks or ())]
    path = _originals["save"](self, checkpoint_number, check_interval, options)
    if together and path is not None and not _is_asynchronous(options):
        _share_state(self)
    return path


def _share_state(manager: Any) -> None:
    """Give a CheckpointManager the state of the one that wrote to its directory. Collective."""
    directory = os.path.abspath(manager.directory)
    everybody = files.meet(value=(directory, manager._maybe_delete, manager._latest_checkpoint,
                                  manager._last_preserved_timestamp))
    if everybody is not None:
        _, manager._maybe_delete, manager._latest_checkpoint, manager._last_preserved_timestamp = next(
            told.value for told in everybody if told.value[0] == directory)
