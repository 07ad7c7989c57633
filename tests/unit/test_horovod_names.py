"""Horovod's names: what is there in every module, and what a name that is not there says."""

import importlib
import operator
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
import mpistrat.tensorflow.keras
from mpistrat.api.elastic import HostsUpdatedInterrupt, ObjectState
from mpistrat.core.errors import NotInitializedError
from mpistrat.keras.callbacks import BestModelCheckpoint

DOORS = ["mpistrat", "mpistrat.tensorflow", "mpistrat.keras", "mpistrat.tensorflow.keras"]
WITH_A_DOOR = [*DOORS, "mpistrat.keras.callbacks", "mpistrat.tensorflow.keras.callbacks", "mpistrat.tensorflow.elastic",
               "mpistrat.keras.elastic", "mpistrat.tensorflow.keras.elastic"]
BUILT = ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "gpu_available", "mpi_built", "nccl_built", "rocm_built"]


# -- names that are not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name", "text"), [
    *((each, "mxnet", rf"^module '{each}' has no attribute 'mxnet': there is no binding") for each in WITH_A_DOOR),
    *((each, "spark", r"spark.*mpistrat\.run\(function, np=2\)") for each in WITH_A_DOOR),
    *((each, "Mean", "use Average") for each in WITH_A_DOOR),
    ("mpistrat.keras", "run", r"use mpistrat\.run\(function, np=2\)"),
    ("mpistrat.tensorflow", "run", r"use mpistrat\.run\(function, np=2\)"),
    ("mpistrat.keras", "join", r"it is in mpistrat\.tensorflow\. .*uneven=\"join\"")])
def test_a_name_of_horovod_that_is_not_here_says_why_and_what_to_use(module: str, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "wrong", "right"), [
    ("mpistrat", "alreduce", "allreduce"), ("mpistrat.tensorflow", "DistributedGradientTap", "DistributedGradientTape"),
    ("mpistrat.keras", "Compresion", "Compression"), ("mpistrat.tensorflow.keras", "load_modell", "load_model"),
    ("mpistrat.keras.callbacks", "MetricAveragesCallback", "MetricAverageCallback"),
    ("mpistrat.keras", "BroadcastGlobalVariablesCallback", r"callbacks\.BroadcastGlobalVariablesCallback")])
def test_a_misspelt_name_gets_a_suggestion(module: str, wrong: str, right: str) -> None:
    text = rf"^module '{module}' has no attribute '{wrong}'\. Did you mean {right}\?$"
    with pytest.raises(AttributeError, match=text):
        getattr(importlib.import_module(module), wrong)


@pytest.mark.parametrize("name", ["nothing_like_it_at_all", "__path_of_nothing__", "_ipython_display_"])
def test_any_other_name_is_a_plain_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'mpistrat.keras' has no attribute '{name}'$"):
        getattr(mpistrat.keras, name)


def test_no_name_that_is_explained_is_there() -> None:
    from mpistrat.api import missing_names
    for module, names in [("mpistrat", missing_names.ARRAYS), ("mpistrat.tensorflow", missing_names.TENSORFLOW),
                          ("mpistrat.keras", missing_names.KERAS)]:
        there = vars(importlib.import_module(module))
        # A package below the module becomes an attribute of it when it is imported.
        assert not ((set(names) | set(missing_names.EVERYWHERE)) - {"tensorflow", "keras", "data"}) & set(there)


def test_a_package_below_that_is_not_imported_says_how() -> None:
    code = "import mpistrat\ntry: mpistrat.tensorflow\nexcept AttributeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ("module 'mpistrat' has no attribute 'tensorflow': it is a module of its own. Write: "
                           "import mpistrat.tensorflow\n")


@pytest.mark.parametrize(("path", "name", "found"), [
    ("common.exceptions", "HorovodInternalError", mpistrat.CollectiveError),
    ("common.exceptions", "HostsUpdatedInterrupt", HostsUpdatedInterrupt),
    ("common", "is_initialized", mpistrat.is_initialized), ("common.process_sets", "ProcessSet", mpistrat.ProcessSet),
    ("tensorflow.mpi_ops", "Sum", mpistrat.Sum), ("tensorflow.mpi_ops", "rank", hvd.rank),
    ("tensorflow.functions", "broadcast_object_fn", hvd.broadcast_object_fn),
    ("tensorflow.sync_batch_norm", "SyncBatchNormalization", mpistrat.keras.SyncBatchNormalization)])
