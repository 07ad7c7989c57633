"""cupy that is not installed, or cannot be imported, is a reason in words; so is NVRTC that is nowhere."""

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

import mpistrat
from mpistrat.api import tensors
from mpistrat.api.common import _why_no_nccl
from mpistrat.core.errors import InvalidRequestError, MissingDependencyError
from mpistrat.core.install import pip_extra
from mpistrat.gpu import driver


@pytest.fixture
def cupy_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mpistrat.gpu.device", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    tensors.why_no_cupy.cache_clear()
    yield tmp_path / "cupy.py"
    tensors.why_no_cupy.cache_clear()


@pytest.mark.parametrize("code, reason", [
    ("raise ModuleNotFoundError('No module named cupy', name='cupy')", f"it is not installed ({pip_extra('gpu')})"),
    ("raise ImportError('libcuda.so.1: cannot open\\n  shared object file')",
     "it cannot be imported: ImportError: libcuda.so.1: cannot open shared object file"),
    ("raise RuntimeError('numpy is too new')", "it cannot be imported: RuntimeError: numpy is too new"),
    ("import no_such_package", "it cannot be imported: No module named 'no_such_package'"),
])
def test_the_reason_is_in_words(code: str, reason: str, cupy_says: Path) -> None:
    cupy_says.write_text(code)
    with pytest.raises(MissingDependencyError) as raised:
        tensors.make_device(0)
    assert str(raised.value) == f"tensors on a GPU need cupy: {reason}."


def test_what_is_built_can_be_asked_where_cupy_ends_in_any_error(cupy_says: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    cupy_says.write_text("raise RuntimeError('numpy is too new')")
    reason = "cupy is missing: it cannot be imported: RuntimeError: numpy is too new"
    assert (mpistrat.cuda_built(), mpistrat.nccl_built(), mpistrat.gpu_available(verbose=True)) == (False, 0, False)
    assert capsys.readouterr().out == f"gpu_available: {reason}\n"
    assert _why_no_nccl() == reason


@pytest.mark.parametrize("cuda, extra", [(12, "gpu"), (13, "gpu13")])
def test_nvrtc_that_is_nowhere_is_an_error_with_the_command_that_installs_it(
        cuda: int, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=OSError("cannot open shared object file"))
    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(driver.metadata, "distribution", Mock(side_effect=metadata.PackageNotFoundError))
    with pytest.raises(OSError, match=re.escape(f"cannot open shared object file ({pip_extra(extra)})")):
        driver.load_nvrtc(cuda)
    load.assert_any_call(f"libnvrtc.so.{cuda}")


def test_tensorflows_tensors_on_a_gpu_belong_to_its_own_functions() -> None:
    tensor = type("EagerTensor", (), {"__module__": "tensorflow.python.framework.ops",
                                      "__dlpack_device__": lambda self: (2, 0)})()
    with pytest.raises(InvalidRequestError, match=r"Call the function of the same name in mpistrat\.tensorflow"):
        tensors.tensors_of("a", [tensor])
