"""MPIStrategy alone: what it imports of TensorFlow and Keras is there, and a lone rank trains as without it."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpistrat

from ..support.jobs import job_environment

tf = pytest.importorskip("tensorflow")

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_tensorflow_has_the_private_names() -> None:
    private = importlib.import_module("mpistrat.tensorflow._private")
    private.require_for_strategy()
    assert all(hasattr(private, name) for name in private.__all__)
    assert importlib.import_module("mpistrat.tensorflow.bridge._private").missing == {}


def test_a_private_function_with_other_parameters_is_named() -> None:
    private = importlib.import_module("mpistrat.tensorflow._private")

    def moved(values: list, always_wrap: bool = False) -> None:
        pass

    assert private.rejected([private.Call(moved, 1, ("always_wrap",)), private.Call(moved, 2)]) == []
    told, = private.rejected([private.Call(moved, 1, ("wrap",))])
    assert "moved(values: list, always_wrap: bool = False) -> None has changed" in told and "'wrap'" in told


def keras_integration() -> ModuleType:
    """The package that replaces functions of Keras, with none replaced: a test before may have made a strategy."""
    pytest.importorskip("keras")
    integration = importlib.import_module("mpistrat.keras.distribute")
    integration.undo()
    importlib.import_module("mpistrat.keras.whole_files").wrap_saving()  # It stays.
    return integration


def test_keras_has_what_is_patched_and_gets_it_back() -> None:
    integration = keras_integration()
    originals = [getattr(patch.owner, patch.name) for patch in integration.PATCHES]
    own = [patch.name in vars(patch.owner) for patch in integration.PATCHES]
    integration.apply()
    integration.apply()
    assert all(getattr(patch.owner, patch.name) is not original
               for patch, original in zip(integration.PATCHES, originals))
    integration.undo()
    assert [getattr(patch.owner, patch.name) for patch in integration.PATCHES] == originals
    assert [patch.name in vars(patch.owner) for patch in integration.PATCHES] == own
    assert all(patch.reason for patch in integration.PATCHES)
    assert len({(patch.owner, patch.name) for patch in integration.PATCHES}) == len(integration.PATCHES)


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


@pytest.mark.parametrize("changed", [
    lambda self, step, jit: None, lambda self: None, lambda self, function: None,
], ids=["one_more", "one_less", "renamed"])
def test_a_function_of_keras_with_other_parameters_is_refused(changed: Callable,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    integration = keras_integration()
    owner = importlib.import_module("mpistrat.keras._private").trainer.TensorFlowTrainer
    monkeypatch.setattr(owner, "_make_function", changed)
    text = r"Keras .*: TensorFlowTrainer\._make_function has the parameters \(self.*\), and not \(self, step_function\)"
    with pytest.raises(mpistrat.MissingDependencyError, match=text):
        integration.apply()


def test_a_version_of_keras_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    integration = keras_integration()
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    with pytest.raises(mpistrat.MissingDependencyError, match=r"needs Keras 3\.10 or later, and this is 3\.9\.2 \(pip"):
        integration.apply()


# -- names that have moved --------------------------------------------------------------------------------------------

TRAINS_WITHOUT = """
import importlib, sys
import keras, numpy, tensorflow as tf

moved = [(importlib.import_module(module), name) for module, name in [  # in the order in which they are imported
    ("tensorflow.python.distribute.distribute_utils", "validate_colocate_distributed_variable"),
    ("tensorflow.python.distribute.input_util", "get_distributed_dataset"),
    ("tensorflow.python.distribute.values", "SyncOnReadVariable")]]
moved.append((tf.train.Checkpoint, "_async_checkpointer"))
moved += [(importlib.import_module("keras.src.trainers.data_adapters.generator_data_adapter"), "GeneratorDataAdapter"),
          (importlib.import_module("keras.src.saving.saving_lib"), "save_model"),
          (keras.callbacks.SwapEMAWeights, "_tf_swap_variables")]
