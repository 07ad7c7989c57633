"""The private names of Keras that mpistrat uses; every other module imports them from here.

They were run with Keras 3.0.5 to 3.15, those of MPIStrategy with 3.10 to 3.15. There are three groups:

- DistributedOptimizer needs two registries. They are looked up when an optimizer is created; without them training
  works, and a warning says what does not. The broadcast callback and the average of running statistics look for layers
  in layers, and have public substitutes.
- Attributes that objects have from their __init__ on. They are checked at their first use. (keras.optimizer checks the
  hooks that Keras calls while it applies gradients.)
- MPIStrategy needs the third group. Where a name is missing, `require_for_strategy` raises when a strategy is created,
  and the rest of mpistrat.keras works. keras.distribute.patches compares the signatures of all functions that
  MPIStrategy replaces.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import keras
import tensorflow as tf

from ..core.errors import MissingDependencyError
from ..core.install import pip, pip_extra
from .optimizer_parts import distributed_in

logger = logging.getLogger(__name__)


def is_older_than(major: int, minor: int) -> bool:
    """Whether this is an older version of Keras."""
    return tuple(int(part) for part in keras.__version__.split(".")[:2]) < (major, minor)


# -- DistributedOptimizer ---------------------------------------------------------------------------------------------

# Where Keras keeps the public names of its own classes, and of classes that users have registered.
REGISTRIES = (("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES"),
              ("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES"))


def serialise_as(subclass: type, original: type) -> None:
    """Make Keras save `subclass` under the public name of `original`.

    Keras looks up the public name of a class in a registry. A subclass made at run time is not in it, so Keras would
    save the private module path of its original, which only this version of Keras can load.
    """
    for module, name in REGISTRIES:
        try:
            registry: dict[type, str] = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            logger.warning("Keras %s has no %s.%s: models that are saved with a DistributedOptimizer may not load with "
                           "other versions of Keras.", keras.__version__, module, name)
            continue
        if original in registry:
            registry[subclass] = registry[original]


def agree_on_finite(all_ranks: Callable[[keras.optimizers.Optimizer, tf.Tensor], tf.Tensor]) -> None:
    """Make LossScaleOptimizer check the gradients of all ranks for overflow, if an optimizer in it is distributed.

    Keras checks the local gradients only, before they are averaged. (Under mixed_float16 compile() wraps every
    optimizer in a LossScaleOptimizer.) A rank with an overflow would skip the step while the others wait for its
    gradients.

    Args:
        all_ranks: Takes a distributed optimizer and a boolean scalar tensor, and returns whether it is true on every
            rank of the optimizer's process set. Collective.
    """
    optimizer = keras.optimizers.LossScaleOptimizer
    local = optimizer.check_finite
    if getattr(local, "_mpistrat", False):
        return

    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: list[tf.Tensor]) -> tf.Tensor:
        finite = local(self, grads)
        inner = distributed_in(self.inner_optimizer)
        return all_ranks(inner[0], finite) if inner else finite

    check_finite._mpistrat = True  # type: ignore[attr-defined]
    optimizer.check_finite = check_finite


_FLATTEN, _OWN_STATE = "_flatten_layers", "_non_trainable_variables"


def all_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers of a model or layer and those in them; without Keras' private method only those of a model."""
    flatten = getattr(model, _FLATTEN, None)
    return list(getattr(model, "layers", ())) if flatten is None else list(flatten(include_self=False, recursive=True))


def functions_of(dataset: object) -> Iterator[object]:
    """The functions that a tf.data pipeline calls; without TensorFlow's private names, and for other objects, none."""
    if isinstance(dataset, tf.data.Dataset) and hasattr(dataset, "_inputs") and hasattr(dataset, "_functions"):
        for wrapper in dataset._functions():
            yield getattr(wrapper, "_func", None)
        for inside in dataset._inputs():
            yield from functions_of(inside)


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of all layers in it that are no weights, not even weights of a frozen layer.

    Without Keras' private names those of frozen layers are missing: Keras' public list has them among the weights.
    """
    layers = [model, *all_layers(model)]
    if hasattr(model, _FLATTEN) and all(hasattr(layer, _OWN_STATE) for layer in layers):
        return [variable for layer in layers for variable in getattr(layer, _OWN_STATE)]
    frozen = {id(variable) for layer in layers if not layer.trainable for variable in layer.variables}
    return [variable for variable in model.non_trainable_variables if id(variable) not in frozen]


# -- attributes of objects --------------------------------------------------------------------------------------------


def _required(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise MissingDependencyError(
            f"mpistrat.keras does not support Keras {keras.__version__}: {type(owner).__name__} has no {name}. It was "
            f"run with Keras 3.0.5 to 3.15. Install such a version ({pip_extra('tensorflow')}).") from None


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    variables: list[keras.Variable] = _required(optimizer, "_trainable_variables")
    inner = getattr(optimizer, "inner_optimizer", None)
    return variables if variables or inner is None else trained_by(inner)  # A LossScaleOptimizer of Keras 3.0 has none.


def calls_of(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The number of calls of `apply`. The public `iterations` is less, if gradients are accumulated."""
    return _required(optimizer, "_iterations")


