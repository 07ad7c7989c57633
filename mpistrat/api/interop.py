"""Tensors of other libraries: read through DLPack; results are tensors of the same library as the input.

`tensors_of` converts a caller's values for the engine. For each known library, a subclass of `AnyLibrary` has what is
special about it. The libraries themselves are not imported here, because a caller that passes a tensor has imported its
library. The one exception is cupy, for tensors on a GPU. Any thread may call the functions of this module.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ..core.errors import InvalidRequestError, MissingDependencyError
from ..core.install import pip, pip_extra
from ..core.request import DEVICE_CPU, DEVICE_GPU
from ..gpu.arrays import Allocated, GpuArray, GpuInput, GpuStream
from ..gpu.host_copies import HostCopies
from . import runtime

if TYPE_CHECKING:
    from ..gpu.device import Device, Event  # They import cupy.

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CUDA = 2  # kDLCUDA, DLPack's device type of NVIDIA GPUs

_devices: "WeakKeyDictionary[runtime.Runtime, Device]" = WeakKeyDictionary()
_copies: "WeakKeyDictionary[Device, HostCopies]" = WeakKeyDictionary()
_logged: WeakSet[runtime.Runtime] = WeakSet()
_lock = threading.Lock()


class SupportsDLPack(Protocol):
    """A tensor that other libraries can read: numpy, cupy, torch, jax and others.

    The methods are those of the Python array API standard.
    """

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


TensorLike = SupportsDLPack | np.generic | complex | Sequence


class Tensor(NamedTuple):
    """A tensor in the form that the engine takes, and the way back to the caller's library.

    Attributes:
        array: A numpy array, or a GpuInput.
        restore: Converts the engine's result, a numpy array or a GpuArray, to a tensor of the caller's library.
    """

    array: np.ndarray | GpuInput
    restore: Callable[[Any], object]

    @property
    def device(self) -> str:
        """DEVICE_CPU or DEVICE_GPU."""
        return DEVICE_GPU if isinstance(self.array, GpuInput) else DEVICE_CPU


class Imported(NamedTuple):
    """A tensor on a GPU.

    Attributes:
        array: Its memory.
        stream: The contents are complete when this stream has done its work so far.
        allocate: As in GpuInput: allocates results in memory of the caller's library.
    """

    array: GpuArray
    stream: GpuStream
    allocate: Callable[[tuple[int, ...]], Allocated]

    def as_input(self, device: "Device", ready: "Event | None") -> GpuInput:
        """The tensor for the engine."""
        return gpu_input(self.array, device, ready, self.allocate)


class AnyLibrary:
    """Tensors of unknown libraries, numbers and sequences. Results are numpy arrays, or cupy arrays on a GPU.

    Attributes:
        gpu_problem: Why tensors on a GPU are refused; "" if they are not.
    """

    gpu_problem = ""

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        """Return the contents, without a copy where that is possible."""
        # numpy's type of the argument also asks for the optional arguments of __dlpack__, which numpy can do without.
        return np.from_dlpack(cast("Any", value)) if hasattr(value, "__dlpack__") else np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> object:
        """Return a CPU result for the caller, over the same memory where that is possible."""
        return array

    def on_gpu(self, value: TensorLike, device: "Device") -> Imported:
        """Import a tensor on a GPU. The host does not wait."""
        array, stream = device.imported(value)
        return Imported(device.seen(array), stream, _in_cupys_memory(device, array.dtype))

    def from_gpu(self, result: GpuArray) -> object:
        """Return a GPU result for the caller."""
        return result.owner


class Numpy(AnyLibrary):
    """numpy arrays and scalars."""

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)


class Cupy(AnyLibrary):
    """cupy arrays. Results are allocated in the order of the stream that is cupy's current one at the call."""

    def on_gpu(self, value: TensorLike, device: "Device") -> Imported:
        array = device.contiguous(value)
        return Imported(device.seen(array), device.current_stream(), _in_cupys_memory(device, array.dtype))


class Torch(AnyLibrary):
    """torch tensors. On a GPU, torch allocates results, in the order of its current stream at the call."""

    def to_numpy(self, value: Any) -> np.ndarray:
        if value.dtype is not _module("torch").bfloat16:
            return np.from_dlpack(value)
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise MissingDependencyError(f"bfloat16 in numpy needs ml_dtypes ({pip('ml_dtypes')}).") from error
        return np.from_dlpack(value.view(_module("torch").int16)).view(bfloat16)

    def from_numpy(self, array: np.ndarray) -> object:
        torch = _module("torch")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def on_gpu(self, value: Any, device: "Device") -> Imported:
        torch = _module("torch")
        array, imports = device.imported(value)
        stream = torch.cuda.current_stream(value.device)
        dtype, where = value.dtype, value.device

        def allocate(shape: tuple[int, ...]) -> Allocated:
            with torch.cuda.stream(stream):
                made = torch.empty(shape, dtype=dtype, device=where)
                imported, imports = device.imported(made)
            return GpuArray(device.seen(imported).address, tuple(made.shape), imported.dtype, made), imports

        return Imported(device.seen(array), imports, allocate)


class Jax(AnyLibrary):
    """jax arrays. They are read-only, so a GPU result is allocated by cupy, and jax imports it through DLPack."""

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> object:
        return _module("jax").numpy.asarray(array)

    def from_gpu(self, result: GpuArray) -> object:
        return _module("jax").dlpack.from_dlpack(result.owner)


