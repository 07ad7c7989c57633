"""Tensors of other libraries: how each library's are read, and its results made. One subclass of AnyLibrary for each.

The libraries themselves are not imported here, because a caller that passes a tensor has imported its library. Called
by tensors.py, in the caller's thread.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ...core.errors import MissingDependencyError
from ...core.install import pip
from ...gpu.arrays import Allocated, GpuTensors, RecordedStream

if TYPE_CHECKING:
    from ...gpu.device import Device  # It imports cupy.


_CPU, _CUDA = 1, 2  # DLPack's device types kDLCPU and kDLCUDA


class SupportsDLPack(Protocol):
    """A tensor that other libraries can read: numpy, cupy, torch, jax and others.

    The methods are those of the Python array API standard.
    """

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


TensorLike = SupportsDLPack | np.generic | complex | Sequence


class AnyLibrary:
    """Tensors of unknown libraries, numbers and sequences. Results are numpy arrays, or cupy arrays on a GPU.

    `gpu_problem`: Why tensors on a GPU are refused; "" if they are not.
    """

    gpu_problem = ""

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        """Return the contents, without a copy where that is possible."""
        # numpy's type of the argument also asks for the optional arguments of __dlpack__, which numpy can do without.
        return np.from_dlpack(cast("Any", value)) if hasattr(value, "__dlpack__") else np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> object:
        """Return a CPU result for the caller, over the same memory where that is possible."""
        return array

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        """The numbers of the GPUs that tensors are on; None: a tensor is not on a GPU."""
        places = [value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (_CPU, 0) for value in values]
        return {int(number) if int(kind) == _CUDA else None for kind, number in places}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        """Import tensors on a GPU. The host does not wait."""
        arrays, stream = device.imported(values)
        return _of_cupy(arrays, device, [stream])

    def stream(self, device: "Device") -> RecordedStream:
        """The stream in whose order this thread reads results now."""
        return device.current_stream()

    def from_gpu(self, results: list[Any]) -> list[Any]:
        """Return GPU results, as on_gpu has allocated them, for the caller."""
        return results


class Numpy(AnyLibrary):
    """numpy arrays and scalars."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {None}

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)


class Cupy(AnyLibrary):
    """cupy arrays. Results are allocated in the order of the stream that is cupy's current one at the call."""

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {value.data.device_id for value in values}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        return _of_cupy(list(map(device.contiguous, values)), device, [])


class Torch(AnyLibrary):
    """torch tensors. On a GPU, torch allocates results, in the order of its current stream at the call."""

    def to_numpy(self, value: Any) -> np.ndarray:
        if value.dtype is not sys.modules["torch"].bfloat16:
            return np.from_dlpack(value)
        return np.from_dlpack(value.view(sys.modules["torch"].int16)).view(_bfloat16())

    def from_numpy(self, array: np.ndarray) -> object:
        torch = sys.modules["torch"]
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def gpus_of(self, values: Sequence[Any]) -> set[int | None]:
        return {value.get_device() if value.is_cuda else None for value in values}

    def on_gpu(self, values: Sequence[Any], device: "Device") -> GpuTensors:
        torch, tensors, where = sys.modules["torch"], _plain(values), values[0].device
        # Not an ExternalStream with its address: that of the default stream is 0, by which torch takes one of its pool.
        current, stream = torch.cuda.current_stream(device.number), self.stream(device)
        kinds = [tensor.dtype for tensor in tensors]

        def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
            with torch.cuda.stream(current):
                made = [torch.empty(shape, dtype=dtype, device=where)
                        for shape, dtype in zip(shapes, kinds, strict=True)]
            return Allocated([tensor.data_ptr() for tensor in made], made, stream)

        addresses, shapes = [tensor.data_ptr() for tensor in tensors], [tuple(tensor.shape) for tensor in tensors]
        return GpuTensors(device, addresses, shapes, list(map(_dtype_of_torch, kinds)), tensors, [stream], [stream],
                          allocate)

    def stream(self, device: "Device") -> RecordedStream:
        return device.stream_at(sys.modules["torch"].cuda.current_stream(device.number).cuda_stream)


class Jax(AnyLibrary):
    """jax arrays. They are read-only, so a GPU result is allocated by cupy, and jax imports it through DLPack."""

    def to_numpy(self, value: TensorLike) -> np.ndarray:
        return np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> object:
        return sys.modules["jax"].numpy.asarray(array)

    def from_gpu(self, results: list[Any]) -> list[Any]:
        return list(map(sys.modules["jax"].dlpack.from_dlpack, results))


class TensorFlow(AnyLibrary):
    """TensorFlow's tensors. Their DLPack capsules name a logical GPU, which the bridge to TensorFlow translates."""

    gpu_problem = ("a tensor of TensorFlow on a GPU goes to the functions of mpistrat.tensorflow, not to those of "
                   "mpistrat.")


NUMPY = Numpy()
# By the top-level package of a tensor's type.
KINDS: dict[str, AnyLibrary] = {"numpy": NUMPY, "cupy": Cupy(), "torch": Torch(), "jaxlib": Jax(), "jax": Jax(),
                                "tensorflow": TensorFlow()}
_OTHERS = AnyLibrary()


def library_of(value: TensorLike) -> AnyLibrary:
    """The library of a tensor, by the package of its type."""
    return KINDS.get(type(value).__module__.partition(".")[0], _OTHERS)


def _of_cupy(arrays: Sequence[Any], device: "Device", streams: Sequence[RecordedStream]) -> GpuTensors:
    """Arrays of cupy for the engine. Results are allocated in the order of the stream that is cupy's current one now.

    The caller gets the results, and may drop them while its work on that stream still reads them. The next use of the
    memory comes later on the same stream, or after a wait for it.

    Args:
        streams: The contents are complete when these and the current stream have done their work so far.
    """
    stream, dtypes = device.current_stream(), [array.dtype for array in arrays]

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        with stream:
            made = device.empty_all(shapes, dtypes)
        return Allocated([array.data.ptr for array in made], made, stream)

    return GpuTensors(device, [array.data.ptr for array in arrays], [array.shape for array in arrays], dtypes, arrays,
                      [*streams, stream], [stream] if device.can_wait(stream) else None, allocate)


def _plain(tensors: Sequence[Any]) -> list[Any]:
    """Tensors of torch whose elements are in their memory, in C order."""
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError("it requires a gradient, which does not pass through a collective; use tensor.detach()")
    return [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]


@cache
def _dtype_of_torch(dtype: object) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(_bfloat16() if name == "bfloat16" else name)


def _bfloat16() -> type:
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise MissingDependencyError(f"bfloat16 in numpy needs ml_dtypes ({pip('ml_dtypes')}).") from error
    return bfloat16
