"""The private names of Keras that mpistrat uses; every other module imports them from here.

They were run with all versions of Keras that `import mpistrat.keras` accepts, those of MPIStrategy with 3.10 to 3.15.
(keras.optimizer checks the hooks that Keras calls while it applies gradients.)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.api_export import REGISTERED_OBJS_TO_NAMES
from keras.src.backend.tensorflow import trainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from ..core.errors import MissingDependencyError
from ..core.install import pip
from ..tensorflow import _private as tensorflow_private


def is_older_than(major: int, minor: int) -> bool:
    """Whether this is an older version of Keras."""
    return tuple(int(part) for part in keras.__version__.split(".")[:2]) < (major, minor)


# -- DistributedOptimizer ---------------------------------------------------------------------------------------------

def serialise_as(subclass: type, original: type) -> None:
    """Make Keras save `subclass` under the public name of `original`.

    Keras looks up the public name of a class in a registry. A subclass made at run time is not in it, so Keras would
    save the private module path of its original, which only this version of Keras can load.
    """
    for registry in (REGISTERED_OBJS_TO_NAMES, GLOBAL_CUSTOM_NAMES):  # Keras' own classes, and those of users
        if original in registry:
            registry[subclass] = registry[original]



def saves_epochs(callback: keras.callbacks.BackupAndRestore) -> bool:
    """Whether a BackupAndRestore saves the epoch in a file of its own. That of Keras 3.0 saves the weights alone."""
    return hasattr(callback, _EPOCH_PATH)


def all_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers of a model or layer and those in them."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def functions_of(dataset: object) -> Iterator[object]:
    """The functions that a tf.data pipeline calls; for other objects, none."""
    if isinstance(dataset, tf.data.Dataset):
        for wrapper in tensorflow_private.functions_of(dataset):
            yield getattr(wrapper, "_func", None)
        for inside in tensorflow_private.inputs_of(dataset):
            yield from functions_of(inside)


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of all layers in it that are no weights, not even weights of a frozen layer."""
    return [variable for layer in (model, *all_layers(model)) for variable in layer._non_trainable_variables]


# -- attributes of objects --------------------------------------------------------------------------------------------


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    variables: list[keras.Variable] = optimizer._trainable_variables
    inner = getattr(optimizer, "inner_optimizer", None)
    return variables if variables or inner is None else trained_by(inner)  # A LossScaleOptimizer of Keras 3.0 has none.


def calls_of(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The number of calls of `apply`. The public `iterations` is less, if gradients are accumulated."""
    return optimizer._iterations


def accumulators_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables in which a built optimizer accumulates gradients."""
    variables: list[keras.Variable] = optimizer._accumulated_gradients
    return variables


# The constructor's arguments that may be objects, and the attributes that have them.
_OBJECTS = {"learning_rate": "_learning_rate", "inner_optimizer": "inner_optimizer", "optimizer_map": "_optimizer_map"}
# The attributes that exclude_from_weight_decay sets begin so. They are no part of the configuration.
_EXCLUSIONS = "_exclude_from_weight_decay"


def objects_given_to(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The constructor's arguments of an optimizer that are schedules, functions or optimizers, by their names."""
    found = {argument: getattr(optimizer, attribute, None) for argument, attribute in _OBJECTS.items()}
    return {name: value for name, value in found.items()
            if callable(value) or isinstance(value, keras.optimizers.Optimizer)}


def config_without(optimizer: keras.optimizers.Optimizer, arguments: Iterable[str]) -> dict[str, Any]:
    """The configuration of an optimizer without these of `objects_given_to`, which Keras may not be able to save."""
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    # get_config of an older Keras fails without a learning rate.
    vars(stand_in).update({_OBJECTS[name]: tf.constant(0.0) if name == "learning_rate" else None for name in arguments})
    config: dict[str, Any] = stand_in.get_config()
    return {name: value for name, value in config.items() if name not in arguments}


def decay_exclusions_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that say which variables have no weight decay."""
    return {name: value for name, value in vars(optimizer).items()
            if name.startswith(_EXCLUSIONS) and not name.endswith("_cache")}


def strategy_of_optimizer(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def set_strategy_of_optimizer(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make an optimizer one of another strategy."""
    optimizer._distribution_strategy = strategy


def create_anew(variable: keras.Variable) -> None:
    """Give a variable a new tf.Variable with its value, made in the current scope."""
    variable._initialize(tf.convert_to_tensor(variable))


def distributed_dataset(iterator: trainer.TFEpochIterator) -> Any:
    """The distributed dataset that Keras' iterator of an epoch reads."""
    return iterator._distributed_dataset


def set_number_of_batches(iterator: trainer.TFEpochIterator, number: int | None) -> None:
    """Set how many batches an epoch has; None: as many as there are. Keras takes the number from the user's dataset."""
    iterator._num_batches = number


def goes_on_after_backup(model: keras.Model) -> bool:
    """Whether `fit` begins after the epoch of a backup. With an old Keras it begins anew with the backup's weights."""
    return hasattr(model, "_initial_epoch")


def epoch_after_backup(model: keras.Model) -> int | None:
    """The epoch in which `fit` begins, if a backup has been restored."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_epoch_after_backup(model: keras.Model, epoch: int | None) -> None:
    """Set the epoch in which `fit` begins."""
    model._initial_epoch = epoch


def path_of_checkpoint(callback: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None,
                       logs: dict[str, Any] | None) -> str:
    """The file that a ModelCheckpoint writes now."""
    path: str = callback._get_file_path(epoch, batch, logs)
    return path


_EPOCH_PATH = "_training_metadata_path"


@contextmanager
def epoch_of_backup_in(callback: keras.callbacks.BackupAndRestore, path: str) -> Iterator[None]:
    """A context in which a BackupAndRestore has its epoch and batch in this file."""
    before = getattr(callback, _EPOCH_PATH)
    setattr(callback, _EPOCH_PATH, path)
    try:
        yield
    finally:
        setattr(callback, _EPOCH_PATH, before)


def paths_of_backup(callback: keras.callbacks.BackupAndRestore) -> tuple[str, str]:
    """The files of a BackupAndRestore: the weights, and the epoch and batch."""
    return callback._weights_path, getattr(callback, _EPOCH_PATH)


# -- MPIStrategy ------------------------------------------------------------------------------------------------------

# With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
_OLDEST = (3, 10)


def require_for_strategy() -> None:
    """Raise MissingDependencyError where Keras is too old for MPIStrategy."""
    if is_older_than(*_OLDEST):
        oldest = ".".join(map(str, _OLDEST))
        raise MissingDependencyError(f"MPIStrategy needs Keras {oldest} or later, and this is {keras.__version__} "
                                     f"({pip(f'keras>={oldest}')}).")


__all__ = ["GeneratorDataAdapter", "TFDatasetAdapter", "accumulators_of",
           "all_layers", "calls_of", "config_without", "create_anew", "decay_exclusions_of",
           "distributed_dataset", "epoch_after_backup", "epoch_of_backup_in", "functions_of", "goes_on_after_backup",
           "is_older_than", "legacy_h5_format", "non_trainable_variables", "objects_given_to", "path_of_checkpoint",
           "paths_of_backup", "require_for_strategy", "saves_epochs", "saving_lib", "serialise_as",
           "set_epoch_after_backup", "set_number_of_batches", "set_strategy_of_optimizer", "strategy_of_optimizer",
           "trained_by", "trainer"]
