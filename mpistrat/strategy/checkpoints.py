"""tf.train.Checkpoint, CheckpointManager and tf.saved_model.save with a strategy's variables: rank 0 writes.

All ranks call these functions. The first strategy that is created replaces them. Objects without variables of a
strategy are saved as before.

For an asynchronous checkpoint (CheckpointOptions), TensorFlow uses two Checkpoint objects. The user's object copies the
variables, in the thread that saves. An inner object writes the copies, in a thread of its own. So all ranks have the
values at the time of the call. The writing threads of all ranks synchronise before and after rank 0 writes. Each
checkpoint has a name space: a text with which the names of these collectives begin.
"""

import copy
import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.saved_model import save as saved_models

from ..core.errors import InvalidRequestError, ShutdownError
from ..tensorflow import files
from ..tensorflow.bridge import names
from ..tensorflow.elastic import divided_states
from ..tensorflow.kerases import is_optimizer
from .variables import RankMirroredVariable, RankSyncOnReadVariable

Options: TypeAlias = tf.train.CheckpointOptions | None

# The attributes in which a CheckpointManager records the checkpoints that it has kept, and the time.
_STATE_OF_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp")
_originals: dict[str, Callable[..., Any]] = {}
_NAME_SPACE = "_mpistrat_name_space"  # an attribute of the checkpoint that writes asynchronously
_numbers: dict[str, itertools.count] = defaultdict(lambda: itertools.count(1))  # by the name space of the thread


def patch() -> None:
    if not _originals:
        for owner, name, replacement in ((tf.train.Checkpoint, "_write", _write),
                                         (tf.train.Checkpoint, "_async_checkpointer", _async_checkpointer),
                                         (tf.train.CheckpointManager, "save", _save),
                                         (saved_models, "save_and_return_nodes", _save_model)):
            _originals[replacement.__name__] = getattr(owner, name)
            setattr(owner, name, replacement)


def with_values_of(trackable: object) -> AbstractContextManager[None]:
    """Aggregate the variables of `trackable` (collective). Return a context in which this rank reads these values."""
    values = {}
    for variable in _strategy_variables(trackable):
        if isinstance(variable, RankSyncOnReadVariable):
            try:
                values[variable.ref()] = tf.convert_to_tensor(variable._get_cross_replica())
            except ShutdownError:
                # The other ranks have ended, so only this rank's value is left.
                values[variable.ref()] = variable._get_replica(0).read_value()
    return files.known(values)


def _strategy_variables(trackable: object) -> Iterable[RankMirroredVariable | RankSyncOnReadVariable]:
    """Return the variables of an MPIStrategy that a checkpoint of `trackable` contains, in one order on all ranks."""
    # A Keras variable is no tf.Variable but contains one. (getattr of a missing attribute is a collective for a
    # variable that is synchronised on reading: TensorFlow looks for the attribute in the variable's value.)
    found = (node if isinstance(node, tf.Variable) else getattr(node, "_value", node)
             for node in tf.train.TrackableView(trackable).descendants())
    return (variable for variable in found if isinstance(variable, RankMirroredVariable | RankSyncOnReadVariable))


def _is_of_strategy(trackable: object) -> bool:
    return tf.executing_eagerly() and not files.is_alone() and any(True for _ in _strategy_variables(trackable))


def _write(self: tf.train.Checkpoint, file_prefix: str, options: Options = None) -> str:
    """Replaces Checkpoint._write, which `write`, `save` and CheckpointManager call. Only rank 0 writes."""
    original = _originals["_write"]
    if not _is_of_strategy(self):
        return original(self, file_prefix, options)
    gather = _gathering(self)
    if _is_asynchronous(options):
        if gather is not None:
            raise InvalidRequestError("an asynchronous checkpoint cannot save the divided state of optimizers "
                                      '(MPIStrategy(variables="sharded")). Leave out '
                                      "experimental_enable_async_checkpoint.")
        return original(self, file_prefix, options)
    if (name_space := getattr(self, _NAME_SPACE, None)) is not None:
        # This is the writing thread, and `self` has copies: the variables may have changed since.
        with names.name_space(name_space):
            files.exchange_status()
            files.write_once(f"{file_prefix}.index", lambda: original(self, file_prefix, options))
            for callback in getattr(options, "experimental_write_callbacks", None) or ():
                if isinstance(callback, _ManagerMark):
                    _share_state(callback.manager)
        return file_prefix
    # Wait, since a rank may still be looking for the newest checkpoint, and must not find this one.
    files.exchange_status()
    with with_values_of(self):
        files.write_once(f"{file_prefix}.index", lambda: original(self, file_prefix, options), gather)
    return file_prefix


