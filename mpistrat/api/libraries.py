"""Tensors of other libraries: how mpistrat reads them, and makes results of the same library.

This module does not import the libraries, because a caller that passes a tensor has imported its library. tensors.py
calls this module, in the caller's thread.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ..gpu.arrays import Allocated, GpuTensors, RecordedStream

if TYPE_CHECKING:
    from ..gpu.device import Device  # This module imports cupy.


_CPU, _CUDA = 1, 2  # DLPack's device types kDLCPU and kDLCUDA


class SupportsDLPack(Protocol):
    """A tensor that other libraries can read: numpy, cupy, torch, jax and others.

    The methods are those of the Python array API standard.
    """

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


TensorLike = SupportsDLPack | np.generic | complex | Sequence


class Library:
    """A library whose tensors are read through DLPack. Also for numbers and sequences: their results are numpy arrays.

    Args:
        from_dlpack: The library's function that imports arrays of other libraries. None: results are numpy arrays, or
            cupy arrays on a GPU.

    Attributes:
        gpu_problem: Why tensors on a GPU are refused; "" if they are accepted.
    """

    gpu_problem = ""

    def __init__(self, from_dlpack: Callable[[Any], Any] | None = None):
        self._from_dlpack = from_dlpack

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        """Return `value` as a numpy array, without a copy if possible."""
        # numpy's annotation asks for the optional arguments of __dlpack__, which numpy does not need.
        return np.from_dlpack(cast("Any", value)) if hasattr(value, "__dlpack__") else np.asarray(value)

    def of(self, result: object) -> Any:
        """Return a result (a numpy or cupy array) as a tensor of this library, over the same memory."""
        return result if self._from_dlpack is None else self._from_dlpack(result)

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        """Return the set of the tensors' GPU numbers. None in the set: at least one tensor is not on a GPU."""
        places = [value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (_CPU, 0) for value in values]
        return {int(number) if int(kind) == _CUDA else None for kind, number in places}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        """Import tensors on a GPU. The host does not wait."""
        arrays, stream = device.imported(values)
        return _of_cupy(arrays, device, [stream])


class Numpy(Library):
    """numpy arrays and scalars."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {None}

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)


class Cupy(Library):
    """cupy arrays. Results are allocated in stream order, on cupy's current stream at the time of the call."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {value.data.device_id for value in values}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        return _of_cupy(list(map(device.contiguous, values)), device, [])


class TensorFlow(Library):
    """TensorFlow's tensors. Their DLPack capsules name a logical GPU, which the bridge to TensorFlow translates."""

    gpu_problem = ("the functions of mpistrat take no TensorFlow tensors on a GPU. Call the function of the same name "
                   "in mpistrat.tensorflow.")


# The libraries, by the top-level package of a tensor's type.
KINDS: dict[str, Library] = {"numpy": Numpy(), "cupy": Cupy(), "tensorflow": TensorFlow()}


def library_of(value: TensorLike) -> Library:
    """Return the library of a tensor, by the package of the tensor's type.

    For other packages than KINDS, `from_dlpack` is that of the array API namespace (jax) or of the package (torch).
    """
    package = type(value).__module__.partition(".")[0]
    if package in KINDS:
        return KINDS[package]
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else sys.modules.get(package)
    return Library(getattr(namespace, "from_dlpack", None))


def _of_cupy(arrays: Sequence[Any], device: "Device", streams: Sequence[RecordedStream]) -> GpuTensors:
    """Return cupy arrays in the form that the engine takes. Results are allocated on cupy's current stream.

    The caller may drop the results while its work on that stream still reads them: the next use of the memory comes
    later on the same stream, or after a wait for the stream.

    Args:
        streams: The contents are complete when these streams and the current one have done their present work.
    """
    stream, dtypes = device.current_stream(), [array.dtype for array in arrays]

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        with stream:
            made = device.empty_all(shapes, dtypes)
        return Allocated([array.data.ptr for array in made], made, stream)

    return GpuTensors(device, [array.data.ptr for array in arrays], [array.shape for array in arrays], dtypes, arrays,
                      [*streams, stream], [stream] if device.can_wait(stream) else None, allocate)
