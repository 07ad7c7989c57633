"""The calls of CUDA's driver, on a stand-in for its library: which context a thread has, and has afterwards."""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.gpu import driver

OWN, OTHER = 7000, 9000


class Library:
    """Contexts of threads. It is asked for what a GPU is by its number only."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[str] = []
        self._thread = threading.local()

    @property
    def current(self) -> int | None:
        """The context of this thread."""
        return getattr(self._thread, "context", None)

    @current.setter
    def current(self, context: int) -> None:
        self._thread.context = context

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
        """What cudaSetDevice does."""
        self.calls.append("select")
        self.current = OWN


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(driver, "_library", lambda kind: made)
    return made


def test_a_thread_without_a_context_selects_its_gpu_once_and_keeps_it(library: Library) -> None:
    for _ in range(3):
        with driver.Selected(OWN, library.select):
            assert driver.context() == OWN
    assert library.calls == ["select"] and driver.context() == OWN


def test_a_thread_on_this_gpu_is_left_alone(library: Library) -> None:
    library.current = OWN
    with driver.Selected(OWN, library.select):
        assert driver.context() == OWN
    assert library.calls == [] and driver.context() == OWN


@pytest.mark.parametrize("own", [OWN, 0], ids=["known", "not known yet"])
def test_a_thread_on_another_gpu_is_there_again_afterwards(own: int, library: Library) -> None:
    library.current = OTHER
    with pytest.raises(KeyError), driver.Selected(own, library.select):
        assert driver.context() == OWN
        raise KeyError
    assert library.calls == ["select", "cuCtxSetCurrent"] and driver.context() == OTHER


def test_the_first_use_selects_the_gpu_even_where_it_is_the_current_one(library: Library) -> None:
    library.current = OWN
    with driver.Selected(0, library.select):
        assert library.calls == ["select"]
    assert driver.context() == OWN


def test_each_thread_has_a_context_of_its_own(library: Library) -> None:
    def work() -> None:
        with driver.Selected(OWN, library.select):
            pass

    library.current = OTHER
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert library.calls == ["select"] * 2 and driver.context() == OTHER


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
    with pytest.raises(EngineError, match="CUDA's driver has no cuCtxRecordEvent"):
        driver.record_in_context(OWN, 8)


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver._library.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(EngineError, match=r"CUDA's driver cannot be loaded: libcuda\.so\.1: no such file"):
        driver.context()


def missing(name: str) -> None:
    raise OSError(f"{name}: no such file")


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
