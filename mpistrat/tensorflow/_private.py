"""The private names of TensorFlow that MPIStrategy uses; every other module imports them from here.

They were run with TensorFlow 2.16.1 to 2.21: TensorFlow's own variables, containers and input pipeline, so that
checkpoints, functions, aggregation and rebatching treat this strategy like any other. At import this module checks that
they exist and accept the calls that mpistrat makes. Where a name is missing, `require_for_strategy` raises when a
strategy is created, and the rest of mpistrat works. Attributes that an object has from its __init__ on are checked at
their first use. bridge._private has the names that all of mpistrat.tensorflow uses.
"""

import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..core.errors import MissingDependencyError


class Call(NamedTuple):
    """A call of a private function: the number of positional arguments (`self` included) and the keywords."""

    function: Callable[..., object]
    positional: int
    keywords: tuple[str, ...] = ()


def rejected(calls: Iterable[Call]) -> list[str]:
    """A description of each call that the function's signature does not accept."""
    found = []
    for function, positional, keywords in calls:
        signature = inspect.signature(function)
        try:
            signature.bind(*range(positional), **dict.fromkeys(keywords))
        except TypeError as error:
            found.append(f"{function.__qualname__}{signature} has changed ({error})")
    return found


def unsupported(user: str, what: object, advice: str = "") -> MissingDependencyError:
    """The error of `user`, a part of mpistrat, for something that this version of TensorFlow lacks."""
    return MissingDependencyError(f"{user} does not support TensorFlow {tf.__version__}: {what}. It was run with "
                                  f"TensorFlow 2.16.1 to 2.21.{advice}")


def strategy_unsupported(what: object) -> MissingDependencyError:
    """The error of MPIStrategy for something that this version of TensorFlow lacks."""
    return unsupported("MPIStrategy", what, " DistributedOptimizer and DistributedGradientTape work without it.")


# -- names ------------------------------------------------------------------------------------------------------------

_missing_for_strategy: ImportError | None = None
try:
    from tensorflow.python.distribute.distribute_lib import UpdateContext
    from tensorflow.python.distribute.distribute_utils import (
        create_mirrored_variable,
        is_mirrored,
        is_sync_on_read,
        regroup,
        select_replica,
        update_regroup,
        validate_colocate_distributed_variable,
        value_container,
    )
    from tensorflow.python.distribute.input_lib import InputWorkers
    from tensorflow.python.distribute.input_util import (
        get_distributed_dataset,
        get_distributed_datasets_from_function,
    )
    from tensorflow.python.distribute.values import DistributedVariable, MirroredVariable, SyncOnReadVariable
    from tensorflow.python.eager.context import context, global_seed
    from tensorflow.python.saved_model import save as saved_models

    _changed = rejected([
        Call(UpdateContext, 1), Call(create_mirrored_variable, 4), Call(is_mirrored, 1), Call(is_sync_on_read, 1),
        Call(regroup, 1, ("always_wrap",)), Call(select_replica, 2), Call(update_regroup, 3),
        Call(validate_colocate_distributed_variable, 2), Call(value_container, 1), Call(InputWorkers, 1),
        Call(get_distributed_dataset, 3, ("num_replicas_in_sync", "input_context", "options")),
        Call(get_distributed_datasets_from_function, 5), Call(context, 0), Call(global_seed, 0),
        Call(DistributedVariable._get, 1), Call(DistributedVariable._get_replica, 2),
        Call(MirroredVariable._update_replica, 3),
        Call(MirroredVariable._copy_trackable_to_cpu, 2), Call(SyncOnReadVariable._copy_trackable_to_cpu, 2),
        Call(SyncOnReadVariable._get_cross_replica, 1), Call(SyncOnReadVariable.assign, 4, ("read_value",)),
        Call(tf.train.Checkpoint._write, 3), Call(tf.train.Checkpoint._async_checkpointer, 1),
        Call(tf.train.CheckpointManager.save, 4), Call(saved_models.save_and_return_nodes, 4),
    ])
    if _changed:
        raise ImportError("; ".join(_changed))
except (ImportError, AttributeError) as _error:
    _missing_for_strategy = ImportError(str(_error))


def require_for_strategy() -> None:
    """Raise MissingDependencyError where this TensorFlow lacks a name that MPIStrategy needs.

    Call it before the import of a module that needs one of those names.
    """
    if _missing_for_strategy is not None:
        raise strategy_unsupported(_missing_for_strategy) from _missing_for_strategy


