"""The private names of TensorFlow that MPIStrategy uses; every other module imports them from here.

They were run with all versions of TensorFlow that `import mpistrat.tensorflow` accepts: TensorFlow's own variables,
containers and input pipeline, so that checkpoints, functions, aggregation and rebatching treat this strategy like any
other. bridge._private has the names that all of mpistrat.tensorflow uses.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
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

# -- attributes of objects --------------------------------------------------------------------------------------------


def operation_seeds() -> random.Random:
    """TensorFlow's generator of the seeds of operations. It exists when a global seed has been set."""
    seeds: random.Random = context()._rng
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
    return next(name for name in _DATASETS if hasattr(distributed, name))


def ends_on_all_ranks_together(distributed: tf.distribute.DistributedDataset) -> None:
    """Switch off the collective before each step that finds out whether any rank has data left."""
    distributed._enable_get_next_as_optional = False


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions of a dataset, as TensorFlow wraps them."""
    return list(dataset._functions())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    return list(dataset._inputs())


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
    first: tf.TypeSpec = spec._value_specs[0]
    return first


_STATE_OF_MANAGER = ("_maybe_delete", "_latest_checkpoint", "_last_preserved_timestamp")


def state_of_manager(manager: tf.train.CheckpointManager) -> list[Any]:
    """Which checkpoints a manager has kept, and when. It can be pickled."""
    return [getattr(manager, name) for name in _STATE_OF_MANAGER]


def set_state_of_manager(manager: tf.train.CheckpointManager, state: Iterable[Any]) -> None:
    """Give a manager the state of another one."""
    for name, value in zip(_STATE_OF_MANAGER, state, strict=True):
        setattr(manager, name, value)


__all__ = [
    "DistributedVariable", "InputWorkers", "MirroredVariable", "SyncOnReadVariable", "UpdateContext",
    "arrays_of", "create_mirrored_variable", "datasets_of", "ends_on_all_ranks_together", "functions_of",
    "get_distributed_dataset", "get_distributed_datasets_from_function", "global_seed", "inputs_of", "is_mirrored",
    "is_sync_on_read", "numbers_of", "operation_seeds", "regroup", "saved_models",
    "select_replica", "set_datasets", "set_state_of_manager", "spec_of_replica", "state_of_manager",
    "update_regroup", "validate_colocate_distributed_variable", "value_container",
]
