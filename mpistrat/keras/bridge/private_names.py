"""Private names of Keras that several modules use, and functions that find the optimizers inside an optimizer. Local.

The module was tested with all versions of Keras that `import mpistrat.keras` accepts. `require_hooks` in
mpistrat/keras/optimizers/optimizer.py checks for the private methods that Keras calls while it applies gradients.
"""

from collections.abc import Iterable, Iterator
from functools import partialmethod
from typing import Any

import keras
from keras.optimizers import Optimizer
from keras.src.api_export import REGISTERED_OBJS_TO_NAMES
from keras.src.backend.tensorflow import trainer
from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format
from keras.src.saving import saving_lib as saving_lib
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

from ...tensorflow.kerases import IdentitySet, is_keras2, is_optimizer

# The base classes of keras.Model: the class of all backends, and TensorFlow's class. Keras 3.16 has other names.
BaseTrainer = getattr(trainer.base_trainer, "BaseTrainer", None) or trainer.base_trainer.Trainer
TensorFlowTrainer = getattr(trainer, "TensorFlowTrainer", None) or trainer.Trainer

Logs = dict[str, Any] | None  # The logs of a batch or an epoch that a callback gets


class CalledByKeras2:
    """A mix-in for callback classes of Keras 3. It adds the attributes and methods that fit of Keras 2 reads."""

    _chief_worker_only = None
    _supports_tf_logs = False  # So the callback gets numbers.

    def _implements(self, *names: str) -> bool:
        return not all(getattr(getattr(self, f"on_{name}_{end}"), "_is_default", False)
                       for name in names for end in ("begin", "end"))

    _implements_train_batch_hooks = partialmethod(_implements, "batch", "train_batch")
    _implements_test_batch_hooks = partialmethod(_implements, "test_batch")
    _implements_predict_batch_hooks = partialmethod(_implements, "predict_batch")


class Callback(CalledByKeras2, keras.callbacks.Callback):
    """The base of callbacks for fit of Keras 3 and 2. Subclasses must not read batch logs, which may be tensors."""

    _supports_tf_logs = True


def serialise_as(subclass: type, original: type) -> None:
    """Make Keras save objects of the class `subclass` under the public name of `original`.

    Keras looks up the public name of a class in a registry. A subclass made at run time is not registered. So Keras
    would save the private module path of the original, which only this version of Keras can load.
    """
    for registry in (REGISTERED_OBJS_TO_NAMES, GLOBAL_CUSTOM_NAMES):  # Keras' own classes, and those of users
        if original in registry:
            registry[subclass] = registry[original]
    for name in ("_keras_api_names", "_keras_api_names_v1"):  # Keras 2's
        if name in vars(original):
            setattr(subclass, name, vars(original)[name])


def all_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    return list(model._flatten_layers(include_self=False, recursive=True))


def weights_of(model: keras.Model) -> list[keras.Variable]:
    """Return the weights of a model that exist so far. Variables of metrics are left out, also for Keras 2."""
    if not is_keras2(model):
        return list(model.weights)
    # In Keras 2 `weights` raises an error if an inner model gets its weights from the first batch (tf_keras'
    # Model._assert_weights_created). A tf.Module that is no layer has only `variables`.
    return list(IdentitySet(variable for module in model._flatten_modules() for variable in (
        (*module._trainable_weights, *module._non_trainable_weights) if "_trainable_weights" in vars(module)
        else module.variables)))


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return a model's non-trainable variables, such as running statistics. Weights of frozen layers are left out."""
    name = "_non_trainable_weights" if is_keras2(model) else "_non_trainable_variables"
    return list(IdentitySet(variable for layer in (model, *all_layers(model)) for variable in getattr(layer, name)))


# -- the optimizers inside of a LossScaleOptimizer or a MultiOptimizer -------------------------------------------------


def trained_by(optimizer: Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for."""
    variables: list[keras.Variable] = getattr(optimizer, "_trainable_variables", [])  # Not an attribute of Keras 2.
    inner = getattr(optimizer, "inner_optimizer", None)
    return variables if variables or inner is None else trained_by(inner)  # A LossScaleOptimizer of Keras 3.0 has none.


def parts_of(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """Yield `optimizer`, and then its inner optimizers. Yield nothing for None.

    A MultiOptimizer that gets its optimizers from a function has no inner optimizers before it is built.
    """
    if optimizer is None:
        return
    yield optimizer
    for inside in (getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())):
        yield from parts_of(inside)


def passes_on(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return whether an optimizer, or class, hands its gradients to inner optimizers, which may not exist yet."""
    return hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")


def distributed_in(optimizer: Optimizer | None) -> list[Any]:
    """Return those of `optimizer` and its inner optimizers that average gradients over the ranks; [] for None."""
    return [part for part in parts_of(optimizer) if getattr(part, "is_distributed", False)]


def states_in(optimizers: Iterable[Optimizer | None]) -> list[Any]:
    """Return the WholeState of each optimizer, and inner optimizer, whose state is divided among the ranks."""
    found = {id(part): getattr(vars(part).get("_mpistrat"), "whole", None)
             for optimizer in optimizers for part in parts_of(optimizer)}
    return [state for state in found.values() if state is not None]


def optimizers_in(value: object) -> Iterator[Optimizer]:
    """Yield `value`, if it is an optimizer, or the optimizers in nested lists, tuples and dicts. Cycles are allowed."""
    seen, left = set(), [value]
    while left:
        each = left.pop()
        if is_optimizer(each):
            yield each
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            left += reversed(each.values() if isinstance(each, dict) else each)
