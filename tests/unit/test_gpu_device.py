"""What the modules that call cupy do without a GPU; skipped where cupy is not installed."""

import ast
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.gpu.copy_kernel import PIECE, PIECES_PER_LAUNCH, CopyJob, copy_tables, source

cupy = pytest.importorskip("cupy", reason="cupy is not installed")

from cupy.cuda import compiler, nccl  # noqa: E402

from mpistrat.gpu import device, driver  # noqa: E402
from mpistrat.gpu.device import Device, compiled, find_nvrtc  # noqa: E402


def test_the_id_of_a_communicator_is_what_this_cupy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(nccl, "get_unique_id", lambda: b"x" * 128)
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda *arguments: made.append(arguments))
    Device.communicator(2, Device.unique_id(), 1)
    assert made == [(2, b"x" * 128, 1)]


def test_an_error_of_nccl_has_its_text_the_call_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = SimpleNamespace(check_async_error=Mock(side_effect=nccl.NcclError(6)))
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda *arguments: failing)
    monkeypatch.setattr(device, "last_error", lambda: "socketProgress: Connection closed by remote peer")
    with pytest.raises(EngineError) as raised:
        device.Communicator(2, b"", 1).check_async_error()
    text = str(raised.value)
    assert text.startswith("NCCL has failed (check_async_error on rank 1): NCCL_ERROR_")
    assert text.endswith(". socketProgress: Connection closed by remote peer.")


@pytest.mark.parametrize("number, name", [(7, "ncclInProgress"), (8, "ncclTimeout")])
def test_a_result_that_cupy_cannot_name_has_its_name_from_nccl(number: int, name: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "last_error", lambda: "")
    with pytest.raises(EngineError, match=rf"NCCL has failed \(allReduce on rank 1\): {name}"), \
            device.explained("allReduce on rank 1"):
        raise nccl.NcclError(number)


def test_a_key_error_that_is_none_of_nccls_stays_one() -> None:
    with pytest.raises(KeyError), device.explained("a group"):
        raise KeyError("tensor")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda *arguments: SimpleNamespace(
        comm=77, allReduce=lambda: made.append("allReduce"), abort=lambda: made.append("abort")))
    return made


def test_a_communicator_is_aborted_once_and_not_used_after_it(calls: list[Any]) -> None:
    communicator = Device.communicator(2, b"", 1)
    communicator.allReduce()
    communicator.abort()
    communicator.abort()
    with pytest.raises(EngineError, match="was aborted before allReduce on rank 1"):
        communicator.allReduce()
    assert calls == ["allReduce", "abort"]


def test_a_communicator_is_revoked_where_nccl_can_and_not_used_after_it(calls: list[Any],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: object())  # as before ncclCommRevoke
    communicator = device.Communicator(2, b"", 1)
    assert not communicator.revoke()
    revoke = Mock(side_effect=lambda *of: calls.append(of) or 0)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: SimpleNamespace(ncclCommRevoke=revoke))
    assert communicator.revoke() and not communicator.revoke()
    with pytest.raises(EngineError, match="was aborted before allReduce on rank 1"):
        communicator.allReduce()
    communicator.abort()
    assert calls == [(77, 0), "abort"]


def test_this_nccl_has_what_revokes() -> None:
    if nccl.get_version() < 23000:
        pytest.skip("an older NCCL")
    ctypes.CDLL("libnccl.so.2").ncclCommRevoke  # noqa: B018


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an H100, in place of asking a GPU. Skips without NVRTC."""
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin"))
    try:
        find_nvrtc()
    except OSError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.usefixtures("architecture")
def test_cupy_makes_machine_code_of_the_kernel() -> None:
    assert compiled(source(CopyJob("float32", "bfloat16", 0.5))).startswith(b"\x7fELF")


@pytest.mark.usefixtures("architecture")
def test_code_that_is_refused_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(EngineError, match=r"(?s)a CUDA kernel cannot be compiled .*error"):
        compiled("this is no C++")


def test_the_table_is_passed_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    device, launches = object.__new__(Device), []
    device._module = lambda job: {"batched_copy": SimpleNamespace(ptr=11), "guard": SimpleNamespace(ptr=12)}
    monkeypatch.setattr(driver, "launch", lambda *arguments: launches.append(arguments))
    table, = copy_tables([1, 2], [3, 4], [5, 6])
    device.batched_copy(table, 2, CopyJob("int8", "int8", 1.0, 3), SimpleNamespace(ptr=7))
    device.guard(5, 24, 99, SimpleNamespace(ptr=7))
    (function, blocks, _, stream, (by_value, rows, factor, divisor, lost)), guarded = launches
    assert (function, blocks, stream, rows.value, factor.value, divisor.value, lost.value) == (11, 2, 7, 2, 1.0, 3, 0)
    assert (guarded[0], guarded[1], guarded[3], [each.value for each in guarded[4]]) == (12, 1, 7, [5, 24, 99])
    assert ctypes.sizeof(by_value) == PIECES_PER_LAUNCH * PIECE.itemsize
    assert by_value.raw[:table.nbytes] == table.tobytes()


def test_no_module_of_the_path_for_gpu_tensors_lets_the_host_wait_for_a_stream_or_the_device() -> None:
    package = Path(device.__file__).parent.parent
    names = {node.attr for folder in ("gpu", "engine", "tensorflow") for path in (package / folder).rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert "wait_event" in names and not [name for name in names if "ynchronize" in name]


def test_a_device_selects_its_gpu_once_in_a_thread_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
