"""Keras' callbacks under MPIStrategy: which run on which rank, which need the logs, and how they write files.

Callbacks that only write (CSVLogger, TensorBoard) run on the lowest rank that has them. ModelCheckpoint and
BackupAndRestore run on all ranks: the chief writes, the others wait. SwapEMAWeights swaps where the averages are. All
functions run outside of a replica, in the thread that called fit or evaluate.
"""

import contextlib
from contextlib import AbstractContextManager
from functools import partial

import keras
import tensorflow as tf
from keras.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    CSVLogger,
    History,
    ModelCheckpoint,
    ProgbarLogger,
    SwapEMAWeights,
    TensorBoard,
)
from keras.optimizers import Optimizer

from ...api import ops as array_ops
from ...api import runtime
from ...core.request import Max
from ...keras._private import trained_by
from ...keras.callbacks import Logs
from ...keras.fit.fit_checks import ChecksWithinEpochs
from ...keras.fit.fit_optimizers import compared_in, optimizers_of
from ...keras.nested_optimizers import parts_of
from ...keras.patches import Function
from ...keras.patches import replaces_for_strategy as replaces
from ...tensorflow import files, names
from ...tensorflow.files import errors_shared
from ...tensorflow.identity_set import IdentitySet
from .. import collectives
from ..central import is_central
from ..checkpoints import with_values_of
from .optimizer import conclude_checks, require_same_training, slots_of
from .saving import writes_together
from .step_state import strategy_of
from .trainer import average_statistics

# One rank's callback does all the work. Only these classes themselves: a subclass may call collectives.
_ONE_RANK_ONLY = (CSVLogger, TensorBoard)
_TOGETHER = (ModelCheckpoint, BackupAndRestore)
# These have a method that runs after a batch, but it ignores the logs or only displays them.
_READ_NO_LOGS = (ProgbarLogger, History, BackupAndRestore)


# -- the list of callbacks --------------------------------------------------------------------------------------------


@replaces(CallbackList, "on_train_begin", "a rank that has loaded weights, or set a rate, would train apart",
          "callback.on_train_begin(logs)")
def on_train_begin(original: Function, self: CallbackList, logs: Logs = None) -> None:
    on_begin(original, self, logs)
    model: keras.Model = getattr(self, "model", None)
    if strategy_of(model) is None:
        return
    every = runtime.current().settings.check_every
    require_same_training(model.trainable_variables, optimizers_of(model), "fit: when training begins")
    if every and not any(isinstance(callback, ChecksWithinEpochs) for callback in self.callbacks):
        self.callbacks.insert(0, ChecksWithinEpochs(partial(_require_same_training, model), every))


@replaces(CallbackList, "on_test_begin", "logs that no callback reads would be reduced in every step",
          "callback.on_test_begin(logs)")
def on_begin(original: Function, self: CallbackList, logs: Logs = None) -> None:
    model = getattr(self, "model", None)
    strategy = strategy_of(model)
    if strategy is not None:
        wanted = any(_reads_logs(callback) for callback in self.callbacks)
        if strategy.num_replicas_in_sync > 1:
            # The ranks may have different callbacks.
            anywhere = array_ops.allreduce([int(wanted), int(any(map(_writes, self.callbacks)))], op=Max,
                                           name=names.eager("strategy/callbacks"))
            wanted = bool(anywhere[0])
            if anywhere[1] and not hasattr(self, "_mpistrat_assigned"):
                _assign_to_ranks(self)
                self._mpistrat_assigned = True
        object.__setattr__(model, "_mpistrat_logs_wanted", wanted)
    with _errors_shared(self):
        for callback in self.callbacks:
            for write in callback.__dict__.pop("_mpistrat_deferred", ()):
                write()
        original(self, logs)


@replaces(CallbackList, "on_epoch_end", "a checkpoint would hold the running statistics of the chief's rows only",
          "callback.on_epoch_end(epoch, logs)")