def test_a_module_of_horovod_has_the_names_of_ours(path: str, name: str, found: object) -> None:
    module = importlib.import_module(f"mpistrat.{path}")
    assert getattr(module, name) is found and module.__spec__.name == f"mpistrat.{path}"
    assert operator.attrgetter(path)(mpistrat) is module
    everything: dict[str, object] = {}
    exec(f"from mpistrat.{path} import *", everything)
    assert everything.get(name, found) is found
    with pytest.raises(ImportError, match="_allreduce"):
        exec(f"from mpistrat.{path} import _allreduce")


@pytest.mark.parametrize(("path", "why"), [
    ("torch", "there is no binding for PyTorch"), ("mxnet", "there is no binding for MXNet"), ("spark.keras", "Spark"),
    ("ray", r"mpistrat\.run\(function, np=2\)"), ("runner.launch", "mpistrat run -np 2"),
    ("run.runner", "mpistrat run"), ("_keras.callbacks", r"in mpistrat\.keras"),
    ("common.basics", "internal"), ("common.util", "gpu_available"),
    ("tensorflow.data.compute_service", r"DispatchServer.*examples/data_service_digits\.py"),
    ("tensorflow.util", r"in mpistrat\.tensorflow"), ("tensorflow.gradient_aggregation", "backward_passes_per_step"),
    ("keras.torch", "PyTorch")])
def test_another_module_of_horovod_says_why_it_is_none(path: str, why: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"^No module named 'mpistrat.*': .*{why}"):
        importlib.import_module(f"mpistrat.{path}")


def test_a_path_that_horovod_has_not_either_is_a_plain_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'mpistrat\.nothing'$"):
        importlib.import_module("mpistrat.nothing")


# -- names that are there ---------------------------------------------------------------------------------------------


@pytest.mark.horovod("built")
@pytest.mark.parametrize("module", DOORS)
def test_every_door_says_what_is_built(module: str) -> None:
    found = importlib.import_module(module)
    for name in BUILT:
        assert name in found.__all__
        assert getattr(found, name)() in (True, False) or name == "nccl_built"
    assert not (found.ddl_built() or found.ccl_built() or found.rocm_built())
    if found.gpu_available("tensorflow"):
        assert found.cuda_built()


@pytest.mark.horovod("op-numbers")
def test_the_operations_have_horovods_numbers() -> None:
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.horovod("gpu-available")
def test_gpu_available_gives_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    available = mpistrat.gpu_available("tensorflow", verbose=True)
    assert capsys.readouterr().out.startswith("gpu_available: ") is not available


@pytest.mark.horovod("sessions")
@pytest.mark.parametrize("call", [hvd.broadcast_global_variables,
                                  lambda root: hvd.BroadcastGlobalVariablesHook(root).begin()], ids=["all", "hook"])
def test_the_names_of_sessions_name_what_takes_their_place(call: Any) -> None:
    with pytest.raises(RuntimeError, match=r"broadcast_variables\(.*BroadcastGlobalVariablesCallback"):
        call(0)


@pytest.mark.horovod("keras-global-variables")
@pytest.mark.parametrize("door", [mpistrat.keras, mpistrat.tensorflow.keras])
def test_the_keras_doors_have_it_too(door: Any) -> None:
    with pytest.raises(RuntimeError, match=r"broadcast_variables\("):
        door.broadcast_global_variables(0)


@pytest.mark.horovod("query-ops")
def test_queries_before_init() -> None:
    if mpistrat.is_initialized():
        mpistrat.shutdown()

    @tf.function
    def queried() -> tf.Tensor:
        return hvd.process_set_included_op()

    assert int(hvd.process_set_included_op()) == int(queried()) == -1
    with pytest.raises(NotInitializedError, match="not been initialized"):
        hvd.size_op()
    with pytest.raises(tf.errors.FailedPreconditionError, match="not been initialized"):
        hvd.rank_op()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not been initialized"):
        tf.function(hvd.local_rank_op)()