def accumulators_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables in which a built optimizer accumulates gradients."""
    variables: list[keras.Variable] = _required(optimizer, "_accumulated_gradients")
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
    return _required(optimizer, "_distribution_strategy")


def set_strategy_of_optimizer(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make an optimizer one of another strategy."""
    _required(optimizer, "_distribution_strategy")
    optimizer._distribution_strategy = strategy


def create_anew(variable: keras.Variable) -> None:
    """Give a variable a new tf.Variable with its value, made in the current scope."""
    _required(variable, "_initialize")(tf.convert_to_tensor(variable))


def distributed_dataset(iterator: object) -> Any:
    """The distributed dataset that Keras' iterator of an epoch reads."""
    return _required(iterator, "_distributed_dataset")


def set_number_of_batches(iterator: object, number: int | None) -> None:
    """Set how many batches an epoch has; None: as many as there are. Keras takes the number from the user's dataset."""
    _required(iterator, "_num_batches")
    setattr(iterator, "_num_batches", number)  # noqa: B010


def epoch_after_backup(model: keras.Model) -> int | None:
    """The epoch in which `fit` begins, if a backup has been restored."""
    epoch: int | None = _required(model, "_initial_epoch")
    return epoch


def set_epoch_after_backup(model: keras.Model, epoch: int | None) -> None:
    """Set the epoch in which `fit` begins."""
    _required(model, "_initial_epoch")
    model._initial_epoch = epoch


def path_of_checkpoint(callback: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None,
                       logs: dict[str, Any] | None) -> str:
    """The file that a ModelCheckpoint writes now."""
    path: str = _required(callback, "_get_file_path")(epoch, batch, logs)
    return path


def paths_of_backup(callback: keras.callbacks.BackupAndRestore) -> tuple[str, str]:
    """The files of a BackupAndRestore: the weights, and the epoch and batch."""
    return _required(callback, "_weights_path"), _required(callback, "_training_metadata_path")


# -- MPIStrategy ------------------------------------------------------------------------------------------------------

# With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
_OLDEST = (3, 10)

_missing_for_strategy: ImportError | None = None
try:
    from keras.src.backend.tensorflow import trainer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
except ImportError as _error:
    _missing_for_strategy = _error


def require_for_strategy() -> None:
    """Raise MissingDependencyError where Keras is too old for MPIStrategy, or lacks a name that it needs."""
    if is_older_than(*_OLDEST):
        oldest = ".".join(map(str, _OLDEST))
        raise MissingDependencyError(f"MPIStrategy needs Keras {oldest} or later, and this is {keras.__version__} "
                                     f"({pip(f'keras>={oldest}')}).")
    if _missing_for_strategy is not None:
        raise strategy_unsupported(_missing_for_strategy) from _missing_for_strategy


def strategy_unsupported(what: object) -> MissingDependencyError:
    """The error of MPIStrategy for something that this version of Keras lacks."""
    return MissingDependencyError(f"MPIStrategy does not support Keras {keras.__version__}: {what}. It was run with "
                                  "Keras 3.10 to 3.15. DistributedOptimizer works without it.")


__all__ = ["REGISTRIES", "GeneratorDataAdapter", "TFDatasetAdapter", "accumulators_of", "agree_on_finite",
           "all_layers", "calls_of", "config_without", "create_anew", "decay_exclusions_of", "distributed_dataset",
           "epoch_after_backup", "functions_of", "is_older_than", "legacy_h5_format", "non_trainable_variables",
           "objects_given_to", "path_of_checkpoint", "paths_of_backup", "require_for_strategy", "saving_lib",
           "serialise_as", "set_epoch_after_backup", "set_number_of_batches", "set_strategy_of_optimizer",
           "strategy_of_optimizer", "strategy_unsupported", "trained_by", "trainer"]
