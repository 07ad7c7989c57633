"""MPIStrategy alone: what it imports of TensorFlow and Keras is there, and a lone rank trains as without it."""

import importlib
import inspect
import re
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

import mpistrat
from mpistrat.core.install import numbers, require_version

tf = pytest.importorskip("tensorflow")


def test_tensorflow_has_the_private_names() -> None:
    private = importlib.import_module("mpistrat.tensorflow.bridge.private_names")
    assert all(hasattr(private, name) for name in private.__all__)


def keras_integration() -> ModuleType:
    """The package that replaces functions of Keras, with none replaced: a test before may have made a strategy."""
    pytest.importorskip("keras")
    integration = importlib.import_module("mpistrat.strategy.keras")
    integration.undo()
    importlib.import_module("mpistrat.keras.bridge.patches").apply()  # Those that are not for strategies stay.
    return integration


def test_keras_has_what_is_patched_and_gets_it_back() -> None:
    integration = keras_integration()
    patches = [patch for patch in integration.PATCHES if patch.is_for_strategy]
    originals = [getattr(patch.owner, patch.name) for patch in patches]
    own = [patch.name in vars(patch.owner) for patch in patches]
    integration.apply()
    integration.apply()
    assert all(getattr(patch.owner, patch.name) is not original for patch, original in zip(patches, originals))
    integration.undo()
    assert [getattr(patch.owner, patch.name) for patch in patches] == originals
    assert [patch.name in vars(patch.owner) for patch in patches] == own
    assert all(patch.reason for patch in integration.PATCHES)
    assert len({(patch.owner, patch.name) for patch in patches}) == len(patches)


def test_sharded_variables_need_keras_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.strategy.is_keras2_in_use", lambda: True)
    with pytest.raises(mpistrat.MissingDependencyError, match='variables="sharded" and "central" need Keras 3'):
        importlib.import_module("mpistrat.strategy").MPIStrategy(variables="sharded")
    monkeypatch.undo()
    monkeypatch.setattr("mpistrat.strategy.import_module",
                        Mock(side_effect=mpistrat.MissingDependencyError("no Keras")))
    with pytest.raises(mpistrat.MissingDependencyError, match="no Keras"):
        importlib.import_module("mpistrat.strategy").MPIStrategy(variables="sharded")


def test_the_newest_keras_still_has_the_lines_that_make_the_patches_needed() -> None:
    keras = pytest.importorskip("keras")
    if numbers(keras.__version__) < [3, 15]:
        pytest.skip("the lines are those of Keras 3.15")
    for patch in keras_integration().PATCHES:
        if patch.upstream.startswith("https://"):
            continue
        original = inspect.unwrap(getattr(patch.owner, patch.name))
        place = f"{original.__module__}.{original.__qualname__}"
        assert place.startswith(("keras.src.", "tf_keras.src.", "tensorflow.python.eager.backprop.")), \
            f"{place} is replaced twice, or is none of Keras' functions"
        assert patch.upstream in inspect.getsource(original), f"{place} has changed; is its replacement still needed?"


@pytest.mark.parametrize("is_dataset", [False, True])
def test_a_lone_rank_trains_on_every_batch_of_a_generator(is_dataset: bool) -> None:
    integration = keras_integration()
    keras = pytest.importorskip("keras")
    np = pytest.importorskip("numpy")

    def steps() -> int:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
        batches = ((np.ones((2, 2)), np.ones((2, 1))) for _ in range(4))
        specs = tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))
        model.fit(tf.data.Dataset.from_generator(lambda: batches, output_signature=specs) if is_dataset else batches,
                  verbose=0)
        return int(model.optimizer.iterations.numpy())

    with importlib.import_module("mpistrat.tensorflow").MPIStrategy().scope():
        in_scope = steps()
    integration.undo()
    assert in_scope == steps()


@pytest.mark.parametrize(("module", "version", "text"), [
    ("mpistrat.strategy.keras", "3.9.2", r"needs Keras 3\.10 or later \(pip.*Received: 3\.9\.2"),
    ("mpistrat.keras", "3.99.0", "mpistrat.keras needs keras>=3")])
def test_a_version_of_keras_that_was_not_run_is_refused(module: str, version: str, text: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    keras, imported = pytest.importorskip("keras"), importlib.import_module(module)
    keras_integration()
    monkeypatch.setattr(keras, "__version__", version)
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        importlib.reload(imported)


# -- versions that were not run ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("package", "version", "is_refused"), [
    ("tensorflow", "2.16.0", True), ("tensorflow", "2.16.1", False), ("tensorflow", "2.21.3", False),
    ("tensorflow", "2.22.0-rc0", True), ("keras", "2.15.0", True), ("keras", "3.0.4", True), ("keras", "3.0.5", False),
    ("keras", "3.15.1.dev1", False), ("keras", "3.16.0", True)])
def test_a_version_that_was_not_run_is_refused_with_what_to_install(package: str, version: str,
                                                                    is_refused: bool) -> None:
    if not is_refused:
        require_version("a part", package, version)
        return
    text = rf"^a part needs {package}>=.*, and {package} is {re.escape(version)} \(pip install -U "
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        require_version("a part", package, version)


# -- Keras' private attributes ----------------------------------------------------------------------------------------


def test_running_statistics_are_those_of_all_layers_and_no_frozen_weights() -> None:
    keras = pytest.importorskip("keras")
    layers = keras.layers

    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.normalise, self.drop = layers.BatchNormalization(name="in_layer"), layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            return self.drop(self.normalise(x))

    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2), Block(), layers.BatchNormalization(name="in_model")])
    model = keras.Sequential([keras.Input((2,)), inner, layers.BatchNormalization(name="frozen", trainable=False),
                              layers.Dense(2, trainable=False)])
    found = importlib.import_module("mpistrat.keras.bridge.training").running_statistics(model)
    assert sorted((*variable.path.split("/")[-2:],) for variable in found) == [
        (layer, name) for layer in ("frozen", "in_layer", "in_model") for name in ("moving_mean", "moving_variance")]
