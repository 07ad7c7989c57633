"""compile(jit_compile="auto") with a DistributedOptimizer on a machine with a GPU, on which Keras compiles by XLA.

Here cupy is missing, so XLA cannot compile collectives.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")

from mpistrat.keras import clone  # noqa: E402
from mpistrat.keras.bridge.private_names import distributed_in  # noqa: E402
from mpistrat.tensorflow.xla import context, ffi  # noqa: E402


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, as far as Keras looks before it compiles a model."""
    devices = [tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU"),
               tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [
        device for device in devices if kind in (None, device.device_type)])
    monkeypatch.setattr(context, "has_gpu", lambda: True)
    monkeypatch.setattr(context, "why_no_gpu", lambda where: "cupy is missing: No module named 'cupy'")
    clone._log_once.cache_clear()
    yield
    clone._log_once.cache_clear()


def model_of(cls: type = keras.Sequential) -> Any:
    return cls([keras.Input((2,)), keras.layers.Dense(1)])


def sgd() -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def compiled(*arguments: Any, model: Any = None, **options: Any) -> bool:
    model = model or model_of()
    model.compile(*arguments, **options)
    return bool(model.jit_compile)


@pytest.mark.horovod("xla")
def test_auto_is_off_with_a_distributed_optimizer_only() -> None:
    assert compiled(keras.optimizers.SGD(0.1), "mse")
    assert not compiled(sgd(), "mse")
    assert not compiled(optimizer=sgd(), loss="mse", jit_compile="auto")
    assert not compiled(sgd(), "mse", None, None, None, False, 1, "auto")
    assert compiled("sgd", "mse")


def test_a_loss_scale_optimizer_counts() -> None:
    inside = keras.optimizers.LossScaleOptimizer(sgd())
    around = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    assert not compiled(inside, "mse")
    assert not compiled(around, "mse")
    with_policy = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with_policy.dtype_policy = keras.DTypePolicy("mixed_float16")  # compile() puts a LossScaleOptimizer around ours.
    assert not compiled(sgd(), "mse", model=with_policy)
    assert isinstance(with_policy.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.skipif(ffi.api() is None, reason="this TensorFlow does not export XLA's FFI")
def test_auto_is_keras_own_choice_where_xla_can_compile_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "why_no_gpu", lambda where: "")
    monkeypatch.setattr(context, "go_by_host", lambda: False)
    assert context.why_not() == ""
    assert compiled(sgd(), "mse")


def test_what_is_given_explicitly_stays() -> None:
    assert compiled(sgd(), "mse", jit_compile=True)
    assert not compiled(sgd(), "mse", jit_compile=False)
    assert not compiled(sgd(), "mse", run_eagerly=True)


def test_a_model_with_a_compile_of_its_own_that_calls_keras() -> None:
    class Own(keras.Sequential):
        def compile(self, optimizer: Any) -> None:
            super().compile(optimizer=optimizer, loss="mse")

    assert not compiled(sgd(), model=model_of(Own))
    assert compiled(keras.optimizers.SGD(0.1), model=model_of(Own))


def test_wrong_arguments_are_errors_of_keras() -> None:
    sgd()
    with pytest.raises(TypeError, match="colour"):
        model_of().compile(sgd(), colour="red")


@pytest.mark.skipif(ffi.api() is None, reason="this TensorFlow does not export XLA's FFI")
def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        compiled(keras.optimizers.SGD(0.1), "mse")
        assert not [record for record in caplog.records if record.name == clone.__name__]
        for _ in range(2):
            compiled(sgd(), "mse")
    said = [record for record in caplog.records if record.name == clone.__name__]
    assert [(record.levelname, record.getMessage()) for record in said] == [
        ("INFO", "rank 0: models with a DistributedOptimizer are trained without XLA (jit_compile=False), because "
                 "XLA cannot compile collectives: cupy is missing: No module named 'cupy'")]


@pytest.mark.filterwarnings("error::UserWarning")
def test_keras_still_compiles_a_model_that_it_loads(tmp_path: Path) -> None:
    # It does not if the model's class has another `compile` than Keras' own base class.
    model = model_of()
    model.compile(sgd(), "mse")
    model.save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is keras.optimizers.SGD


def test_load_model_turns_xla_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.save(tmp_path / "model.keras")  # with jit_compile=True, which "auto" meant
    assert keras.models.load_model(tmp_path / "model.keras").jit_compile
    with caplog.at_level(logging.INFO, "mpistrat"):
        loaded = hvd.load_model(tmp_path / "model.keras")
    assert distributed_in(loaded.optimizer) and not loaded.jit_compile
    assert "without XLA" in caplog.text