class TensorFlow(AnyLibrary):
    """TensorFlow's tensors. Their DLPack capsules name a logical GPU, which the bridge to TensorFlow translates."""

    gpu_problem = ("a tensor of TensorFlow on a GPU goes to the functions of mpistrat.tensorflow, not to those of "
                   "mpistrat.")


# By the top-level package of a tensor's type.
KINDS: dict[str, AnyLibrary] = {"numpy": Numpy(), "cupy": Cupy(), "torch": Torch(), "jaxlib": Jax(), "jax": Jax(),
                                "tensorflow": TensorFlow()}
_OTHERS = AnyLibrary()


def tensors_of(values: Sequence[TensorLike]) -> list[Tensor]:
    """Convert the tensors, numbers or sequences of one request for the engine. Local.

    Raises:
        InvalidRequestError: A value is not an array, its library cannot export it, or it is on a GPU other than that
            of this rank's earlier tensors.
        MissingDependencyError: A value is on a GPU, and cupy is not installed.
    """
    libraries = [KINDS.get(type(value).__module__.partition(".")[0], _OTHERS) for value in values]
    # All tensors are imported before the first event is recorded, so that one event serves all of a stream.
    imported = [_imported(library, value) for library, value in zip(libraries, values, strict=True)]
    events: dict[int, Event] = {}
    return [_on_host(library, value) if on_gpu is None else _on_gpu(library, on_gpu, events)
            for library, value, on_gpu in zip(libraries, values, imported, strict=True)]


def _imported(library: AnyLibrary, value: TensorLike) -> "tuple[Device, Imported] | None":
    """A tensor on this rank's GPU; None if it is not on a GPU."""
    number = _gpu_of(value)
    if number is None:
        return None
    if library.gpu_problem:
        raise InvalidRequestError(library.gpu_problem)
    device = this_ranks_gpu(number)
    with device.current():
        return device, _convert(value, lambda: library.on_gpu(value, device))


def _on_gpu(library: AnyLibrary, on_gpu: "tuple[Device, Imported]", events: "dict[int, Event]") -> Tensor:
    """A tensor on a GPU for the engine, with the event of its stream, which is added to `events`, by address."""
    device, imported = on_gpu
    stream = imported.stream
    if stream.ptr not in events:
        with device.current():
            events[stream.ptr] = device.record(stream)
    array = imported.as_input(device, events[stream.ptr])
    if go_by_host():
        copies = _copies_of(device)
        return Tensor(copies.fetched(array), lambda result: library.from_gpu(copies.returned(result, array)))
    return Tensor(array, library.from_gpu)


def _on_host(library: AnyLibrary, value: TensorLike) -> Tensor:
    array = np.asarray(_convert(value, lambda: library.to_numpy(value)), order="C")
    return Tensor(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")), library.from_numpy)


def _convert(value: TensorLike, conversion: Callable[[], T]) -> T:
    """Return `conversion()`; its errors become InvalidRequestErrors that name the type of `value`."""
    try:
        return conversion()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
            raise InvalidRequestError(f"cannot read {type(value).__name__} through DLPack: {error}") from error
        raise InvalidRequestError(f"not an array: {error}") from error


def _gpu_of(value: TensorLike) -> int | None:
    """Return the number of the GPU that the tensor is on; None for a CPU tensor, a number or a sequence."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack_device__"):
        return None
    kind, number = _convert(value, value.__dlpack_device__)
    return int(number) if int(kind) == _CUDA else None


def this_ranks_gpu(number: int) -> "Device":
    """Return this rank's GPU. The first call since init() decides which GPU that is.

    Raises:
        InvalidRequestError: This rank already uses another GPU than `number`.
        MissingDependencyError: cupy is not installed.
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


def _copies_of(device: "Device") -> HostCopies:
    settings = runtime.current().settings
    with _lock:
        if device not in _copies:
            _copies[device] = HostCopies(device, settings.limit_s)
        return _copies[device]


def make_device(number: int) -> "Device":
    """Open the GPU with this number. Raises MissingDependencyError if cupy is not installed, or cannot be imported."""
    reason = why_no_cupy()
    if reason:
        raise MissingDependencyError(f"tensors on a GPU need cupy: {reason}.")
    from ..gpu.device import Device
    return Device(number)


@cache
def why_no_cupy() -> str:
    """Why tensors on a GPU cannot be read; "" if they can. Imports cupy."""
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


def gpu_input(array: GpuArray, device: "Device", ready: "Event | None",
              allocate: Callable[[tuple[int, ...]], Allocated]) -> GpuInput:
    """Return the array as a GpuInput, with the given fields."""
    return GpuInput(array.address, array.shape, array.dtype, array.owner, device, ready, allocate)


def _in_cupys_memory(device: "Device", dtype: np.dtype) -> Callable[[tuple[int, ...]], Allocated]:
    """A function that allocates cupy arrays in the order of the stream that is cupy's current one now.

    The caller gets the array, and may drop it while its work on that stream still reads it. The next use of the memory
    comes later on the same stream, or after a wait for it.
    """
    stream = device.current_stream()

    def allocate(shape: tuple[int, ...]) -> Allocated:
        with stream:
            return device.seen(device.empty(shape, dtype)), stream

    return allocate


def _module(name: str) -> ModuleType:
    """Return a module that the caller has imported."""
    return sys.modules[name]
