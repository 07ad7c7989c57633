"""Tensors of other libraries: handed over by DLPack, and results that are again of the library that they came from.

No library is imported here but cupy, and that only for a tensor on a GPU: who hands over a tensor has imported its
library.
"""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ..core.errors import InvalidRequestError, MissingDependencyError
from ..core.request import DEVICE_CPU, DEVICE_GPU
from ..gpu.arrays import GpuArray, GpuInput
from ..gpu.host_copies import HostCopies
from . import runtime

logger = logging.getLogger(__name__)

_CUDA = 2  # DLPack's number of a kind of device

_devices: WeakKeyDictionary[runtime.Runtime, Any] = WeakKeyDictionary()
_copies: WeakKeyDictionary[Any, HostCopies] = WeakKeyDictionary()
_told: WeakSet[runtime.Runtime] = WeakSet()
_lock = threading.Lock()


class Tensor(NamedTuple):
    """A caller's tensor as the engine takes it, and what makes a result of the caller's kind.

    Attributes:
        array: A numpy array, or a GpuInput.
        restore: Called with the engine's result: a numpy array, or a GpuArray.
    """

    array: Any
    restore: Callable[[Any], Any]

    @property
    def device(self) -> str:
        """DEVICE_CPU or DEVICE_GPU."""
        return DEVICE_GPU if isinstance(self.array, GpuInput) else DEVICE_CPU


class AnyLibrary:
    """What speaks DLPack, or can be made an array. Results are numpy's, or cupy's."""

    def to_numpy(self, value: Any) -> np.ndarray:
        """The contents, without a copy where that is possible."""
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> Any:
        """The result for the caller, over the same memory where that is possible."""
        return array

    def to_gpu(self, value: Any, device: Any) -> GpuInput:
        """The tensor for the engine; see GpuInput on where memory for the result comes from."""
        array, ready = device.imported(value)
        dtype = array.dtype

        def allocate(shape: tuple[int, ...]) -> tuple[GpuArray, Any]:
            made, event = device.empty_on_arrival(shape, dtype)
            return device.seen(made), event

        return gpu_input(device.seen(array), device, ready, allocate)

    def from_gpu(self, result: GpuArray) -> Any:
        """The result for the caller."""
        return result.owner


class Numpy(AnyLibrary):
    """numpy's own arrays and scalars."""

    def to_numpy(self, value: Any) -> np.ndarray:
        return np.asarray(value)


class Cupy(AnyLibrary):
    """cupy: memory for the result is in order on the stream that is cupy's current one at the call."""

    def to_gpu(self, value: Any, device: Any) -> GpuInput:
        stream = device.current_stream()
        array = device.contiguous(value)
        dtype = array.dtype

        def allocate(shape: tuple[int, ...]) -> tuple[GpuArray, Any]:
            with stream:
                made = device.empty(shape, dtype)
                return device.seen(made), device.record(stream)

        return gpu_input(device.seen(array), device, device.record(stream), allocate)


class Torch(AnyLibrary):
    """torch: on a GPU memory for the result is torch's own, in order on its current stream at the call."""

    def to_numpy(self, value: Any) -> np.ndarray:
        if value.dtype is not _module("torch").bfloat16:
            return np.from_dlpack(value)
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise MissingDependencyError("numpy knows bfloat16 by ml_dtypes only (pip install ml_dtypes).") from error
        return np.from_dlpack(value.view(_module("torch").int16)).view(bfloat16)

    def from_numpy(self, array: np.ndarray) -> Any:
        torch = _module("torch")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def to_gpu(self, value: Any, device: Any) -> GpuInput:
        torch = _module("torch")
        array, ready = device.imported(value)
        stream = torch.cuda.current_stream(value.device)
        dtype, where = value.dtype, value.device

        def allocate(shape: tuple[int, ...]) -> tuple[GpuArray, Any]:
            with torch.cuda.stream(stream):
                return as_result(torch.empty(shape, dtype=dtype, device=where), device)

        return gpu_input(device.seen(array), device, ready, allocate)


