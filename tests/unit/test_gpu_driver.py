"""The calls of CUDA's driver, on a stand-in for its library: which context a thread has, and has afterwards."""

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.gpu import driver

OWN, OTHER = 7000, 9000


class Library:
    """Contexts of threads. It is asked for what a GPU is by its number only."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[str] = []
        self.current: int | None = None  # context

    def cuCtxGetCurrent(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self.current
        return self.status

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.calls.append("cuCtxSetCurrent")
        self.current = context.value
        return self.status

    def cuDeviceGet(self, found: Any, number: Any) -> int:  # noqa: N802
        found._obj.value = 10 + number.value
        return self.status

    def cuDeviceGetUuid(self, digits: Any, device: Any) -> int:  # noqa: N802
        digits[:] = [device.value] * 16
        return self.status

    def select(self) -> None:
        self.calls.append("select")
        self.current = OWN


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(driver, "_library", lambda kind: made)
    return made


@pytest.mark.parametrize("current, own, calls, afterwards", [
    (None, OWN, ["select"], OWN), (OWN, OWN, [], OWN), (OTHER, OWN, ["select", "cuCtxSetCurrent"], OTHER),
    (OWN, 0, ["select", "cuCtxSetCurrent"], OWN), (OTHER, 0, ["select", "cuCtxSetCurrent"], OTHER)],
    ids=["no context", "its own", "another one", "its own, not known yet", "another one, its own not known yet"])
def test_a_thread_is_on_this_gpu_meanwhile_and_on_another_one_again_afterwards(
        current: int | None, own: int, calls: list[str], afterwards: int, library: Library) -> None:
    library.current = current
    with pytest.raises(KeyError), driver.Selected(own, library.select):
        assert driver.context() == OWN
        raise KeyError
    assert library.calls == calls and driver.context() == afterwards


def test_another_thread_of_python_goes_on_while_a_call_of_the_driver_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the watchdog must, while a launch waits for a rank that has died. Asking for the context keeps the lock."""
    loaded = []
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: loaded.append("CDLL") or Library())
    monkeypatch.setattr(driver.ctypes, "PyDLL", lambda name: loaded.append("PyDLL") or Library())
    monkeypatch.setattr(Library, "cuInit", lambda self, flags: 0, raising=False)
    for call in ("cuLaunchKernel", "cuMemsetD32Async", "cuEventQuery", "cuCtxRecordEvent"):
        monkeypatch.setattr(Library, call, lambda self, *of: 0, raising=False)
    driver._library.cache_clear()
    driver.launch(1, 1, 1, 1, [])
    driver.write_number(8, 1, 2, 1)
    driver.is_done(8)
    driver.record_in_context(OWN, 8)
    assert set(loaded) == {"CDLL"}
    driver.context()
    assert loaded[-1] == "PyDLL"
    driver._library.cache_clear()


def test_a_gpu_is_known_by_its_uuid(library: Library) -> None:
    assert driver.uuid(0) == "0a" * 16
    assert driver.uuid(2) == "0c" * 16


def test_an_error_of_the_driver_names_the_call(library: Library) -> None:
    library.status = 201
    with pytest.raises(EngineError, match="CUDA's cuCtxGetCurrent has failed with status 201"):
        driver.context()


def test_a_call_that_the_driver_lacks_is_named(library: Library) -> None:
    with pytest.raises(EngineError, match="CUDA's driver has no function cuCtxRecordEvent"):
        driver.record_in_context(OWN, 8)


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver._library.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", Mock(side_effect=OSError("libcuda.so.1: no such file")))
    with pytest.raises(EngineError, match=r"CUDA's driver cannot be loaded: libcuda\.so\.1: no such file"):
        driver.context()


def test_a_launch_passes_the_addresses_of_its_arguments(library: Library) -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(*of: Any) -> int:
        function, *extents, shared, stream, addresses, extra = of
        launched.append((function.value, extents, shared, stream.value, extra))
        launched.append((ctypes.c_int32.from_address(addresses[0]).value,
                         ctypes.c_double.from_address(addresses[1]).value))
        return library.status

    library.cuLaunchKernel = launch  # type: ignore[attr-defined]
    arguments = ctypes.c_int32(-5), ctypes.c_double(0.5)
    driver.launch(11, 3, 256, 7, arguments)
    assert launched == [(11, [3, 1, 1, 256, 1, 1], 0, 7, None), (-5, 0.5)]
    library.status = 700
    with pytest.raises(EngineError, match="cuLaunchKernel has failed with status 700"):
        driver.launch(11, 3, 256, 7, arguments)
