"""The callbacks for learning rates, with the variables of an old Keras; copies of all callbacks; wrong arguments."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")


@pytest.fixture
def no_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables without __float__, as those of Keras 3.0."""
    for kind in keras.Variable.__mro__:
        if "__float__" in vars(kind):
            monkeypatch.delattr(kind, "__float__")
    with pytest.raises(TypeError, match="float"):
        float(keras.Variable(1.0))


def test_rate_and_momentum_change_without_float_of_a_variable(no_float: None) -> None:
    hvd.init()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    velocity, _ = optimizer.momentums
    velocity.assign([[0.5]])
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=2.0, start_epoch=-1)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    assert keras.ops.convert_to_numpy(optimizer.learning_rate) == pytest.approx(0.2)
    assert keras.ops.convert_to_numpy(velocity).tolist() == [[1.0]], "scaled for the batch of the change"
    callback.on_train_batch_end(0)
    callback.on_train_batch_begin(1)
    assert keras.ops.convert_to_numpy(velocity).tolist() == [[1.0]]
    logs: dict[str, float] = {}
    callback.on_epoch_end(0, logs)
    assert logs == {"lr": pytest.approx(0.2)}


def test_the_warm_up_prints_the_rate_without_float_of_a_variable(no_float: None,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    callback = hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=1, steps_per_epoch=1, verbose=1)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    callback.on_epoch_end(0, {})
    assert "the learning-rate warm-up is done. The rate is 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("make", [
    lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0), lambda: hvd.callbacks.MetricAverageCallback(),
    lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), lambda: hvd.callbacks.Throughput(),
    lambda: hvd.callbacks.BestModelCheckpoint(), lambda: hvd.callbacks.LocalSGD(every=4),
    lambda: hvd.callbacks.DiLoCo(every=4)],
    ids=["broadcast", "metrics", "schedule", "throughput", "best model", "local SGD", "DiLoCo"])
def test_a_search_may_copy_a_callback_for_each_trial(make: Callable[[], Any]) -> None:
    hvd.init()
    original = make()
    copied = copy.deepcopy(original)
    assert type(copied) is type(original) and copied is not original
    if isinstance(copied, keras.callbacks.ModelCheckpoint):
        return  # It would write a file.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[copied])
    copy.deepcopy(original)  # for the next trial


@pytest.mark.parametrize(("call", "text"), [
    ("DistributedOptimizer(sgd, backward_passes_per_steps=2)", r"\. Did you mean backward_passes_per_step\?$"),
    ("DistributedOptimizer(sgd, None, nothing_near_it=2)", "unexpected keyword argument 'nothing_near_it'$"),
    ("ShardedOptimizer(sgd, grups=2)", r"Did you mean groups\?$"),
    ("DistributedOptimizer(sgd, op='sum')", r"\(op=\) must be an operation such as hvd\.Sum, without quotes\."),
    ("tensorflow.MPIStrategy(cluster_resolver=None)", r"resolver'\. Leave it out: the ranks come from mpirun\.$"),
    ("tensorflow.strategy('mirrored', devices=['CPU:0'])", r"'devices'\. Leave it .* mpistrat run -np <devices>\.$"),
    ("tensorflow.MPIStrategy(cross_device_ops=0)", "out: MPI"), ("tensorflow.MPIStrategy(['CPU:0'])", "out devices"),
    ("callbacks.BroadcastGlobalVariablesCallback(root=0)", r"Callback\(\) got .*'root'\. Did you mean root_rank\?$"),
    ("callbacks.BroadcastGlobalVariablesCallback('0')", r"\(root_rank=\) must be an integer\. Received: '0'$"),
    ("DistributedOptimizer(sgd, backward_passes_per_step='2')", r"per_step=\) must be an integer\. Received: '2'$"),
    ("DistributedOptimizer(sgd, sparse_as_dense='yes')", r"dense=\) must be True or False\. Received: 'yes'$"),
    ("tensorflow.init(5)", r"must be a list of ranks, .* the job has all ranks: hvd\.init\(\)\. Received: 5$"),
    ("tensorflow.broadcast_variables([0, 1], root_rank=0)", r"takes variables, and hvd\.broadcast .* Received: 0$"),
    ("load_model('x', average_aggregated_gradients='no')", "must be True or False. Received: 'no'$"),
    ("callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=-3)", r"epochs=\) must be at least 0\. Received: -3$"),
    ("callbacks.LearningRateWarmupCallback(keras.optimizers.schedules.CosineDecay(0.1, 9))", "must be a number. Rec"),
    ("callbacks.LearningRateScheduleCallback(0.1, '2')", "function of the epoch, or a number. Received: '2'")])
def test_a_wrong_argument_is_named_with_what_is_right(call: str, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        tensorflow = pytest.importorskip("mpistrat.tensorflow")
        eval(call, {**vars(hvd), "tensorflow": tensorflow, "keras": keras, "sgd": keras.optimizers.SGD()})


def test_numbers_of_numpy_are_arguments() -> None:
    hvd.init()
    hvd.DistributedOptimizer(keras.optimizers.SGD(), sparse_as_dense=np.bool_(False), num_groups=np.int64(2))
    rate = keras.optimizers.SGD(0.1).learning_rate
    callback = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2.5, steps_per_epoch=np.float32(3))
    rate.assign(5.0)
    assert callback.initial_lr == pytest.approx(0.1), "a copy"


def test_a_copy_of_the_warm_up_counts_its_own_steps() -> None:
    hvd.init()
    copied = copy.deepcopy(hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=2))
    copied.steps_per_epoch = 4
    assert copied.multiplier.__self__ is copied