# -- attributes of objects --------------------------------------------------------------------------------------------


def _required(owner: object, name: str) -> Any:
    """The private attribute of an object of TensorFlow that MPIStrategy needs."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise strategy_unsupported(f"{type(owner).__name__} has no {name}") from None


def _replace(owner: object, name: str, value: object) -> None:
    """Set an attribute that exists."""
    _required(owner, name)
    setattr(owner, name, value)


def operation_seeds() -> random.Random:
    """TensorFlow's generator of the seeds of operations. It exists when a global seed has been set."""
    seeds: random.Random = _required(context(), "_rng")
    return seeds


# Of a distributed dataset that was made from a dataset, and of one that was made from a function.
_DATASETS = ("_cloned_datasets", "_datasets")


def datasets_of(distributed: tf.distribute.DistributedDataset) -> Sequence[tf.data.Dataset]:
    """The datasets of the workers. A strategy has one worker in each process."""
    datasets: Sequence[tf.data.Dataset] = getattr(distributed, _name_of_datasets(distributed))
    return datasets


def set_datasets(distributed: tf.distribute.DistributedDataset, datasets: Sequence[tf.data.Dataset]) -> None:
    """Replace the datasets of the workers."""
    setattr(distributed, _name_of_datasets(distributed), datasets)


def _name_of_datasets(distributed: tf.distribute.DistributedDataset) -> str:
    for name in _DATASETS:
        if hasattr(distributed, name):
            return name
    raise strategy_unsupported(f"{type(distributed).__name__} has no {' or '.join(_DATASETS)}")


def ends_on_all_ranks_together(distributed: tf.distribute.DistributedDataset) -> None:
    """Switch off the collective before each step that finds out whether any rank has data left."""
    _replace(distributed, "_enable_get_next_as_optional", False)


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions of a dataset, as TensorFlow wraps them."""
    return list(_required(dataset, "_functions")())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    return list(_required(dataset, "_inputs")())


# What some datasets were made with: shard, take and skip, repeat, shuffle.
_NUMBERS = ("_num_shards", "_index", "_count", "_seed", "_seed2")


def numbers_of(dataset: tf.data.Dataset) -> list[str]:
    """The numbers that a dataset was made with, with their names; [] if it has none, or TensorFlow hides them."""
    return [f"{name.strip('_')}={getattr(dataset, name).numpy()}" for name in _NUMBERS
            if hasattr(getattr(dataset, name, None), "numpy")]


def arrays_of(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """The arrays that a dataset was made of; [] if it was made of something else, or TensorFlow hides them."""
    return [array for array in getattr(dataset, "_tensors", ()) if tf.is_tensor(array)]


def spec_of_replica(spec: Any) -> tf.TypeSpec:
    """The spec of this replica's value, of the spec of a distributed value, or of a tensor, as with one replica."""
    if isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec | tf.OptionalSpec):
        return spec
    return _required(spec, "_value_specs")[0]


_STATE_OF_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp")


def state_of_manager(manager: tf.train.CheckpointManager) -> list[Any]:
    """Which checkpoints a manager has kept, and when. It can be pickled."""
    return [_required(manager, name) for name in _STATE_OF_MANAGER]


def set_state_of_manager(manager: tf.train.CheckpointManager, state: Iterable[Any]) -> None:
    """Give a manager the state of another one."""
    for name, value in zip(_STATE_OF_MANAGER, state, strict=True):
        _replace(manager, name, value)


__all__ = [
    "Call", "DistributedVariable", "InputWorkers", "MirroredVariable", "SyncOnReadVariable", "UpdateContext",
    "arrays_of", "create_mirrored_variable", "datasets_of", "ends_on_all_ranks_together", "functions_of",
    "get_distributed_dataset", "get_distributed_datasets_from_function", "global_seed", "inputs_of", "is_mirrored",
    "is_sync_on_read", "numbers_of", "operation_seeds", "regroup", "rejected", "require_for_strategy", "saved_models",
    "select_replica", "set_datasets", "set_state_of_manager", "spec_of_replica", "state_of_manager",
    "strategy_unsupported", "unsupported", "update_regroup", "validate_colocate_distributed_variable",
    "value_container",
]