def on_epoch_end(original: Function, self: CallbackList, epoch: int, logs: Logs = None) -> None:
    if strategy_of(getattr(self, "model", None)) is not None:
        average_statistics(self.model)
        _require_same_training(self.model, f"fit: at the end of epoch {epoch + 1}")
        conclude_checks(self.model)
    with _errors_shared(self):
        original(self, epoch, logs)


@replaces(CallbackList, "on_train_end", "an error on one rank would leave the others waiting",
          "callback.on_train_end(logs)")
def on_train_end(original: Function, self: CallbackList, logs: Logs = None) -> None:
    with _errors_shared(self):
        original(self, logs)


def _require_same_training(model: keras.Model, place: str) -> None:
    """Compare weights, optimizer slots and rates of a training that has begun."""
    optimizers = optimizers_of(model)
    parts = IdentitySet(part for optimizer in optimizers for part in parts_of(optimizer))
    slots = [v for v in compared_in(parts) if not is_central(v.value)]
    require_same_training(list(IdentitySet([*model.trainable_variables, *slots])), optimizers, place,
                          runtime.current().settings.check_action)


def _errors_shared(callbacks: CallbackList) -> AbstractContextManager[None]:
    """Where callbacks write files, an error on one rank is raised on all."""
    return errors_shared() if hasattr(callbacks, "_mpistrat_assigned") else contextlib.nullcontext()


def _reads_logs(callback: Callback) -> bool:
    """Whether a callback may read the logs of a batch."""
    if isinstance(callback, _READ_NO_LOGS) or getattr(callback, "save_freq", None) == "epoch":
        return False
    if isinstance(callback, TensorBoard):
        return callback.update_freq != "epoch"
    if type(callback).__module__.startswith("mpistrat."):
        return isinstance(callback, ModelCheckpoint)  # No other callback of mpistrat reads them.
    return not all(getattr(getattr(callback, name), "_is_default", False)
                   for name in ("on_batch_end", "on_train_batch_end", "on_test_batch_end"))


def _assign_to_ranks(callbacks: CallbackList) -> None:
    """Remove callbacks whose work another rank's callback does. Collective.

    Raises:
        ValueError: On every rank, when only some have a BackupAndRestore.
    """
    own = [(type(c).__name__, _path(c)) for c in callbacks.callbacks if _writes(c)]
    statuses = files.exchange_status(value=own)
    lists = [status.value for status in statuses] if statuses is not None else [own]
    backups = [rank for rank, found in enumerate(lists) if any(name == "BackupAndRestore" for name, _ in found)]
    if 0 < len(backups) < len(lists):
        raise ValueError(f"only ranks {backups} have a BackupAndRestore, and the others would not begin where those "
                         "do. Give it to all ranks; only the chief writes.")
    kinds = [[name for name, _ in found] for found in lists]
    rank = runtime.current().topology.rank
    kept = []
    for callback in callbacks.callbacks:
        if type(callback) in _ONE_RANK_ONLY:
            entry = (type(callback).__name__, _path(callback))
            if any(entry in found for found in lists[:rank]):
                callback.__dict__.pop("_mpistrat_deferred", None)
                continue
        elif isinstance(callback, ModelCheckpoint):
            callback._mpistrat_on_this_rank_only = any(other != kinds[0] for other in kinds)
        kept.append(callback)
    callbacks.callbacks = kept


def _writes(callback: Callback) -> bool:
    """Whether a callback writes files in a way that this module coordinates."""
    return type(callback) in _ONE_RANK_ONLY or isinstance(callback, _TOGETHER)


def _path(callback: Callback) -> str:
    return str(getattr(callback, "filename", None) or getattr(callback, "log_dir", ""))


# -- ModelCheckpoint and BackupAndRestore -----------------------------------------------------------------------------


@replaces(ModelCheckpoint, "_save_model", "all ranks would write to one file at the same time",
          "self.model.save(filepath")
