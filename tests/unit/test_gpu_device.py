"""What can be said of the module that touches cupy without a GPU; skipped where cupy is not installed."""

import ast
from pathlib import Path

import pytest

from mpistrat.core.errors import EngineError

nccl = pytest.importorskip("cupy.cuda.nccl", reason="cupy is not installed")


def test_the_id_of_a_communicator_is_what_this_cupy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.gpu.device import Device
    made = []
    monkeypatch.setattr(nccl, "get_unique_id", lambda: b"x" * 128)
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda *arguments: made.append(arguments))
    Device.communicator(2, Device.unique_id(), 1)
    assert made == [(2, b"x" * 128, 1)]


def test_an_error_of_nccl_has_its_text_the_call_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.gpu import device

    class Failing:
        def check_async_error(self) -> None:
            raise nccl.NcclError(6)

    monkeypatch.setattr(nccl, "NcclCommunicator", lambda *arguments: Failing())
    monkeypatch.setattr(device, "last_error", lambda: "socketProgress: Connection closed by remote peer")
    with pytest.raises(EngineError) as raised:
        device.Device.communicator(2, b"", 1).check_async_error()
    text = str(raised.value)
    assert text.startswith("NCCL has failed (check_async_error on rank 1): NCCL_ERROR_")
    assert text.endswith(". socketProgress: Connection closed by remote peer.")


def test_no_module_of_the_path_for_gpu_tensors_lets_the_host_wait_for_a_stream_or_the_device() -> None:
    from mpistrat.gpu import device
    package = Path(device.__file__).parent.parent
    names = {node.attr for folder in ("gpu", "collectives", "tensorflow") for path in (package / folder).rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert "wait_event" in names and not [name for name in names if "ynchronize" in name]


def test_a_device_selects_its_gpu_once_in_a_thread_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from mpistrat.gpu import device, driver
    contexts, selected = [0], []

    def select(number: int) -> None:
        selected.append(number)
        contexts[0] = 100 + number

    monkeypatch.setattr(driver, "context", lambda: contexts[0])
    monkeypatch.setattr(driver, "uuid", lambda number: f"uuid {number}")
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", select)
    monkeypatch.setattr(cupy.cuda, "Stream", lambda **_: None)
    made = device.Device(3)
    with made.current(), made.current():
        assert contexts == [103]
    assert selected == [3] and contexts == [103]
    assert made.identity.startswith("uuid 3 on ")
