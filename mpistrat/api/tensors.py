"""Converts tensors of other libraries for the engine, through DLPack, and results back to tensors of these libraries.

`tensors_of` converts the inputs of a collective. The first GPU tensor decides which GPU this rank uses, and makes this
module import cupy. This module imports no other library, because a caller that passes a tensor has imported the
tensor's library. Any thread may call the functions of this module.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ..core.errors import InvalidRequestError, MissingDependencyError
from ..core.install import pip_extra
from ..core.request import DEVICE_CPU, DEVICE_GPU, Array
from ..gpu.arrays import Allocated, GpuDevice, GpuTensors, RecordedStream
from ..gpu.backend import await_on_host
from . import runtime
from .job import Job

if TYPE_CHECKING:
    from ..gpu.device import Device

logger = logging.getLogger(__name__)

T = TypeVar("T")

# -- libraries --------------------------------------------------------------------------------------------------------

_CPU, _CUDA = 1, 2  # DLPack's device types kDLCPU and kDLCUDA


class SupportsDLPack(Protocol):
    """A tensor with the DLPack methods of the array API standard, for example of numpy, cupy, torch or jax."""

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


TensorLike = SupportsDLPack | np.generic | complex | Sequence


class Library:
    """Converts tensors of one library for the engine, through DLPack, and results back to tensors of the library.

    `from_dlpack`: The library's function that imports arrays of other libraries. Without it, as for Python numbers and
    sequences, the results are numpy arrays, or cupy arrays on a GPU.
    """

    gpu_problem = ""  # Why tensors on a GPU are refused; "" if they are accepted.

    def __init__(self, from_dlpack: Callable[[Any], Any] | None = None):
        self._from_dlpack = from_dlpack

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        """Return `value` as a numpy array, without a copy if possible."""
        # numpy's annotation asks for the optional arguments of __dlpack__, which numpy does not need.
        return np.from_dlpack(cast("Any", value)) if hasattr(value, "__dlpack__") else np.asarray(value)

    def of(self, result: object) -> Any:
        """Return a tensor of this library that shares the memory of `result`, a numpy or cupy array."""
        return result if self._from_dlpack is None else self._from_dlpack(result)

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        """Return the numbers of the GPUs that have the tensors. None stands for tensors that are not on a GPU."""
        places = [value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (_CPU, 0) for value in values]
        return {int(number) if int(kind) == _CUDA else None for kind, number in places}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        """Return `values`, which are on a GPU, in the form that the engine takes. Does not wait for the GPU."""
        arrays, stream = device.imported(values)
        return _of_cupy(arrays, device, [stream])


class Numpy(Library):
    """numpy arrays and scalars."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {None}

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)


class Cupy(Library):
    """cupy arrays. Results are allocated, in stream order, on the current stream of the thread that calls `on_gpu`."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {value.data.device_id for value in values}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        return _of_cupy(list(map(device.contiguous, values)), device, [])


class TensorFlow(Library):
    """TensorFlow's CPU tensors. GPU tensors are refused, because DLPack gives only their logical GPU number."""

    gpu_problem = ("the functions of mpistrat take no TensorFlow tensors on a GPU. Call the function of the same name "
                   "in mpistrat.tensorflow.")


# The libraries, by the top-level package of a tensor's type.
KINDS: dict[str, Library] = {"numpy": Numpy(), "cupy": Cupy(), "tensorflow": TensorFlow()}


def library_of(value: TensorLike) -> Library:
    """Return the library of a tensor, by the package of the tensor's type.

    For a package outside KINDS, `from_dlpack` is in the tensor's array API namespace (jax) or in the package (torch).
    """
    package = type(value).__module__.partition(".")[0]
    if package in KINDS:
        return KINDS[package]
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else sys.modules.get(package)
    return Library(getattr(namespace, "from_dlpack", None))


def _of_cupy(arrays: Sequence[Any], device: "Device", streams: Sequence[RecordedStream]) -> GpuTensors:
    """Return cupy arrays in the form that the engine takes. Results are allocated on cupy's current stream.

    The contents of `arrays` are complete when the present work of `streams` and of the current stream is done. The
    caller may drop a result while work on the current stream still reads it, because the memory is used again only by
    later work on that stream, or after a wait for that stream.
    """
    stream, dtypes = device.current_stream(), [array.dtype for array in arrays]

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        with stream:
            made = device.empty_all(shapes, dtypes)
        return Allocated([array.data.ptr for array in made], made, stream)

    return GpuTensors(device, [array.data.ptr for array in arrays], [array.shape for array in arrays], dtypes, arrays,
                      [*streams, stream], [stream] if device.can_wait(stream) else None, allocate)


