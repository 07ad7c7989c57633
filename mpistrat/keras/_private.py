"""The private names of Keras that mpistrat uses; every other module imports them from here.

They were run with Keras 3.0.5 to 3.15, those of MPIStrategy with 3.10 to 3.15. There are two groups:

- DistributedOptimizer needs two registries. They are looked up when an optimizer is created; without them training
  works, and a warning says what does not. The broadcast callback looks for layers in layers.
- MPIStrategy needs the second group. Where a name is missing, `require_for_strategy` raises when a strategy is created,
  and the rest of mpistrat.keras works. keras.distribute.patches compares the signatures of all functions that
  MPIStrategy replaces.
"""

import logging
from collections.abc import Callable
from importlib import import_module

import keras
import tensorflow as tf

from ..core.errors import MissingDependencyError
from ..core.install import pip

logger = logging.getLogger(__name__)

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
    """Make LossScaleOptimizer check the gradients of all ranks for overflow, if its inner optimizer is distributed.

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
        inner = self.inner_optimizer
        return all_ranks(inner, finite) if getattr(inner, "is_distributed", False) else finite

    check_finite._mpistrat = True  # type: ignore[attr-defined]
    optimizer.check_finite = check_finite


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of a model and those in its layers; without Keras' private method only the former."""
    flatten = getattr(model, "_flatten_layers", None)
    return list(model.layers) if flatten is None else list(flatten(include_self=False, recursive=True))


# -- MPIStrategy ------------------------------------------------------------------------------------------------------

# With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
_OLDEST = (3, 10)

_missing_for_strategy: ImportError | None = None
try:
    from keras.src.backend.tensorflow import trainer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
except ImportError as _error:
    _missing_for_strategy = _error


def require_for_strategy() -> None:
    """Raise MissingDependencyError where Keras is too old for MPIStrategy, or lacks a name that it needs."""
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise MissingDependencyError(f"MPIStrategy needs Keras {oldest} or later, and this is {keras.__version__} "
                                     f"({pip(f'keras>={oldest}')}).")
    if _missing_for_strategy is not None:
        raise strategy_unsupported(_missing_for_strategy) from _missing_for_strategy


def strategy_unsupported(what: object) -> MissingDependencyError:
    """The error of MPIStrategy for something that this version of Keras lacks."""
    return MissingDependencyError(f"MPIStrategy does not support Keras {keras.__version__}: {what}. It was run with "
                                  "Keras 3.10 to 3.15. DistributedOptimizer works without it.")


__all__ = ["REGISTRIES", "GeneratorDataAdapter", "agree_on_finite", "all_layers", "legacy_h5_format",
           "require_for_strategy", "saving_lib", "serialise_as", "strategy_unsupported", "trainer"]
