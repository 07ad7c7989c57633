"""Callbacks that write files in fit on several ranks: if several ranks name the same path, one rank runs the callback.

When training begins, the ranks exchange their callbacks and paths (fit_checks.py). When training begins and ends, and
at the end of each epoch, the other ranks wait until the callback has written. Then the other ranks get the callback's
counts and best metric. If the ranks' common callbacks are in different orders, no rank waits: waiting could deadlock.

Only callbacks of Keras' own classes run on one rank. A callback of a derived class runs on all ranks, because it may
call collectives; sharded_optimizer.py then replaces files of models atomically. `role_of` is pure.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...core.errors import MismatchError
from ...core.topology import rank_list
from ...tensorflow import files
from ...tensorflow.kerases import KERASES, build, is_keras2, is_of_keras, package_of, variables_of
from ..bridge.private_names import Callback
from ..bridge.training import Training, optimizers_of
from ..callbacks import broadcast_state

# The classes, and the attribute that has the path of the files.
_BACKUP = "BackupAndRestore"
_PATHS = {"ModelCheckpoint": "filepath", _BACKUP: "backup_dir", "CSVLogger": "filename", "TensorBoard": "log_dir"}
_INITIAL_EPOCH = "_initial_epoch"  # Of a model. fit of an old Keras begins anew, with the weights of the backup.
_HOOKS = [name for name in dir(Callback) if name.startswith("on_")]
_MEETINGS = ("on_train_begin", "on_epoch_end", "on_train_end")
_SAVE = "_save_model"  # the method of Keras 3's callbacks that save, and of Keras 2's ModelCheckpoint


@dataclass(frozen=True)
class Entry:
    """What a rank tells the other ranks about a callback. Callbacks that write the same files have equal entries."""

    kind: str  # The class; "" for a Keras class that does not write files, whose order does not matter
    path: str = ""  # The path of the files; "" for a class that is not in `_PATHS`
    # The directory of the path as this rank's host sees it. Hosts with equal values share the directory. () for
    # callbacks that one rank runs for all hosts.
    place: tuple[str | int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Role:
    """What one rank does with a callback that writes files."""

    runs: bool  # Whether the rank runs the callback
    meets: bool  # Whether all ranks wait for the ranks that run it


def role_of(entry: Entry, rank: int, entries: Sequence[Sequence[Entry]], host_of: Sequence[str]) -> Role:
    """Return the role of `rank` for the callback `entry`. `entries` and `host_of` are each rank's callbacks and host.

    Raises MismatchError if all ranks have this callback, a BackupAndRestore, but the order of their callbacks differs.
    """
    # Callbacks that some ranks have more often than others do not communicate.
    common = {each for each in entries[0] if each.kind and len({of_rank.count(each) for of_rank in entries}) == 1}
    is_in_order = len({tuple(each for each in of_rank if each in common) for of_rank in entries}) == 1
    # Ranks that restore a backup must all begin where it ends.
    if not entry.path or sum(entry in of_rank for of_rank in entries) == 1 \
            or (entry.kind == _BACKUP and entry not in common):
        return Role(runs=True, meets=False)
    if entry.kind == _BACKUP and not is_in_order:
        raise MismatchError("the ranks have their callbacks in different orders, but a BackupAndRestore needs the same "
                            "order on all ranks. Pass the callbacks in the same order.")
    runs = not any(other == entry and (host_of[before] == host_of[rank] or other.place == entry.place)
                   for before in range(rank) for other in entries[before])
    return Role(runs, entry in common and is_in_order)


def require_backups(entries: Sequence[Sequence[Entry]], training: Training) -> None:
    """Raise MismatchError if only some ranks of a strategy have a BackupAndRestore, or ranks of Keras 2 share one."""
    backups = [rank for rank, of_rank in enumerate(entries) if any(entry.kind == _BACKUP for entry in of_rank)]
    if training.is_under_strategy and 0 < len(backups) < len(entries):
        raise MismatchError(f"only ranks {rank_list(backups)} have a BackupAndRestore, so the others would begin at "
                            "another epoch. Pass BackupAndRestore on all ranks; only rank 0 writes.")
    if is_keras2(training.model) and any(entry.kind == _BACKUP and sum(entry in of_rank for of_rank in entries) > 1
                                         for entry in entries[0]):
        raise MismatchError("several ranks have a BackupAndRestore with the same directory, but with Keras 2 only one "
                            "of them would continue in the epoch of the backup. Give each rank its own directory: "
                            'BackupAndRestore(f"backup-{hvd.rank()}").')


def assign_roles(callbacks: Sequence[Callback], entries: Sequence[Sequence[Entry]], training: Training) -> None:
    """Give each WrittenOnce among `callbacks` the role of this rank. Local. Raises MismatchError if role_of does."""
    topology = training.process_set.group("fit").topology
    for callback, entry in zip(callbacks, entries[topology.rank], strict=True):
        if isinstance(callback, WrittenOnce):
            callback.assign(role_of(entry, topology.rank, entries, topology.host_of))


def entry_of(callback: Callback, training: Training) -> Entry:
    cls, kind = type(callback), _kind_of(callback)
    if not kind:
        return Entry("" if package_of(cls) in KERASES else f"{cls.__module__}.{cls.__qualname__}")
    if kind == _BACKUP and training.is_under_strategy:
        return Entry(kind, "that of the chief")  # Each rank has the path of its host, or none.
    path = str(getattr(callback, _PATHS[kind]))
    if "://" in path:
        return Entry(kind, path)
    path = os.path.realpath(path)
    return Entry(kind, path, _place(path) if kind == "ModelCheckpoint" else ())


def _kind_of(callback: Callback) -> str:
    """Return the name of a callback's class if it is one of Keras' classes that write files, and "" otherwise."""
    cls = type(callback)
    return cls.__name__ if package_of(cls) in KERASES and cls.__name__ in _PATHS else ""


def written_once(callbacks: Sequence[Callback], training: Training) -> list[Callback]:
    """Return `callbacks`, each wrapped in a WrittenOnce if it writes files. Local; FitChecks assigns roles later."""
    return [WrittenOnce(callback, training) if _kind_of(callback) else callback for callback in callbacks]


def _place(path: str) -> tuple[str | int, ...]:
    """Return path, inode and time of change of the nearest existing directory above `path`, to identify it later."""
    directory = os.path.dirname(path)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    status = os.stat(directory)
    return directory, status.st_ino, status.st_ctime_ns


class WrittenOnce(Callback):
    """Wraps a callback that writes files. Collective if all ranks have the callback with the same path.

    The wrapped callback gets its model only with its role, because TensorBoard writes as soon as it has a model.
    """

    def __init__(self, callback: Callback, training: Training):
        super().__init__()
        self.callback, self.role = callback, Role(False, False)
        self._training, self._name = training, f"{training.name}/files"
        self._given: keras.Model | None = None
        self._known = self._state()  # as all ranks have it
        for hook in _HOOKS:
            if not getattr(getattr(callback, hook), "_is_default", False):  # Keras calls no default hooks.
                setattr(self, hook, partial(self._call, hook))

    def set_model(self, model: keras.Model) -> None:
        self._given = model

    def assign(self, role: Role) -> None:
        """Set this rank's role, and prepare the callback if this rank runs it."""
        self.role = role
        if role.runs and self.params is not None:
            self.callback.set_params(self.params)
        if role.runs and self._given is not None:
            with self._alone():
                self.callback.set_model(self._given)

    def _call(self, hook: str, *args: object, **kwargs: object) -> None:
        action = partial(getattr(self.callback, hook), *args, **kwargs)
        if not self.role.meets or hook not in _MEETINGS:
            if self.role.runs:
                with self._alone():
                    action()
            elif hook not in _MEETINGS and hasattr(self.callback, _SAVE):
                # Between two meetings without saving, so that this rank counts batches like the writing ranks.
                setattr(self.callback, _SAVE, lambda *args, **kwargs: None)
                try:
                    action()
                finally:
                    delattr(self.callback, _SAVE)
        elif hook == "on_train_begin" and is_of_keras(self.callback, _BACKUP):
            self._restore(action)
        else:
            saves = hook == "on_epoch_end" and getattr(self.callback, "save_freq", "") == "epoch"
            with self._training.known_values() if saves else contextlib.nullcontext():
                self._on_all_ranks(action)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for writing without the other ranks. Only a strategy needs such a context."""
        return files.alone() if self._training.is_under_strategy else contextlib.nullcontext()

    def _on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Run `action` if this rank's role is to run it. All ranks get the first rank's result. Collective.

        Errors are exchanged under one name for all callbacks, so they reach ranks that run a different callback.
        """
        before = self._known, self._state()  # The other ranks have one of these states: not all ranks count batches.
        result, error = files.attempt(action) if self.role.runs else (None, None)
        changed = {name: value for name, value in self._state().items()
                   if any(name not in each or each[name] != value for each in before)}
        statuses = files.exchange_status(error, value=(result, changed), name=self._name,
                                         process_set=self._training.process_set)
        if statuses is None:
            return result
        result, changed = statuses[0].value
        if not self.role.runs:
            for name, value in changed.items():
                setattr(self.callback, name, value)
        self._known = self._state()
        return result

    def _state(self) -> dict[str, Any]:
        """Return the scalar attributes of the callback, such as its counts, its best metric, and constant arguments."""
        return {name: value for name, value in vars(self.callback).items()
                if value is None or isinstance(value, bool | int | float | str | np.generic)}

    def _restore(self, action: Callable[[], None]) -> None:
        """Restore a backup on the first rank by `action`, and broadcast the restored state. Collective."""
        model, process_set = self._training.model, self._training.process_set
        directory, optimizer = self.callback.backup_dir, model.optimizer
        found = self._on_all_ranks(lambda: tf.io.gfile.exists(directory) and bool(tf.io.gfile.listdir(directory)))
        if found and model.built and optimizer is not None:
            build(optimizer, model.trainable_variables)  # Under a strategy all ranks create variables together.

        def restore() -> int | None:
            action()
            return getattr(model, _INITIAL_EPOCH, None)

        epoch = self._on_all_ranks(restore)
        if not found:
            return
        if hasattr(model, _INITIAL_EPOCH):
            setattr(model, _INITIAL_EPOCH, epoch)
        variables = [*model.weights, *(v for optimizer in optimizers_of(model) for v in variables_of(optimizer))]
        broadcast_state(model, self._training.shared(variables), process_set.group("fit").topology.job_ranks[0],
                        process_set)
