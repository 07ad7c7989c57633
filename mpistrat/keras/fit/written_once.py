"""Callbacks that write files in fit of several ranks: if several ranks name the same path, one rank runs the callback.

The ranks exchange their callbacks and paths before fit makes its list of callbacks. The other ranks wait until the
callback has written, when training begins and ends and at the end of each epoch, if all ranks have their common
callbacks in the same order. Otherwise waiting could be a deadlock, and the ranks meet when the next epoch begins.

Only Keras' own classes are run by one rank. A class that is derived from them may call collectives, so it runs on all
ranks; whole_files.py keeps their models whole. `role_of` is pure.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import BackupAndRestore, Callback, CSVLogger, ModelCheckpoint, TensorBoard

from ...api import ops as array_ops
from ...core.errors import MismatchError
from ...tensorflow import files
from ..callbacks import Logs, broadcast_state
from .fit_optimizers import FitOptimizers, optimizers_of

# The classes, and the attribute that has the path of the files.
_PATHS = {ModelCheckpoint: "filepath", BackupAndRestore: "backup_dir", CSVLogger: "filename", TensorBoard: "log_dir"}
_INITIAL_EPOCH = "_initial_epoch"  # of a model; fit of an old Keras begins anew, with the weights of the backup
_HOOKS = [name for name in dir(Callback) if name.startswith("on_")]


@dataclass(frozen=True)
class Entry:
    """A callback, as the ranks exchange it. Those that write the same files are equal.

    Attributes:
        kind: Its class; "" for one of Keras' that does not write files, since its order does not matter.
        path: Where it writes; "" for a class that is not in `_PATHS`.
        place: The directory of the path as this rank's host sees it. Hosts with equal values share the directory. ()
            for callbacks of which one rank runs for all hosts.
    """

    kind: str
    path: str = ""
    place: tuple[str | int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Role:
    """The part of one rank in running a callback.

    Attributes:
        runs: Whether it runs the callback.
        meets: Whether all ranks wait for those that run it.
    """

    runs: bool
    meets: bool


def role_of(entry: Entry, rank: int, entries: Sequence[Sequence[Entry]], host_of: Sequence[str]) -> Role:
    """The role of a rank in running `entry`, given the callbacks of each rank in their order, and the host of each.

    Raises:
        MismatchError: All ranks have a BackupAndRestore with one directory, and not the same order of callbacks.
    """
    # A callback that a rank has once more than the others does not communicate.
    common = {each for each in entries[0] if each.kind and len({of_rank.count(each) for of_rank in entries}) == 1}
    is_in_order = len({tuple(each for each in of_rank if each in common) for of_rank in entries}) == 1
    is_backup = entry.kind == BackupAndRestore.__name__
    # Ranks that restore a backup must all begin where it ends.
    if not entry.path or sum(entry in of_rank for of_rank in entries) == 1 or (is_backup and entry not in common):
        return Role(runs=True, meets=False)
    if is_backup and not is_in_order:
        raise MismatchError("the ranks have their callbacks in different orders, and a BackupAndRestore among them. "
                            "Give all ranks the same order.")
    runs = not any(other == entry and (host_of[before] == host_of[rank] or other.place == entry.place)
                   for before in range(rank) for other in entries[before])
    return Role(runs, entry in common and is_in_order)


def written_once(callbacks: Sequence[Callback], model: keras.Model, optimizers: FitOptimizers) -> list[Callback]:
    """The callbacks that fit gets on this rank in place of the user's. Collective. Raises as role_of, on every rank."""
    topology = optimizers.process_set.group("fit").topology
    own = [_entry(callback) for callback in callbacks]
    entries = array_ops.allgather_object(own, f"{optimizers.name}/callbacks", optimizers.process_set)
    found: list[Callback] = []
    for callback, entry in zip(callbacks, own, strict=True):
        role = role_of(entry, topology.rank, entries, topology.host_of)
        if role.meets:
            found.append(WrittenOnce(callback, role.runs, model, optimizers))
        elif role.runs:
            found.append(callback)
    return found


def _entry(callback: Callback) -> Entry:
    cls = type(callback)
    if cls not in _PATHS:
        return Entry("" if cls.__module__.startswith("keras.") else f"{cls.__module__}.{cls.__qualname__}")
    path = str(getattr(callback, _PATHS[cls]))
    if "://" in path:
        return Entry(cls.__name__, path)
    path = os.path.realpath(path)
    return Entry(cls.__name__, path, _place(path) if cls is ModelCheckpoint else ())


def _place(path: str) -> tuple[str | int, ...]:
    """The nearest directory above a path that exists. The time of its last change is unlikely to be another's."""
    directory = os.path.dirname(path)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    status = os.stat(directory)
    return directory, status.st_ino, status.st_ctime_ns


class WrittenOnce(Callback):
    """Takes the place of a callback that all ranks have with one path, and that this rank may run. Collective."""

    def __init__(self, callback: Callback, runs: bool, model: keras.Model, optimizers: FitOptimizers):
        super().__init__()
        self._callback, self._runs, self._trained, self._optimizers = callback, runs, model, optimizers
        self._name = f"{optimizers.name}/{type(callback).__name__}"
        for hook in _HOOKS if runs else ():
            if hook not in vars(WrittenOnce):
                setattr(self, hook, getattr(callback, hook))

    def set_params(self, params: dict[str, object]) -> None:
        if self._runs:
            self._callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        if self._runs:
            self._callback.set_model(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        if isinstance(self._callback, BackupAndRestore):
            self._restore(logs)
        else:
            self._on_all_ranks(lambda: self._callback.on_train_begin(logs))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._on_all_ranks(lambda: self._callback.on_epoch_end(epoch, logs))

    def on_train_end(self, logs: Logs = None) -> None:
        self._on_all_ranks(lambda: self._callback.on_train_end(logs))

    def _on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Do an action on the ranks that run the callback. Returns the first rank's result. Collective."""
        result, error = files.attempt(action) if self._runs else (None, None)
        own = result, getattr(self._callback, "best", None)  # a ModelCheckpoint's best metric
        statuses = files.exchange_status(error, value=own, name=self._name, process_set=self._optimizers.process_set)
        if statuses is None:
            return result
        result, best = statuses[0].value
        if not self._runs and hasattr(self._callback, "best"):
            self._callback.best = best
        return result

    def _restore(self, logs: Logs) -> None:
        """Restore a backup on the first rank, and broadcast what it has restored."""
        model, process_set = self._trained, self._optimizers.process_set

        def restore() -> tuple[bool, int | None]:
            directory = self._callback.backup_dir
            found = tf.io.gfile.exists(directory) and bool(tf.io.gfile.listdir(directory))
            self._callback.on_train_begin(logs)
            return found, getattr(model, _INITIAL_EPOCH, None)

        found, epoch = self._on_all_ranks(restore)
        if not found:
            return
        if hasattr(model, _INITIAL_EPOCH):
            setattr(model, _INITIAL_EPOCH, epoch)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]
        broadcast_state(model, self._optimizers.shared(variables), process_set.group("fit").topology.job_ranks[0],
                        process_set)
