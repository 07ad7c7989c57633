"""Private names of Keras that several modules use. Tested with all versions that `import mpistrat.keras` accepts.

(keras.optimizer checks the hooks that Keras calls while it applies gradients.)
"""

from typing import Any

import keras
from keras.src.api_export import REGISTERED_OBJS_TO_NAMES
from keras.src.backend.tensorflow import trainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

from ...tensorflow.kerases import IdentitySet, is_keras2

__all__ = ["BaseTrainer", "CalledByKeras2", "Callback", "Logs", "TensorFlowTrainer", "all_layers", "legacy_h5_format",
           "non_trainable_variables", "saving_lib", "serialise_as", "trained_by", "trainer", "weights_of"]

# The base classes of keras.Model: the class of all backends, and TensorFlow's class. Keras 3.16 has other names.
BaseTrainer = getattr(trainer.base_trainer, "BaseTrainer", None) or trainer.base_trainer.Trainer
TensorFlowTrainer = getattr(trainer, "TensorFlowTrainer", None) or trainer.Trainer

Logs = dict[str, Any] | None  # The logs of a batch or an epoch that a callback gets


class CalledByKeras2:
    """A mix-in before callback classes of Keras 3, with the attributes and methods that fit of Keras 2 reads."""

    _chief_worker_only = None
    _supports_tf_logs = False  # So the callback gets numbers.

    def _implements_train_batch_hooks(self) -> bool:
        return self._implements("batch", "train_batch")

    def _implements_test_batch_hooks(self) -> bool:
        return self._implements("test_batch")

    def _implements_predict_batch_hooks(self) -> bool:
        return self._implements("predict_batch")

    def _implements(self, *names: str) -> bool:
        return not all(getattr(getattr(self, f"on_{name}_{end}"), "_is_default", False)
                       for name in names for end in ("begin", "end"))


class Callback(CalledByKeras2, keras.callbacks.Callback):
    """A callback for fit of Keras 3 and Keras 2. mpistrat's callbacks do not read the logs of a batch."""

    _supports_tf_logs = True


def serialise_as(subclass: type, original: type) -> None:
    """Make Keras save `subclass` under the public name of `original`.

    Keras looks up the public name of a class in a registry. A subclass made at run time is not registered, so Keras
    would save the private module path of the original, which only this version of Keras can load.
    """
    for registry in (REGISTERED_OBJS_TO_NAMES, GLOBAL_CUSTOM_NAMES):  # Keras' own classes, and those of users
        if original in registry:
            registry[subclass] = registry[original]
    for name in ("_keras_api_names", "_keras_api_names_v1"):  # Keras 2's
        if name in vars(original):
            setattr(subclass, name, vars(original)[name])


def all_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return all layers inside of a model or layer, at any depth."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def weights_of(model: keras.Model) -> list[keras.Variable]:
    """Return the existing weights of a model. Unlike in Keras 2, the variables of metrics are not weights."""
    if not is_keras2(model):
        return list(model.weights)
    # In Keras 2 `weights` raises an error if an inner model gets its weights from the first batch (tf_keras'
    # Model._assert_weights_created). A tf.Module that is no layer has only `variables`.
    return list(IdentitySet(variable for module in model._flatten_modules() for variable in (
        (*module._trainable_weights, *module._non_trainable_weights) if "_trainable_weights" in vars(module)
        else module.variables)))


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model and its layers that are never trained, without weights of frozen layers."""
    name = "_non_trainable_weights" if is_keras2(model) else "_non_trainable_variables"
    return [variable for layer in (model, *all_layers(model)) for variable in getattr(layer, name)]


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for."""
    variables: list[keras.Variable] = getattr(optimizer, "_trainable_variables", [])  # Not an attribute of Keras 2.
    inner = getattr(optimizer, "inner_optimizer", None)
    return variables if variables or inner is None else trained_by(inner)  # A LossScaleOptimizer of Keras 3.0 has none.
