"""What takes the place of Keras' functions that write files, under MPIStrategy: the chief writes, and the others wait.

As in _strategy_replacements.py, each takes the original and returns the replacement.
"""

from collections.abc import Callable
from typing import Any

import keras

from ...api import runtime
from ...core.errors import ShutdownError
from ...tensorflow.distribute import MPIStrategy, collectives, files
from ...tensorflow.distribute.central import is_central
from ...tensorflow.distribute.checkpoints import with_values_of
from . import steps
from ._private import file_utils

# Of these the chief's does all. Only the classes themselves: one derived from them may call collectives.
_CHIEF_ONLY = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
_TOGETHER = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


def writes_together(model: Any) -> bool:
    """Whether the ranks have copies of one model, and are not in the midst of writing it."""
    return isinstance(getattr(model, "_distribute_strategy", None), MPIStrategy) and not files.is_alone()


def save(original: Any) -> Any:
    """For functions of a model and a path: saving_lib.save_model and its like."""
    def replacement(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, keras.Model) or not writes_together(model) or hasattr(filepath, "write"):
            return original(model, filepath, *args, **kwargs)
        _average(model)
        with with_values_of(model):
            return files.write_once(str(filepath), lambda: original(model, filepath, *args, **kwargs))
    return replacement


def _average(model: Any) -> None:
    """Average the running statistics, if there is anybody to average them with."""
    try:
        steps.average_statistics(model)
    except ShutdownError:
        # The others have ended, and what is saved is this rank's; files.meet says why that is no error.
        return


def checkpoint_of_callback(original: Any) -> Any:
    def replacement(self: Any, epoch: int, batch: int | None, logs: Any) -> None:
        if not writes_together(self.model) or _is_of_one_rank(self):
            return _on_this_rank(lambda: original(self, epoch, batch, logs))
        if batch is not None:  # At the end of an epoch they have been averaged.
            steps.average_statistics(self.model)
        path = self._get_file_path(epoch, batch, logs)
        with with_values_of(self.model):
            self.best = files.write_once(path, lambda: original(self, epoch, batch, logs), lambda: self.best)
        return None
    return replacement


def backup(original: Any) -> Any:
    def replacement(self: Any) -> None:
        if not writes_together(self.model):
            return original(self)
        if self.save_freq != "epoch":
            steps.average_statistics(self.model)
        with with_values_of(self.model):
            return files.write_once(self._training_metadata_path, lambda: original(self))
    return replacement


def end_backup(original: Any) -> Any:
    def replacement(self: Any, logs: Any = None) -> None:
        if not writes_together(self.model):
            return original(self, logs)
        return files.write_once(self.backup_dir, lambda: original(self, logs))
    return replacement


def restore(original: Any) -> Any:
    """The chief reads the backup and sends it, so that it need not be where the others see it."""
    def replacement(self: Any, logs: Any = None) -> None:
        model = self.model
        if not writes_together(model) or not model.built:
            return original(self, logs)
        optimizer = model.optimizer
        if files.on_chief(lambda: file_utils.exists(self._weights_path)) \
                and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # Making variables is collective.

        def read() -> tuple[bool, int]:
            original(self, logs)
            return file_utils.exists(self._weights_path), model._initial_epoch

        found, model._initial_epoch = files.on_chief(read)
        if found:
            variables = [v for v in (*model.variables, *(optimizer.variables if optimizer is not None else ()))
                         if not is_central(v.value)]
            values = [model.distribute_strategy.extended.local(v.value) for v in variables]
            values = collectives.broadcast_list_from_first(values, "restore")
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        return None
    return replacement


def copy_to_cpu(original: Any) -> Any:
    """For what an asynchronous checkpoint makes of a variable when it begins: later it copies to what it has made."""
    def replacement(self: Any, object_map: Any) -> None:
        if self not in object_map or not isinstance(self.value.distribute_strategy, MPIStrategy):
            return original(self, object_map)
        self.value._copy_trackable_to_cpu(object_map)
        object_map[self].assign(object_map[self.value])
        return None
    return replacement


def deferred(original: Any) -> Any:
    """For what TensorBoard writes before the ranks have met: it waits until they have."""
    def replacement(self: Any) -> None:
        if not writes_together(self._model) or type(self) not in _CHIEF_ONLY:
            return original(self)
        self.__dict__.setdefault("_mpistrat_deferred", []).append(lambda: original(self))
        return None
    return replacement


def share_out(callbacks: Any) -> None:
    """Take from a CallbackList what another rank's does. Collective.

    Raises:
        ValueError: On every rank, when only some have a BackupAndRestore.
    """
    own = [(type(c).__name__, _path(c)) for c in callbacks.callbacks if writes(c)]
    everybody = files.meet(value=own)
    lists = [told.value for told in everybody] if everybody is not None else [own]
    backups = [rank for rank, found in enumerate(lists) if any(name == "BackupAndRestore" for name, _ in found)]
    if 0 < len(backups) < len(lists):
        raise ValueError(f"only ranks {backups} have a BackupAndRestore, and the others would not begin where those "
                         "do. Give it to all ranks; only the chief writes.")
    kinds = [[name for name, _ in found] for found in lists]
    rank = runtime.current().topology.rank
    kept = []
    for callback in callbacks.callbacks:
        if type(callback) in _CHIEF_ONLY:
            entry = (type(callback).__name__, _path(callback))
            if any(entry in found for found in lists[:rank]):
                callback.__dict__.pop("_mpistrat_deferred", None)
                continue
        elif isinstance(callback, keras.callbacks.ModelCheckpoint):
            callback._mpistrat_of_one_rank = any(other != kinds[0] for other in kinds)
        kept.append(callback)
    callbacks.callbacks = kept


def write_deferred(callbacks: Any) -> None:
    """Write what `deferred` has held back, of the callbacks that are left."""
    for callback in callbacks.callbacks:
        for write in callback.__dict__.pop("_mpistrat_deferred", ()):
            write()


def writes(callback: Any) -> bool:
    """Whether a callback is one of those that write files, and are looked after here."""
    return type(callback) in _CHIEF_ONLY or isinstance(callback, _TOGETHER)


def _path(callback: Any) -> str:
    return str(getattr(callback, "filename", None) or getattr(callback, "log_dir", ""))


def _is_of_one_rank(callback: Any) -> bool:
    """Whether the ranks were given different callbacks that write, so that none can wait for the others."""
    return getattr(callback, "_mpistrat_of_one_rank", False)


def _on_this_rank(write: Callable[[], Any]) -> Any:
    with files.alone():
        return write()
