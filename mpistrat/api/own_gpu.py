"""This rank's GPU: which GPU it is, why GPU tensors cannot be read, and how they are reduced as CPU tensors.

cupy is imported when the first tensor on a GPU is passed. Any thread may call the functions of this module.
"""

import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ..core.errors import InvalidRequestError, MissingDependencyError
from ..core.install import pip_extra
from ..gpu.arrays import GpuArray, GpuDevice, GpuTensors
from ..gpu.backend import await_on_host
from . import runtime
from .job import Job

if TYPE_CHECKING:
    from ..gpu.device import Device  # This module imports cupy.

logger = logging.getLogger(__name__)

_devices: "WeakKeyDictionary[Job, Device]" = WeakKeyDictionary()
# By Job, which has one GPU. Not by Device: HostCopies refers to its Device, which would then never be freed.
_copies: "WeakKeyDictionary[Job, HostCopies]" = WeakKeyDictionary()
_logged: WeakSet[Job] = WeakSet()
_lock = threading.Lock()


def this_ranks_gpu(number: int) -> "Device":
    """Return this rank's GPU. The first call since init() decides which GPU this rank uses.

    Raises:
        InvalidRequestError: This rank already uses another GPU than `number`.
        MissingDependencyError: cupy is not installed.
    """
    current = runtime.current()
    device = _devices.get(current)
    if device is None:
        with _lock:
            device = _devices.get(current) or _devices.setdefault(current, make_device(number))
    if device.number != number:
        raise InvalidRequestError(f"the tensor is on GPU {number}, but this rank's tensors are on GPU {device.number}; "
                                  "a rank uses one GPU.")
    return device


def make_device(number: int) -> "Device":
    """Open the GPU with this number. Raises MissingDependencyError if cupy is not installed, or cannot be imported."""
    reason = why_no_cupy()
    if reason:
        raise MissingDependencyError(f"tensors on a GPU need cupy: {reason}.")
    from ..gpu.device import Device
    return Device(number)


@cache
def why_no_cupy() -> str:
    """Return why tensors on a GPU cannot be read, or "" if they can. Imports cupy."""
    try:
        from ..gpu.device import Device  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return f"it is not installed ({pip_extra('gpu')})"
        return f"it cannot be imported: {error}"
    except Exception as error:  # cupy looks for CUDA's libraries and its driver while it is imported.
        text = " ".join(str(error).split())
        return f"it cannot be imported: {type(error).__name__}: {text[:300]}"
    return ""


def go_by_host() -> bool:
    """Return whether GPU tensors are reduced as CPU tensors (MPISTRAT_GPU_OPERATIONS=host). Rank 0 logs it once."""
    current = runtime.current()
    if current.settings.gpu_operations != "host":
        return False
    with _lock:
        if current not in _logged and current.topology.rank == 0:
            logger.info("rank 0: GPU tensors are copied to the host and reduced as CPU tensors by %s: "
                        "MPISTRAT_GPU_OPERATIONS=host", current.data_name)
        _logged.add(current)
    return True


def host_copies_of(device: "Device") -> "HostCopies":
    """Return the object that copies GPU tensors to the host and back, to reduce them as CPU tensors."""
    current = runtime.current()
    with _lock:
        if current not in _copies:
            _copies[current] = HostCopies(device, current.settings.limit_s)
        return _copies[current]


class HostCopies:
    """Copies tensors between this rank's GPU and pinned memory. Any thread may use it.

    `limit_s`: Seconds after which a copy fails; 0: never.
    """

    def __init__(self, device: GpuDevice, limit_s: float):
        self._device, self._limit_s = device, limit_s
        with device.current():
            self._stream = device.stream()

    def fetched(self, tensors: GpuTensors) -> list[np.ndarray]:
        """Return copies of the tensors in host memory. Waits for the GPU."""
        with self._device.current():
            for event in tensors.ready:
                self._device.wait(self._stream, event)
            return [self._fetched(array) for array in tensors]

    def returned(self, results: Sequence[np.ndarray], tensors: GpuTensors) -> list[Any]:
        """Copy results to GPU memory, and return them as objects of the library of `tensors`. Waits for the GPU."""
        with self._device.current():
            made = tensors.allocate([result.shape for result in results])
            for event in tensors.ready if made.stream is None else [self._device.record(made.stream)]:
                self._device.wait(self._stream, event)
            for result, address in zip(results, made.addresses, strict=True):
                memory = self._device.pinned(result.nbytes)
                memory.view(result.dtype)[:] = result.reshape(-1)
                self._copy(address, memory.ctypes.data, result.nbytes)
        return made.results

    def _fetched(self, array: GpuArray) -> np.ndarray:
        memory = self._device.pinned(array.nbytes)
        self._copy(memory.ctypes.data, array.address, array.nbytes)
        return memory.view(array.dtype).reshape(array.shape)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._device.copy(target, source, nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
