"""Which GPU a rank uses."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mpistrat
from mpistrat.gpu.assignment import Pin, choose


@pytest.mark.parametrize("ranks, gpus, indices", [(4, 4, [0, 1, 2, 3]), (2, 8, [0, 1]), (5, 2, [0, 1, 0, 1, 0]),
                                                  (3, 1, [0, 0, 0]), (1, 1, [0]), (2, 0, [None, None])])
def test_the_ranks_of_a_host_take_its_gpus_in_order(ranks: int, gpus: int, indices: list[int | None]) -> None:
    assert [choose(rank, ranks, gpus, None).index for rank in range(ranks)] == indices


@pytest.mark.parametrize("local_size, gpus, visible, sentence, is_shared", [
    (2, 0, None, "no GPU is visible; training on the CPU", False),
    (2, 0, "-1", "no GPU is visible (CUDA_VISIBLE_DEVICES=-1); training on the CPU", False),
    (2, 0, "", "no GPU is visible (CUDA_VISIBLE_DEVICES=); training on the CPU", False),
    (1, 1, None, "one rank, one GPU", False),
    (4, 8, None, "4 ranks use one GPU each; 8 GPUs are visible", False),
    (2, 2, "5,7", "2 ranks use one GPU each; 2 GPUs are visible (CUDA_VISIBLE_DEVICES=5,7)", False),
    (3, 2, None, "3 ranks share 2 GPUs; NCCL needs one rank per GPU", True),
    (3, 1, None, "3 ranks share the host's only GPU", True),
    (2, 1, "1", "each rank uses the GPU that its CUDA_VISIBLE_DEVICES names (1)", False),
    (2, 1, "MIG-ab/1/0", "each rank uses the GPU that its CUDA_VISIBLE_DEVICES names (MIG-ab/1/0, an instance of a "
                         "divided GPU)", False),
])
def test_each_case_has_its_sentence(local_size: int, gpus: int, visible: str | None, sentence: str,
                                    is_shared: bool) -> None:
    pin = choose(0, local_size, gpus, visible)
    assert (pin.sentence, pin.is_shared) == (sentence, is_shared)


class Config:
    """TensorFlow's tf.config on a host with two GPUs."""

    def __init__(self, error: str = ""):
        self.error, self.visible, self.logical = error, ["GPU:0", "GPU:1"], []  # type: ignore[var-annotated]
        self.calls = []  # type: ignore[var-annotated]
        self.experimental = self

    def list_physical_devices(self, kind: str) -> list[str]:
        return [f"{kind}:0", f"{kind}:1"]

    def get_visible_devices(self, kind: str) -> list[str]:
        return self.visible

    def get_logical_device_configuration(self, device: str) -> list[str] | None:
        return ["1 GiB", "1 GiB"] if device in self.logical else None

    def set_visible_devices(self, device: str, kind: str) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append(("visible", device))
        self.visible = [device]

    def set_memory_growth(self, device: str, on: bool) -> None:
        self.calls.append(("growth", device, on))

    def list_logical_devices(self, kind: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=f"/device:{kind}:{i}") for i in range(len(self.visible))]


