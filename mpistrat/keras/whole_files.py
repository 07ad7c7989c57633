"""Keras' functions that save a model leave a whole file, or the one that was there before; so does BackupAndRestore.

They write to a directory of their own beside the file, and rename it at the end. So a process that dies while it saves
destroys nothing, and ranks that save to one path at the same time leave a whole file too. Called when the first
optimizer is wrapped and when the first strategy is made; the wrapped functions run on the rank that saves, local.
"""

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any

from keras.callbacks import BackupAndRestore

from ..process.launch_env import launched_rank
from ._private import SAVE_BACKUP, epoch_of_backup_in, paths_of_backup, saves_epochs, saving_functions

_ENDINGS = (".keras", ".h5", ".hdf5")
_wrapped: list[Callable[..., Any]] = []


def wrap_saving() -> None:
    """Make Keras' functions that save a model write whole files. Further calls do nothing."""
    if not _wrapped:
        for module, name in saving_functions():
            _wrapped.append(getattr(module, name))
            setattr(module, name, _whole(_wrapped[-1]))
        if hasattr(BackupAndRestore, SAVE_BACKUP):
            setattr(BackupAndRestore, SAVE_BACKUP, _with_whole_epoch(getattr(BackupAndRestore, SAVE_BACKUP)))


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(model: object, filepath: object, *args: object, **kwargs: object) -> object:
        call = signature.bind(model, filepath, *args, **kwargs)
        # A link stays, and its target gets the model.
        path = os.path.realpath(filepath) if isinstance(filepath, str | os.PathLike) else ""
        directory, name = os.path.split(path)
        is_one_file = name.endswith(_ENDINGS) and call.arguments.get("max_shard_size") is None
        if not is_one_file or not os.path.isdir(directory) or not os.access(directory, os.W_OK):
            return original(model, filepath, *args, **kwargs)
        # Not a file beside the others: programs look for the newest file with this ending. The name is the same in the
        # next job, so that a process that dies leaves no more than one of them.
        own = os.path.join(directory, f".{name}.saving-{launched_rank(os.environ)}")
        os.makedirs(own, exist_ok=True)
        try:
            result = original(model, os.path.join(own, name), *args, **kwargs)
            os.replace(os.path.join(own, name), path)
        finally:
            shutil.rmtree(own)
        return result

    return save


def _with_whole_epoch(original: Callable[[BackupAndRestore], None]) -> Callable[[BackupAndRestore], None]:
    @functools.wraps(original)
    def save(self: BackupAndRestore) -> None:
        if not saves_epochs(self) or "://" in str(self.backup_dir):
            return original(self)
        path = paths_of_backup(self)[1]
        part = f"{path}.saving"
        if os.path.exists(path):
            shutil.copyfile(path, part)  # With double_checkpoint Keras keeps a copy of the file before it writes.
        try:
            with epoch_of_backup_in(self, part):
                original(self)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.remove(part)
        return None

    return save