class Jax(AnyLibrary):
    """jax: its arrays cannot be written to, so the result is cupy's memory, which jax then adopts."""

    def to_numpy(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> Any:
        return _module("jax").numpy.asarray(array)

    def from_gpu(self, result: GpuArray) -> Any:
        return _module("jax").dlpack.from_dlpack(result.owner)


# By the package that the type of a tensor is from.
KINDS: dict[str, AnyLibrary] = {"numpy": Numpy(), "cupy": Cupy(), "torch": Torch(), "jaxlib": Jax(), "jax": Jax()}
_OTHERS = AnyLibrary()


def tensor_of(value: Any) -> Tensor:
    """The tensor, number or sequence for the engine.

    Raises:
        InvalidRequestError: It is no array, its library does not hand it over, or it is on another GPU than the tensors
            that this rank has used before.
        MissingDependencyError: It is on a GPU, and cupy is not installed.
    """
    kind = KINDS.get(type(value).__module__.partition(".")[0], _OTHERS)
    number = _gpu_of(value)
    if number is not None:
        device = this_ranks_gpu(number)
        with device.current():
            on_gpu = _guarded(value, lambda: kind.to_gpu(value, device))
        if go_by_host():
            copies = _copies_of(device)
            return Tensor(copies.fetched(on_gpu), lambda result: kind.from_gpu(copies.returned(result, on_gpu)))
        return Tensor(on_gpu, kind.from_gpu)
    array = np.asarray(_guarded(value, lambda: kind.to_numpy(value)), order="C")
    return Tensor(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")), kind.from_numpy)


def _guarded(value: Any, take: Callable[[], Any]) -> Any:
    try:
        return take()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
            raise InvalidRequestError(f"cannot read {type(value).__name__} through DLPack: {error}") from error
        raise InvalidRequestError(f"not an array: {error}") from error


def _gpu_of(value: Any) -> int | None:
    """Which GPU the tensor is on; None: it is on the CPU, or no tensor."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack_device__"):
        return None
    kind, number = _guarded(value, value.__dlpack_device__)
    return int(number) if int(kind) == _CUDA else None


def this_ranks_gpu(number: int) -> Any:
    """This rank's GPU (`gpu.device.Device`), which is that of the first tensor since init().

    Raises:
        As `tensor_of`, when `number` is another one, or cupy is not installed.
    """
    current = runtime.current()
    with _lock:
        device = _devices.get(current)
        if device is None:
            device = _devices[current] = make_device(number)
    if device.number != number:
        raise InvalidRequestError(f"the tensor is on GPU {number}, but this rank's tensors are on GPU {device.number}; "
                                  "a rank uses one GPU.")
    return device


def go_by_host() -> bool:
    """Whether GPU tensors take part as CPU tensors, by the user's wish. Said once, on rank 0."""
    current = runtime.current()
    if current.settings.gpu_operations != "host":
        return False
    with _lock:
        if current not in _told and current.topology.rank == 0:
            logger.info("GPU tensors are copied to the host and reduced as CPU tensors by %s: "
                        "MPISTRAT_GPU_OPERATIONS=host", current.data_name)
        _told.add(current)
    return True


def _copies_of(device: Any) -> HostCopies:
    settings = runtime.current().settings
    with _lock:
        if device not in _copies:
            _copies[device] = HostCopies(device, settings.limit_s)
        return _copies[device]


def make_device(number: int) -> Any:
    """The GPU of that number, by cupy."""
    try:
        from ..gpu.device import Device
    except ImportError as error:
        raise MissingDependencyError("tensors on a GPU need cupy (pip install 'mpistrat[gpu]').") from error
    return Device(number)


def as_result(made: Any, device: Any) -> tuple[GpuArray, Any]:
    """A library's uninitialised tensor as the memory of a result, and an event after that memory's former use."""
    seen, event = device.imported(made)
    return GpuArray(device.seen(seen).address, tuple(made.shape), seen.dtype, made), event


def gpu_input(array: GpuArray, device: Any, ready: Any, allocate: Any) -> GpuInput:
    """The array as GpuInput."""
    return GpuInput(array.address, array.shape, array.dtype, array.owner, device, ready, allocate)


def _module(name: str) -> Any:
    return sys.modules[name]
