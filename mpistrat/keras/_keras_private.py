"""What mpistrat needs of Keras that is not public: two registries, and one method to patch. Checked by a test.

Written against Keras 3.0 to 3.15. Everything here says why it is needed, and what happens without it.
"""

from typing import Any

from keras.src import api_export
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import object_registration


def serialise_as(subclass: type, original: type) -> None:
    """Make Keras write `subclass` to files under the name of `original`.

    Keras looks up the public name of a class in a registry; a subclass made at run time is not in it, and its name
    would lead nowhere when the file is loaded. A user's registered class is in a second registry.
    """
    names = api_export.REGISTERED_OBJS_TO_NAMES
    if original in names:
        names[subclass] = names[original]
    custom = object_registration.GLOBAL_CUSTOM_NAMES
    if original in custom:
        custom[subclass] = custom[original]


def agree_on_finite(all_ranks: Any) -> None:
    """Make LossScaleOptimizer ask all ranks whether the gradients are finite, when its inner optimizer is distributed.

    Keras looks at the local gradients only, before they are averaged (under mixed_float16 compile wraps every optimizer
    in a LossScaleOptimizer). A rank with an overflow would skip the step and the others wait for its gradients.

    Args:
        all_ranks: Takes a boolean scalar tensor and returns whether it is true on every rank.
    """
    local = LossScaleOptimizer.check_finite
    if getattr(local, "_mpistrat", False):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local(self, grads)
        return all_ranks(finite) if getattr(self.inner_optimizer, "is_distributed", False) else finite

    check_finite._mpistrat = True  # type: ignore[attr-defined]
    LossScaleOptimizer.check_finite = check_finite