# -- BestModelCheckpoint ----------------------------------------------------------------------------------------------


def model_of_one_weight() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@pytest.mark.parametrize(("weights_only", "path", "named"), [
    (False, None, "best.keras"), (True, None, "best.weights.h5"), (True, "best.keras", "best.weights.h5"),
    (False, "best.txt", "best.keras")])
def test_best_model_checkpoint_needs_a_file(weights_only: bool, path: str | None, named: str) -> None:
    checkpoint = BestModelCheckpoint(save_weights_only=weights_only)
    checkpoint.filepath = path
    with pytest.raises(ValueError, match=f'checkpoint.filepath = "{named}"'):
        checkpoint.on_train_begin()


# -- elastic states ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    mpistrat.init()
    yield
    mpistrat.shutdown()


@pytest.mark.horovod("one-rank")
@pytest.mark.usefixtures("alone")
def test_one_rank_scales_in_an_allreduce_and_leaves_gradients_as_they_are() -> None:
    for op in (hvd.Sum, hvd.Average):
        assert float(hvd.allreduce(2.0, op=op, prescale_factor=3.0, postscale_factor=5.0)) == 30.0
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=3.0)
    optimizer.apply([tf.constant([0.1])], [variable])
    assert variable.numpy().tolist() == [np.float32(1.0) - np.float32(0.1)]
    with tf.GradientTape() as tape:
        loss = variable.value * 0.1
    tape = hvd.DistributedGradientTape(tape, gradient_predivide_factor=3.0, compression=hvd.Compression.fp16)
    assert tape.gradient(loss, variable.value).numpy().tolist() == [np.float32(0.1)]


@pytest.mark.horovod("elastic-state")
@pytest.mark.usefixtures("alone")
def test_a_state_returns_to_its_last_commit() -> None:
    state = ObjectState(epoch=0, history=[1])
    state.epoch = 1
    state.history.append(2)
    state.commit()
    for _ in range(2):  # A restored value is a copy too.
        state.epoch = 7
        state.history.append(3)
        state.restore()
        assert (state.epoch, state.history) == (1, [1, 2])
    state.epoch = 2
    state.sync()
    state.restore()
    assert state.epoch == 2


@pytest.mark.horovod("elastic-state")
@pytest.mark.usefixtures("alone")
def test_variables_return_to_the_last_commit_too() -> None:
    model = model_of_one_weight()
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    trained = [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]
    state.commit()
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    assert model.get_weights()[0] != trained[0]
    state.restore()
    for variable, value in zip((*model.weights, *model.optimizer.variables), trained, strict=True):
        assert np.array_equal(variable.numpy(), value)


@pytest.mark.horovod("elastic-state")
@pytest.mark.usefixtures("alone")
def test_reset_callbacks_are_called_by_on_reset() -> None:
    state, called = ObjectState(), []
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.check_host_updates()
    assert not called
    state.on_reset()
    assert called == [1, 2]


@pytest.mark.horovod("elastic-callbacks")
@pytest.mark.usefixtures("alone")
def test_callbacks_keep_the_state_up_to_date() -> None:
    elastic = mpistrat.tensorflow.keras.elastic
    model = model_of_one_weight()
    state = elastic.KerasState(model, batch=0, epoch=3)
    batches = []
    callbacks = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state),
                 elastic.CommitStateCallback(state, batches_per_commit=2),
                 keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(state.batch))]
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=1, epochs=2, verbose=0, callbacks=callbacks)
    assert batches == [0, 1, 2, 3] * 2
    assert (state.batch, state.epoch) == (0, 5)
    model.fit(np.ones((4, 1)), np.ones((4, 1)), initial_epoch=5, epochs=6, verbose=0, callbacks=callbacks)
    assert state.epoch == 6
    state.epoch = 9
    state.restore()
    assert state.epoch == 6


@pytest.mark.horovod("elastic-state-errors")
def test_states_of_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match=r"TensorFlowState\(\[\*model\.variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(ValueError, match=r"model\.build\(input_shape\)"):
        mpistrat.keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="batches_per_commit"):
        mpistrat.keras.elastic.CommitStateCallback(ObjectState(), 0)
