"""Tensors of other libraries: how each library's are read, and its results made. One subclass of AnyLibrary for each.

The libraries themselves are not imported here, because a caller that passes a tensor has imported its library. Called
by tensors.py, in the caller's thread.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from ...core.errors import MissingDependencyError
from ...core.install import pip
from ...gpu.arrays import Allocated, GpuArray, GpuStream

if TYPE_CHECKING:
    from ...gpu.device import Device  # It imports cupy.


class SupportsDLPack(Protocol):
    """A tensor that other libraries can read: numpy, cupy, torch, jax and others.

    The methods are those of the Python array API standard.
    """

    def __dlpack__(self) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


TensorLike = SupportsDLPack | np.generic | complex | Sequence


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
        if value.dtype is not sys.modules["torch"].bfloat16:
            return np.from_dlpack(value)
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise MissingDependencyError(f"bfloat16 in numpy needs ml_dtypes ({pip('ml_dtypes')}).") from error
        return np.from_dlpack(value.view(sys.modules["torch"].int16)).view(bfloat16)

    def from_numpy(self, array: np.ndarray) -> object:
        torch = sys.modules["torch"]
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def on_gpu(self, value: Any, device: "Device") -> Imported:
        torch = sys.modules["torch"]
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
        return sys.modules["jax"].numpy.asarray(array)

    def from_gpu(self, result: GpuArray) -> object:
        return sys.modules["jax"].dlpack.from_dlpack(result.owner)


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