def save_checkpoint(original: Function, self: ModelCheckpoint, epoch: int, batch: int | None,
                    logs: Logs) -> None:
    # Where the ranks have different callbacks that write, none can wait for the others.
    if not writes_together(self.model) or getattr(self, "_mpistrat_on_this_rank_only", False):
        with files.alone():
            return original(self, epoch, batch, logs)
    if batch is not None:  # At the end of an epoch they have been averaged.
        average_statistics(self.model)
    path = self._get_file_path(epoch, batch, logs)
    with with_values_of(self.model):
        self.best = files.write_once(path, lambda: original(self, epoch, batch, logs), lambda: self.best)
    return None


@replaces(BackupAndRestore, "_save_model", "all ranks would write to one file at the same time",
          "self.model.save_weights(")
def save_backup(original: Function, self: BackupAndRestore) -> None:
    if not writes_together(self.model):
        return original(self)
    if self.save_freq != "epoch":
        average_statistics(self.model)
    with with_values_of(self.model):
        return files.write_once(self._training_metadata_path, lambda: original(self))


@replaces(BackupAndRestore, "on_train_end", "two ranks would delete one directory at the same time",
          "file_utils.rmtree(self.backup_dir)")
def delete_backup(original: Function, self: BackupAndRestore, logs: Logs = None) -> None:
    if not writes_together(self.model):
        return original(self, logs)
    return files.write_once(self.backup_dir, lambda: original(self, logs))


@replaces(BackupAndRestore, "on_train_begin", "ranks that do not see the backup would start anew", "self._load_model()")
def restore_backup(original: Function, self: BackupAndRestore, logs: Logs = None) -> None:
    """The chief reads the backup and broadcasts it; the other ranks' hosts need no access to the file."""
    model = self.model
    if not writes_together(model) or not model.built:
        return original(self, logs)
    optimizer = model.optimizer

    def exists() -> bool:
        return tf.io.gfile.exists(self._weights_path)

    if files.on_chief(exists) and optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)  # Creating variables is collective.

    def read() -> tuple[bool, int | None]:
        original(self, logs)
        return exists(), model._initial_epoch

    found, model._initial_epoch = files.on_chief(read)
    if found:
        variables = [v for v in (*model.variables, *(optimizer.variables if optimizer is not None else ()))
                     if not is_central(v.value)]
        values = [model.distribute_strategy.extended.local(v.value) for v in variables]
        values = collectives.broadcast_list_from_first(values, "restore")
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return None


# -- TensorBoard ------------------------------------------------------------------------------------------------------


@replaces(TensorBoard, "_write_keras_model_summary",
          "all ranks would write events, before the ranks have agreed on the one that does", "keras_model_summary(")
@replaces(TensorBoard, "_configure_embeddings", "likewise", 'file_utils.File(path, "w")')
def defer(original: Function, self: TensorBoard) -> None:
    """Defer a write until `on_begin` has assigned the callbacks to ranks."""
    if not writes_together(self.model) or type(self) not in _ONE_RANK_ONLY:
        return original(self)
    self.__dict__.setdefault("_mpistrat_deferred", []).append(lambda: original(self))
    return None


@replaces(TensorBoard, "on_epoch_end", "with embeddings_freq it saves the model, which the other ranks do not",
          "self._log_embeddings(epoch)")
def log_epoch(original: Function, self: TensorBoard, epoch: int, logs: Logs = None) -> None:
    # All ranks have averaged the running statistics before.
    with files.alone() if type(self) in _ONE_RANK_ONLY else contextlib.nullcontext():
        original(self, epoch, logs)


# -- SwapEMAWeights with central slots --------------------------------------------------------------------------------


@replaces(SwapEMAWeights, "_tf_finalize_ema_values", "only the chief has averages",
          "optimizer._model_variables_moving_average")
@replaces(SwapEMAWeights, "_tf_swap_variables", "likewise", "optimizer._model_variables_moving_average")
def swap_averages(original: Function, self: SwapEMAWeights, optimizer: Optimizer) -> None:
    slots = slots_of(optimizer)
    if slots is None or slots.are_here:
        original(self, optimizer)
    if slots is not None:
        slots.share(trained_by(optimizer))
