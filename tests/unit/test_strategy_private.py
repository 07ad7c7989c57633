"""MPIStrategy alone: what it imports of TensorFlow and Keras is there, and a lone rank trains as without it."""

import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import mpistrat
from mpistrat.core.install import numbers, require_version

from ..support.jobs import job_environment

tf = pytest.importorskip("tensorflow")


def test_tensorflow_has_the_private_names() -> None:
    private = importlib.import_module("mpistrat.tensorflow.bridge._private")
    assert all(hasattr(private, name) for name in private.__all__)


def keras_integration() -> ModuleType:
    """The package that replaces functions of Keras, with none replaced: a test before may have made a strategy."""
    pytest.importorskip("keras")
    integration = importlib.import_module("mpistrat.strategy.keras")
    integration.undo()
    importlib.import_module("mpistrat.keras.patches").apply()  # Those that are not for strategies stay.
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
    with pytest.raises(mpistrat.MissingDependencyError,
                       match='variables="sharded" divides the state of optimizers of Keras 3'):
        importlib.import_module("mpistrat.strategy").MPIStrategy(variables="sharded")
    monkeypatch.undo()
    monkeypatch.setattr("mpistrat.strategy.import_module", missing)
    with pytest.raises(mpistrat.MissingDependencyError, match="no Keras"):
        importlib.import_module("mpistrat.strategy").MPIStrategy(variables="sharded")


def missing(name: str) -> ModuleType:
    raise mpistrat.MissingDependencyError("no Keras")


def test_the_newest_keras_still_has_the_lines_that_make_the_patches_needed() -> None:
    keras = pytest.importorskip("keras")
    if numbers(keras.__version__) < [3, 15]:
        pytest.skip("the lines are those of Keras 3.15")
    for patch in keras_integration().PATCHES:
        if patch.upstream.startswith("https://"):
            continue
        original = inspect.unwrap(getattr(patch.owner, patch.name))
        place = f"{original.__module__}.{original.__qualname__}"
        assert place.startswith(("keras.src.", "tf_keras.src.")), \
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


def test_a_version_of_keras_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    integration = keras_integration()
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    with pytest.raises(mpistrat.MissingDependencyError, match=r"needs Keras 3\.10 or later, and this is 3\.9\.2 \(pip"):
        importlib.reload(integration)


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


TOO_NEW = """
import keras
keras.__version__ = "3.99.0"
import mpistrat.tensorflow
try:
    mpistrat.tensorflow.MPIStrategy()
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_strategy_with_a_keras_that_was_not_run_is_refused() -> None:
    pytest.importorskip("keras")
    finished = subprocess.run([sys.executable, "-c", TOO_NEW], env=job_environment("", {}), text=True,
                              capture_output=True, timeout=250, check=False)
    assert finished.stdout.startswith("MissingDependencyError mpistrat.keras needs keras>=3"), finished.stderr


# -- Keras' private attributes ----------------------------------------------------------------------------------------


def model_with_layers_in_layers() -> tuple[Any, list[str]]:
    """A model, and the names of its running statistics: in a model in it, in a layer that is no model, and frozen."""
    keras = pytest.importorskip("keras")

    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.normalise, self.drop = keras.layers.BatchNormalization(name="in_layer"), keras.layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            return self.drop(self.normalise(x))

    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), Block(),
                              keras.layers.BatchNormalization(name="in_model")])
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False)
    dense = keras.layers.Dense(2, trainable=False)
    model = keras.Sequential([keras.Input((2,)), inner, frozen, dense])
    return model, ["frozen", "in_layer", "in_model"]


def names_of_statistics(model: Any) -> list[str]:
    statistics = importlib.import_module("mpistrat.keras.fit.running_statistics").running_statistics(model)
    assert {variable.name for variable in statistics} == {"moving_mean", "moving_variance"}
    return sorted(variable.path.split("/")[-2] for variable in statistics if variable.name == "moving_mean")


def test_running_statistics_are_those_of_all_layers_and_no_frozen_weights() -> None:
    model, names = model_with_layers_in_layers()
    assert names_of_statistics(model) == names