PINNED = [("visible", "GPU:0"), ("growth", "GPU:0", True), ("growth", "GPU:1", True)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = pytest.importorskip("mpistrat.tensorflow.pin_gpu", exc_type=ImportError)
    monkeypatch.setattr(found, "_pinned", None)
    monkeypatch.setattr(found.tf, "config", Config())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mpistrat.init()
    yield found
    mpistrat.shutdown()


def test_tensorflow_sees_one_gpu_and_takes_memory_as_needed(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mpistrat"):
        assert [module.pin_gpu() for _ in range(3)] == [0, 0, 0]
    assert module.tf.config.calls == PINNED
    assert [line for line in caplog.messages if "GPU" in line] == [
        f"{mpistrat.hosts()[0]}: the host's only rank uses one of 2 GPUs"]


# -- by init() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["mpistrat.tensorflow", "mpistrat.keras", "mpistrat.tensorflow.keras"])
def test_init_of_a_framework_pins_the_gpu(door: str, module: Any) -> None:
    pytest.importorskip("mpistrat.keras", exc_type=ImportError)
    assert module.tf.config.calls == [], "mpistrat.init() has no framework, and leaves the GPUs alone"
    for _ in range(2):
        importlib.import_module(door).init()
    assert module.pin_gpu() == 0
    assert module.tf.config.calls == PINNED


@pytest.mark.parametrize(("change", "reason"), [
    (lambda config: setattr(config, "visible", ["GPU:1"]), "this process has already chosen 1 of 2 GPUs"),
    (lambda config: setattr(config, "visible", []), "this process has already chosen 0 of 2 GPUs"),
    (lambda config: config.logical.append("GPU:1"), "this process has already configured logical GPUs"),
    (lambda config: setattr(config, "error", "cannot be modified after being initialized"),
     "pin_gpu() comes too late (cannot be modified after being initialized). init() calls it: call init() earlier."),
], ids=["one visible", "none visible", "logical", "in use"])
def test_init_leaves_what_the_process_has_chosen(change: Callable[[Config], object], reason: str, module: Any,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    change(module.tf.config)
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        module.init()
    assert module.tf.config.calls == []
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "GPU" in record.getMessage()] == [
        ("DEBUG", f"rank 0: mpistrat chooses no GPU for this rank: {reason}")]


def test_a_setting_turns_it_off(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = pytest.importorskip("mpistrat.strategy.mpi_strategy", exc_type=ImportError)
    mpistrat.shutdown()
    monkeypatch.setenv("MPISTRAT_BIND", "cores")
    module.init()
    strategy._default_device()
    assert module.tf.config.calls == []
    assert module.pin_gpu() == 0, "an explicit call is another matter"
    assert module.tf.config.calls == PINNED


def test_an_explicit_call_spares_logical_gpus(module: Any) -> None:
    module.tf.config.logical = ["GPU:0"]  # TensorFlow sets no growth for these.
    assert module.pin_gpu() == 0
    assert module.tf.config.calls == [("visible", "GPU:0"), ("growth", "GPU:1", True)]


def test_a_later_init_with_another_local_rank_pins_another_gpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.init()
    mpistrat.shutdown()
    mpistrat.init()
    monkeypatch.setattr(module, "choose", lambda *arguments: Pin(1, "as rank 1 of its host"))
    module.init()
    assert module.tf.config.calls == [*PINNED, ("visible", "GPU:1"), *PINNED[1:]]


HOROVODS_LINES = """
import sys
import tensorflow as tf
from tensorflow.python.eager.context import context

import mpistrat
import mpistrat.keras as hvd
from mpistrat.core.topology import Topology

context()._initialize_physical_devices()
context()._physical_devices += [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
context()._visible_device_list = list(context()._physical_devices)
mpistrat.init()
mpistrat.api.runtime.current().topology = Topology(1, ("host",) * 2)
hvd.init()


def seen():
    options = context()._compute_gpu_options()
    print(options.visible_device_list, options.allow_growth)


seen()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
seen()
print(mpistrat.tensorflow.pin_gpu())  # as a script for an earlier version does
tf.config.set_visible_devices(gpus, "GPU")
seen()
tf.config.set_logical_device_configuration(gpus[1], [tf.config.LogicalDeviceConfiguration(memory_limit=1024)])
tf.config.set_visible_devices(gpus[1], "GPU")
seen()
"""


@pytest.mark.nightly
def test_old_scripts_may_choose_after_init() -> None:
    pytest.importorskip("mpistrat.keras", exc_type=ImportError)
    done = subprocess.run([sys.executable, "-c", HOROVODS_LINES], text=True, capture_output=True, timeout=250,
                          check=False)
    assert done.stdout.splitlines() == ["1 True", "1 True", "1", "0,1 True", "1 False"], done.stderr


# -- by a strategy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attribute", "value", "calls", "said"), [
    ("error", "", PINNED, ""),
    ("visible", ["GPU:1"], [], ""),  # Logical GPU 0 is physical GPU 1.
    ("error", "Visible devices cannot be modified after being initialized", [],
     "may take memory on all GPUs of this host: pin_gpu() comes too late")], ids=["pinned", "chosen", "too late"])
def test_a_strategy_pins_its_gpu_unless_the_process_has_chosen_one_or_uses_them(
        attribute: str, value: Any, calls: list[Any], said: str, module: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = pytest.importorskip("mpistrat.strategy.mpi_strategy", exc_type=ImportError)
    setattr(module.tf.config, attribute, value)
    assert strategy._default_device() == "/device:GPU:0"
    assert module.tf.config.calls == calls
    assert said in caplog.text


def test_it_needs_init() -> None:
    module = pytest.importorskip("mpistrat.tensorflow.pin_gpu", exc_type=ImportError)
    with pytest.raises(mpistrat.NotInitializedError):
        module.pin_gpu()