taken = [(owner, name, getattr(owner, name)) for owner, name in moved]
for owner, name in moved:
    delattr(owner, name)
hidden = sys.modules.pop("tensorflow.python.distribute.input_lib")
sys.modules["tensorflow.python.distribute.input_lib"] = None

import mpistrat.keras as hvd, mpistrat.tensorflow as hvt
hvd.init()
variable = tf.Variable(1.0)
with tf.GradientTape() as tape:
    loss = variable * 3.0
assert float(hvt.DistributedGradientTape(tape).gradient(loss, variable)) == 3.0
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
optimizer.build(model.trainable_variables)
optimizer.apply([tf.ones_like(v) for v in model.trainable_variables])
print("trained")

def strategy():
    for module in ("mpistrat.tensorflow._private", "mpistrat.keras._private"):
        sys.modules.pop(module, None)  # as in a process that begins now
    try:
        hvt.MPIStrategy()
        print("made")
    except ImportError as error:
        print(type(error).__name__, error)

strategy()
setattr(*taken.pop(0))
strategy()
sys.modules["tensorflow.python.distribute.input_lib"] = hidden
for owner, name, value in taken:
    strategy()
    setattr(owner, name, value)
strategy()
"""


def test_where_a_private_name_has_moved_only_the_strategy_is_refused() -> None:
    keras = pytest.importorskip("keras")
    finished = subprocess.run([sys.executable, "-c", TRAINS_WITHOUT], env=job_environment("", {}), text=True,
                              capture_output=True, timeout=250, check=False)
    assert finished.returncode == 0, finished.stderr
    trained, *refused, made = finished.stdout.splitlines()
    assert (trained, made) == ("trained", "made")
    missing = ["validate_colocate", "input_lib", "get_distributed_dataset", "SyncOnReadVariable", "_async_checkpointer",
               "GeneratorDataAdapter", "save_model", "SwapEMAWeights._tf_swap_variables"]
    assert len(refused) == len(missing)
    for i, (text, name) in enumerate(zip(refused, missing)):
        of = f"TensorFlow {tf.__version__}" if i < 5 else f"Keras {keras.__version__}"
        assert text.startswith(f"MissingDependencyError MPIStrategy does not support {of}: ") and name in text


def test_where_a_private_name_of_the_bridge_has_moved_collectives_work_or_say_what_to_install() -> None:
    pytest.importorskip("keras")
    finished = subprocess.run([sys.executable, SCRIPTS / "without_private_names.py"], env=job_environment("", {}),
                              text=True, capture_output=True, timeout=250, check=False)
    assert finished.returncode == 0, finished.stderr
    reports = dict(line.split(": ", 1) for line in finished.stdout.splitlines())
    assert len(reports) == 14
    for name, report in reports.items():
        is_python_op, is_executor = name in ("EagerFunc", "insert"), name.startswith("TFE_") or name in (
            "context", "ensure_initialized", "_handle")
        missing, on_gpu, asynchronous, xla = json.loads(report)
        assert missing == [name]
        assert xla == ("InvalidArgumentError" if name == "GraphOrParentsInXlaContext" else "InvalidRequestError")
        for text, is_refused, user in ((on_gpu, is_python_op, "with GPU tensors in a tf.function,"),
                                       (asynchronous, is_executor, "with asynchronous execution,")):
            if not is_refused:
                assert text == "works"
                continue
            assert text.startswith(f"MissingDependencyError: mpistrat.tensorflow, {user} does not support TensorFlow "
                                   f"{tf.__version__}: ")
            assert f"no attribute '{name}'. It was run with TensorFlow 2.16.1 to 2.21." in text
            assert "or install such a version (pip install 'tensorflow>=" in text


def test_where_keras_registries_have_moved_an_optimizer_still_trains_and_loads(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    private = importlib.import_module("mpistrat.keras._private")
    optimizers = importlib.import_module("mpistrat.keras.optimizer")
    assert all(hasattr(importlib.import_module(module), name) for module, name in private.REGISTRIES)
    monkeypatch.setattr(private, "REGISTRIES", (("keras.src.api_export", "MOVED"), ("keras.src.moved", "NAMES")))
    monkeypatch.setattr(optimizers, "_classes", {})
    mpistrat.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizers.DistributedOptimizer(keras.optimizers.RMSprop(0.25)), loss="mse")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"Keras {keras.__version__} has no keras.src.api_export.MOVED",
        f"Keras {keras.__version__} has no keras.src.moved.NAMES"]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded) is keras.optimizers.RMSprop and float(loaded.learning_rate) == 0.25


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
    statistics = importlib.import_module("mpistrat.keras.running_statistics").running_statistics(model)
    assert {variable.name for variable in statistics} == {"moving_mean", "moving_variance"}
    return sorted(variable.path.split("/")[-2] for variable in statistics if variable.name == "moving_mean")


def test_running_statistics_are_those_of_all_layers_and_no_frozen_weights() -> None:
    model, names = model_with_layers_in_layers()
    assert names_of_statistics(model) == names


@pytest.mark.parametrize("name", ["_FLATTEN", "_OWN_STATE"])
def test_running_statistics_without_private_names_are_those_of_layers_that_train(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = model_with_layers_in_layers()
    monkeypatch.setattr(importlib.import_module("mpistrat.keras._private"), name, "_moved")
    assert names_of_statistics(model) == [each for each in names if each != "frozen"]
    model.trainable = False
    assert importlib.import_module("mpistrat.keras.running_statistics").running_statistics(model) == []


def test_an_attribute_that_keras_lacks_is_named_with_the_versions_that_were_run() -> None:
    keras = pytest.importorskip("keras")
    private = importlib.import_module("mpistrat.keras._private")
    model, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1)
    backup = keras.callbacks.BackupAndRestore("backup")
    checkpoint = keras.callbacks.ModelCheckpoint("model.keras")
    for owner, name, use in [(optimizer, "_trainable_variables", private.trained_by),
                             (optimizer, "_iterations", private.calls_of),
                             (optimizer, "_distribution_strategy", private.strategy_of_optimizer),
                             (model, "_initial_epoch", private.epoch_after_backup),
                             (model, "_initial_epoch", lambda model: private.set_epoch_after_backup(model, 1)),
                             (backup, "_weights_path", private.paths_of_backup)]:
        use(owner)
        vars(owner).pop(name)
        with pytest.raises(mpistrat.MissingDependencyError, match=rf"support Keras {re.escape(keras.__version__)}: "
                           rf"{type(owner).__name__} has no {name}\. It was run with Keras 3\.0\.5 to 3\.15\. "
                           "Install such a version"):
            use(owner)
        if owner is model:
            model._initial_epoch = None
    assert private.path_of_checkpoint(checkpoint, 1, None, {}) == "model.keras"


def test_an_attribute_that_tensorflow_lacks_is_named_with_the_versions_that_were_run(tmp_path: Path) -> None:
    private = importlib.import_module("mpistrat.tensorflow._private")
    tf.random.set_seed(1)
    assert private.operation_seeds().getstate()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(), str(tmp_path), max_to_keep=2)
    state = private.state_of_manager(manager)
    private.set_state_of_manager(manager, state)
    del manager._maybe_delete
    text = (rf"MPIStrategy does not support TensorFlow {re.escape(tf.__version__)}: CheckpointManager has no "
            r"_maybe_delete\. It was run with TensorFlow 2\.16\.1 to 2\.21")
    for use in (lambda: private.state_of_manager(manager), lambda: private.set_state_of_manager(manager, state)):
        with pytest.raises(mpistrat.MissingDependencyError, match=text):
            use()
    assert private.spec_of_replica(tf.TensorSpec([2])) == tf.TensorSpec([2])
    for use in (private.datasets_of, private.ends_on_all_ranks_together, private.functions_of, private.inputs_of,
                private.spec_of_replica):
        with pytest.raises(mpistrat.MissingDependencyError, match=r"MPIStrategy does not support .*: object has no"):
            use(object())