# -- this rank's GPU --------------------------------------------------------------------------------------------------

_devices: "WeakKeyDictionary[Job, Device]" = WeakKeyDictionary()
# By Job, which has one GPU. Not by Device: HostCopies refers to its Device, which would then never be freed.
_copies: "WeakKeyDictionary[Job, HostCopies]" = WeakKeyDictionary()
_logged: WeakSet[Job] = WeakSet()
_lock = threading.Lock()


def this_ranks_gpu(number: int) -> "Device":
    """Return this rank's GPU. The first call after init() makes GPU `number` the GPU of this rank.

    Raises InvalidRequestError: This rank already uses a different GPU. Also raises the errors of make_device.
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
    """Return whether GPU tensors are reduced as CPU tensors (MPISTRAT_GPU_OPERATIONS=host). If so, rank 0 logs it."""
    current = runtime.current()
    if current.settings.gpu_operations != "host":
        return False
    with _lock:
        if current not in _logged and current.topology.rank == 0:
            logger.info("rank 0: GPU tensors are copied to the host and reduced as CPU tensors by %s, "
                        "because MPISTRAT_GPU_OPERATIONS=host", current.data_name)
        _logged.add(current)
    return True


def host_copies_of(device: "Device") -> "HostCopies":
    """Return the object that copies GPU tensors to the host and back."""
    current = runtime.current()
    with _lock:
        if current not in _copies:
            _copies[current] = HostCopies(device, current.settings.limit_s)
        return _copies[current]


class HostCopies:
    """Copies tensors between this rank's GPU and pinned host memory. A copy fails after `limit_s`; 0: no limit."""

    def __init__(self, device: GpuDevice, limit_s: float):
        self._device, self._limit_s = device, limit_s
        with device.current():
            self._stream = device.stream()

    def fetched(self, tensors: GpuTensors) -> list[np.ndarray]:
        """Return copies of the tensors in host memory. Waits for the GPU."""
        with self._device.current():
            for event in tensors.ready:
                self._device.wait(self._stream, event)
            fetched = []
            for array in tensors:
                memory = self._device.pinned(array.nbytes)
                self._copy(memory.ctypes.data, array.address, array.nbytes)
                fetched.append(memory.view(array.dtype).reshape(array.shape))
            return fetched

    def returned(self, results: Sequence[np.ndarray], tensors: GpuTensors) -> list[Any]:
        """Copy results to the GPU. Return them as objects of the library that made `tensors`. Waits for the GPU."""
        with self._device.current():
            made = tensors.allocate([result.shape for result in results])
            for event in tensors.ready if made.stream is None else [self._device.record(made.stream)]:
                self._device.wait(self._stream, event)
            for result, address in zip(results, made.addresses, strict=True):
                memory = self._device.pinned(result.nbytes)
                memory.view(result.dtype)[:] = result.reshape(-1)
                self._copy(address, memory.ctypes.data, result.nbytes)
        return made.results

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._device.copy(target, source, nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)


# -- tensors of a request ---------------------------------------------------------------------------------------------

Restore = Callable[[list[Any]], list[Any]]


class Tensors(NamedTuple):
    """The tensors of a request in the form that the engine takes, and a function that converts the results back."""

    arrays: Sequence[Array]  # numpy arrays, or GpuTensors.
    restore: Restore  # Converts the engine's results to tensors of the libraries of the inputs.


def tensors_of(name: str, values: Sequence[TensorLike]) -> Tensors:
    """Convert the tensors, numbers or sequences of one request for the engine. Local.

    Raises:
        InvalidRequestError: A value is not an array, its library cannot export it, or it is not on the same GPU as this
            rank's earlier GPU tensors. Or only some of the values are on a GPU; the text then begins with `name`.
        MissingDependencyError: A value is on a GPU, and cupy is not installed.
    """
    kinds = set(map(type, values))
    if kinds == {np.ndarray}:  # The usual case, kept fast: a small collective takes hardly longer than these calls.
        return Tensors(list(map(_native, cast("Sequence[np.ndarray]", values))), list)
    if len(kinds) == 1:
        library = library_of(values[0])
        gpus = _gpus_of(library, values)
        if len(gpus) == 1:
            number, = gpus
            return _on_host([library] * len(values), values) if number is None else _on_gpu(library, values, number)
    libraries = list(map(library_of, values))
    numbers = [_gpus_of(library, [value]).pop() for library, value in zip(libraries, values, strict=True)]
    if not any(number is not None for number in numbers):
        return _on_host(libraries, values)
    parts = [_on_host([library], [value]) if number is None else _on_gpu(library, [value], number)
             for library, value, number in zip(libraries, values, numbers, strict=True)]
    places = [DEVICE_GPU if isinstance(part.arrays, GpuTensors) else DEVICE_CPU for part in parts]
    if len(set(places)) > 1:
        raise InvalidRequestError(f"{name}: the tensors of a group must all be on the CPU, or all on the GPU. "
                                  f"Received: {places}")
    return _joined(parts, places[0])


