"""What DistributedOptimizer needs of Keras that is not public: two registries. Checked by a test; there in 3.0 to 3.15.

They are looked for when an optimizer is made, and training does without them.
"""

import logging
from importlib import import_module
from typing import Any

import keras

logger = logging.getLogger(__name__)

# Where Keras keeps the public names of its own classes, and of classes that users have registered.
REGISTRIES = (("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES"),
              ("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES"))


def serialise_as(subclass: type, original: type) -> None:
    """Make Keras write `subclass` to files under the name of `original`.

    Keras looks up the public name of a class in a registry; a subclass made at run time is not in it, and is written
    under the name of the module that its original is in. That is read where this module is, so by this version.
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


def agree_on_finite(all_ranks: Any) -> None:
    """Make LossScaleOptimizer ask all ranks whether the gradients are finite, when its inner optimizer is distributed.

    Keras looks at the local gradients only, before they are averaged (under mixed_float16 compile wraps every optimizer
    in a LossScaleOptimizer). A rank with an overflow would skip the step and the others wait for its gradients.

    Args:
        all_ranks: Takes a boolean scalar tensor and returns whether it is true on every rank.
    """
    optimizer = keras.optimizers.LossScaleOptimizer
    local = optimizer.check_finite
    if getattr(local, "_mpistrat", False):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local(self, grads)
        return all_ranks(finite) if getattr(self.inner_optimizer, "is_distributed", False) else finite

    check_finite._mpistrat = True  # type: ignore[attr-defined]
    optimizer.check_finite = check_finite
