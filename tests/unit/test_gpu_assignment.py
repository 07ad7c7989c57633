"""Which GPU a rank uses."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import mpistrat
from mpistrat.gpu.assignment import choose


@pytest.mark.parametrize("ranks, gpus, indices", [(4, 4, [0, 1, 2, 3]), (2, 8, [0, 1]), (5, 2, [0, 1, 0, 1, 0]),
                                                  (3, 1, [0, 0, 0]), (1, 1, [0]), (2, 0, [None, None])])
def test_the_ranks_of_a_host_take_its_gpus_in_order(ranks: int, gpus: int, indices: list[int | None]) -> None:
    assert [choose(rank, ranks, gpus, None).index for rank in range(ranks)] == indices


@pytest.mark.parametrize("local_size, gpus, visible, sentence, is_shared", [
    (2, 0, None, "no GPU is visible; training on the CPU", False),
    (2, 0, "-1", "no GPU is visible (CUDA_VISIBLE_DEVICES=-1); training on the CPU", False),
    (2, 0, "", "no GPU is visible (CUDA_VISIBLE_DEVICES=); training on the CPU", False),
    (1, 1, None, "one rank, one GPU", False),
    (4, 8, None, "4 ranks use a GPU each, of 8", False),
    (2, 2, "5,7", "2 ranks use a GPU each, of 2 (CUDA_VISIBLE_DEVICES=5,7)", False),
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
        self.error, self.calls = error, []  # type: ignore[var-annotated]
        self.experimental = self

    def list_physical_devices(self, kind: str) -> list[str]:
        return [f"{kind}:0", f"{kind}:1"]

    def set_visible_devices(self, device: str, kind: str) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append(("visible", device))

    def set_memory_growth(self, device: str, on: bool) -> None:
        self.calls.append(("growth", device, on))

    def list_logical_devices(self, kind: str) -> list[SimpleNamespace]:
        seen = [call[1] for call in self.calls if call[0] == "visible"] or self.list_physical_devices(kind)
        return [SimpleNamespace(name=f"/device:{kind}:{i}") for i in range(len(seen))]


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with two GPUs that nobody has, in a job of one rank."""
    module = pytest.importorskip("mpistrat.tensorflow.pin_gpu", exc_type=ImportError)
    monkeypatch.setattr(module, "_pinned", None)
    monkeypatch.setattr(module.tf, "config", Config())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mpistrat.init()
    yield module
    mpistrat.shutdown()


def test_tensorflow_sees_one_gpu_and_takes_memory_as_needed(pinning: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mpistrat"):
        assert [pinning.pin_gpu() for _ in range(3)] == [0, 0, 0]
    assert pinning.tf.config.calls == [("visible", "GPU:0"), ("growth", "GPU:0", True)]
    assert [line for line in caplog.messages if "GPU" in line] == [
        f"{mpistrat.hosts()[0]}: the host's only rank uses one of 2 GPUs"]


def test_too_late_a_call_says_so(pinning: Any) -> None:
    pinning.tf.config.error = "Visible devices cannot be modified after being initialized."
    with pytest.raises(mpistrat.InvalidRequestError, match=r"comes too late: .* Call it right after init\(\)"):
        pinning.pin_gpu()


def test_a_strategy_pins_its_gpu(pinning: Any) -> None:
    strategy = pytest.importorskip("mpistrat.tensorflow.distribute.strategy", exc_type=ImportError)
    assert strategy._default_device() == "/device:GPU:0"
    assert pinning.tf.config.calls == [("visible", "GPU:0"), ("growth", "GPU:0", True)]


def test_a_strategy_that_is_made_too_late_for_pinning_warns(pinning: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = pytest.importorskip("mpistrat.tensorflow.distribute.strategy", exc_type=ImportError)
    pinning.tf.config.error = "Visible devices cannot be modified after being initialized."
    assert strategy._default_device() == "/device:GPU:0"
    assert "may take memory on all of its GPUs: pin_gpu() comes too late" in caplog.text


def test_it_needs_init() -> None:
    module = pytest.importorskip("mpistrat.tensorflow.pin_gpu", exc_type=ImportError)
    with pytest.raises(mpistrat.NotInitializedError):
        module.pin_gpu()