def _joined(parts: Sequence[Tensors], place: str) -> Tensors:
    """Join `parts`, each of one tensor, into one Tensors. `place`: The device of all parts, "cpu" or "gpu"."""
    def restore(results: list[Any]) -> list[Any]:
        return [part.restore([result])[0] for part, result in zip(parts, results, strict=True)]

    if place == DEVICE_CPU:
        return Tensors([part.arrays[0] for part in parts], restore)
    tensors = [cast("GpuTensors", part.arrays) for part in parts]

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        made = [each.allocate([shape]) for each, shape in zip(tensors, shapes, strict=True)]
        late = {each.stream.ptr: each.stream for each in made if each.stream is not None}
        for stream in list(late.values())[1:]:
            first.device.wait(made[0].stream or stream, first.device.record(stream))
        return Allocated([each.addresses[0] for each in made], [each.results[0] for each in made], made[0].stream)

    def restore_all(results: list[Any]) -> list[Any]:
        for each in tensors:
            each.ends = together.ends
        return restore(results)

    first = tensors[0]
    readers = [each.readers for each in tensors]
    together = GpuTensors(first.device, [each.addresses[0] for each in tensors], [each.shapes[0] for each in tensors],
                          [each.dtypes[0] for each in tensors], tensors, _distinct([each.streams for each in tensors]),
                          None if None in readers else _distinct(cast("Any", readers)), allocate)
    return Tensors(together, restore_all)


def _distinct(lists: Sequence[Sequence[RecordedStream]]) -> list[RecordedStream]:
    return list({stream.ptr: stream for streams in lists for stream in streams}.values())


def _gpus_of(library: Library, values: Sequence[TensorLike]) -> set[int | None]:
    return _convert(values[0], lambda: library.gpus_of(values))


def _on_gpu(library: Library, values: Sequence[TensorLike], number: int) -> Tensors:
    """Convert tensors of one library that are on the GPU with this number."""
    if library.gpu_problem:
        raise InvalidRequestError(library.gpu_problem)
    device = this_ranks_gpu(number)
    with device.current():
        tensors = _convert(values[0], lambda: library.on_gpu(values, device))
    if go_by_host():
        tensors.prepare(keeps_shapes=False)
        copies = host_copies_of(device)
        return Tensors(copies.fetched(tensors), lambda made: list(map(library.of, copies.returned(made, tensors))))

    def restore(results: list[Any]) -> list[Any]:
        if tensors.ends:
            tensors.follow(device.current_stream())
        return list(map(library.of, results))

    return Tensors(tensors, restore)


def _on_host(libraries: Sequence[Library], values: Sequence[TensorLike]) -> Tensors:
    arrays = [_native(_convert(value, partial(library.to_numpy, value)))
              for library, value in zip(libraries, values, strict=True)]
    return Tensors(arrays, lambda results: [library.of(result)
                                            for library, result in zip(libraries, results, strict=True)])


def _native(array: np.ndarray) -> np.ndarray:
    """Return the array in C order and in the byte order of this machine."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _convert(value: TensorLike, conversion: Callable[[], T]) -> T:
    """Return `conversion()`. If it fails, raise InvalidRequestError. For a DLPack tensor the error names its type."""
    try:
        return conversion()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
            text = f"mpistrat cannot read {type(value).__name__} through DLPack: {error}"
            if "bfloat16" in str(getattr(value, "dtype", "")):
                text = f"{text.rstrip('.')}. numpy and cupy have no bfloat16. Cast the tensor, for example to float32."
            raise InvalidRequestError(text) from error
        raise InvalidRequestError(f"the value is not an array: {error}") from error