def _gathering(trackable: object) -> Callable[[int], None] | None:
    """Return a function that gathers divided optimizer states on the rank it is given; None if no state is divided."""
    optimizers = filter(is_optimizer, tf.train.TrackableView(trackable).descendants())
    states = {id(state): state for optimizer in optimizers for find in divided_states for state in find(optimizer)}

    def gather(rank: int) -> None:
        for state in states.values():
            state.consolidate(to=rank)

    return gather if states else None


def _save_model(obj: object, export_dir: str | os.PathLike, *args: object, **kwargs: object) -> object:
    """Replaces the inner function of tf.saved_model.save: otherwise ranks would remove each other's temporary files.

    (tf.saved_model.save itself is not replaced: TensorFlow loads tf.saved_model late, and would undo the replacement.)
    """
    original = functools.partial(_originals["_save_model"], obj, export_dir, *args, **kwargs)
    # TensorFlow raises the error for an object of another class.
    if not isinstance(obj, tf.__internal__.tracking.Trackable) or not _is_of_strategy(obj):
        return original()
    files.exchange_status()  # As in _write.
    with with_values_of(obj):
        files.write_once(os.path.join(export_dir, "saved_model.pb"), original, _gathering(obj))
    return None


def _is_asynchronous(options: Options) -> bool:
    return bool(options is not None and options.experimental_enable_async_checkpoint)


def _async_checkpointer(self: tf.train.Checkpoint) -> Any:
    """Replaces Checkpoint._async_checkpointer, which creates the inner checkpoint, and adds a name space to it.

    The name contains a number, which counts the inner checkpoints of the saving thread. All ranks get the same number.
    """
    helper = _originals["_async_checkpointer"](self)
    writer = helper.checkpointer()
    if not hasattr(writer, _NAME_SPACE) and _is_of_strategy(self):
        thread = names.prefix()
        setattr(writer, _NAME_SPACE, f"{thread}checkpoint{next(_numbers[thread])}")
    return helper


class _ManagerMark:
    """A write callback that does nothing. Its attribute `manager` tells `_write` which CheckpointManager has saved."""

    def __init__(self, manager: tf.train.CheckpointManager):
        self.manager = manager

    def __call__(self) -> None:
        """Do nothing. TensorFlow calls this on the rank that has written."""


def _save(self: tf.train.CheckpointManager, checkpoint_number: int | tf.Variable | None = None,
          check_interval: bool = True, options: Options = None) -> str | None:
    """Replaces CheckpointManager.save. Afterwards all ranks have the writer's list of kept and deleted checkpoints."""
    together = _is_of_strategy(self.checkpoint)
    if together and options is not None and _is_asynchronous(options):
        options = copy.copy(options)
        options.experimental_write_callbacks = [_ManagerMark(self), *(options.experimental_write_callbacks or ())]
    path = _originals["_save"](self, checkpoint_number, check_interval, options)
    if together and path is not None and not _is_asynchronous(options):
        _share_state(self)
    return path


def _share_state(manager: tf.train.CheckpointManager) -> None:
    """Give `manager` the state of the first rank with the same directory, because that rank has written. Collective."""
    directory = os.path.abspath(manager.directory)
    statuses = files.exchange_status(value=(directory, {name: getattr(manager, name) for name in _STATE_OF_MANAGER}))
    if statuses is not None:
        vars(manager).update(next(state for there, state in (status.value for status in statuses)
                                  if there == directory))
