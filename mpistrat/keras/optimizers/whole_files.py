"""Keras' functions that save a model, and BackupAndRestore, replace files atomically.

They write to a temporary directory next to the file, and rename the new file at the end. So a process that dies while
it saves leaves the old file, and ranks that save to one path at the same time leave a complete file. Local, except for
a model of a strategy: all ranks save such a model, one rank writes, and all ranks wait for it (tensorflow/files.py).
"""

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import BackupAndRestore

from ...core.errors import ShutdownError
from ...process.launch_env import launched_rank
from ...tensorflow import files
from ..bridge.patches import Function, replaces
from ..bridge.private_names import legacy_h5_format, saving_lib, states_in
from ..bridge.training import StrategyTraining, average_statistics, is_under_strategy
from ..sharded.sharded_optimizer import whole_state

_ENDINGS = (".keras", ".h5", ".hdf5")


@replaces(keras.Model, "export", "all ranks would write to one file at the same time", "export_saved_model")
def export(original: Function, model: keras.Model, filepath: object, *args: object, **kwargs: object) -> object:
    return _by_all_ranks(model, filepath, lambda: original(model, filepath, *args, **kwargs))


@replaces(saving_lib, "save_model", "a process that dies while it saves would destroy the file",
          "_save_model_to_fileobj(")
@replaces(saving_lib, "save_weights_only", "likewise", "H5IOStore(filepath")
@replaces(legacy_h5_format, "save_model_to_hdf5", "likewise, or a file would have a part of the state of a sharded "
          "optimizer", 'h5py.File(filepath, mode="w")')
def save(original: Function, model: Any, filepath: object, *args: object, **kwargs: object) -> object:
    def write() -> object:
        call = inspect.signature(original).bind(model, filepath, *args, **kwargs)
        # save_model_to_hdf5, which alone has this argument, reads `variables` of the optimizer.
        has_state = "include_optimizer" in call.signature.parameters and call.arguments.get("include_optimizer", True)
        with whole_state(getattr(model, "optimizer", None) if has_state else None, is_read=True):
            return _save_whole(original, call, filepath)
    return _by_all_ranks(model, filepath, write)


def _by_all_ranks(model: object, filepath: object, write: Callable[[], object]) -> object:
    """Write a model. One rank writes a model of a strategy, and the others wait. Collective for such a model."""
    is_alone = files.is_alone() or hasattr(filepath, "write")
    if is_alone or not isinstance(model, keras.Model) or not is_under_strategy(model):
        return write()
    training = StrategyTraining(model)
    # If the other ranks have ended, this rank saves its own statistics; files.exchange_status says why.
    with contextlib.suppress(ShutdownError):
        average_statistics(training)
    with training.known_values():
        files.write_once(str(filepath), write, training.consolidate if states_in(training.parts) else None)
    return None


def _save_whole(original: Function, call: inspect.BoundArguments, filepath: object) -> object:
    # A link stays, and its target gets the model.
    path = os.path.realpath(filepath) if isinstance(filepath, str | os.PathLike) else ""
    directory, name = os.path.split(path)
    is_one_file = name.endswith(_ENDINGS) and call.arguments.get("max_shard_size") is None
    if not is_one_file or not os.path.isdir(directory) or not os.access(directory, os.W_OK):
        return original(*call.args, **call.kwargs)
    # A directory, since programs look for the newest file with this ending. The name is the same in the next job, so
    # that processes that die leave one directory per rank at most.
    own = os.path.join(directory, f".{name}.saving-{launched_rank(os.environ)}")
    os.makedirs(own, exist_ok=True)
    try:
        call.arguments["filepath"] = os.path.join(own, name)
        result = original(*call.args, **call.kwargs)
        os.replace(os.path.join(own, name), path)
    finally:
        shutil.rmtree(own, ignore_errors=True)  # An error here would hide Keras' error.
    return result


@replaces(BackupAndRestore, "_save_model", "likewise, the file with the epoch", "json.dumps(training_metadata)")
def save_backup(original: Function, self: BackupAndRestore) -> None:
    path = getattr(self, "_training_metadata_path", None)  # Keras 3.0 saves the weights alone.
    if path is None or "://" in str(self.backup_dir):
        return original(self)
    part = self._training_metadata_path = f"{path}.saving"
    if os.path.exists(path):
        shutil.copyfile(path, part)  # With double_checkpoint Keras keeps a copy of the file before it writes.
    try:
        original(self)
        os.replace(part, path)
    finally:
        self._training_metadata_path = path
        with contextlib.suppress(OSError):  # The file does not exist, or Keras has raised an error.
            os.remove(part)
    return None
