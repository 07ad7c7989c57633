"""The callbacks for learning rates, with the variables of an old Keras; and copies of all callbacks."""

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


def test_a_copy_of_the_warm_up_counts_its_own_steps() -> None:
    hvd.init()
    copied = copy.deepcopy(hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=2))
    copied.steps_per_epoch = 4
    assert copied.multiplier.__self__ is copied
