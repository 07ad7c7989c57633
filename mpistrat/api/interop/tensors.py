"""Tensors of other libraries: read through DLPack; results are tensors of the same library as the input.

`tensors_of` converts a caller's values for the engine. libraries.py has what is special about each library, own_gpu.py
which GPU a rank uses. Any thread may call the functions of this module.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from ...core.errors import InvalidRequestError
from ...gpu.arrays import GpuEvent, GpuInput
from .libraries import NUMPY, AnyLibrary, Imported, TensorLike, library_of
from .own_gpu import go_by_host, gpu_input, host_copies_of, this_ranks_gpu

if TYPE_CHECKING:
    from ...gpu.device import Device  # It imports cupy.

T = TypeVar("T")

_CUDA = 2  # kDLCUDA, DLPack's device type of NVIDIA GPUs


class Tensor(NamedTuple):
    """A tensor in the form that the engine takes, and the way back to the caller's library.

    Attributes:
        array: A numpy array, or a GpuInput.
        restore: Converts the engine's result, a numpy array or a GpuArray, to a tensor of the caller's library.
    """

    array: np.ndarray | GpuInput
    restore: Callable[[Any], object]


def tensors_of(values: Sequence[TensorLike]) -> list[Tensor]:
    """Convert the tensors, numbers or sequences of one request for the engine. Local.

    Raises:
        InvalidRequestError: A value is not an array, its library cannot export it, or it is on a GPU other than that
            of this rank's earlier tensors.
        MissingDependencyError: A value is on a GPU, and cupy is not installed.
    """
    if set(map(type, values)) == {np.ndarray}:  # The usual case, in which a small collective is mostly these calls.
        return list(map(_native, cast("Sequence[np.ndarray]", values)))
    libraries = [library_of(value) for value in values]
    # All tensors are imported before the first event is recorded, so that one event serves all of a stream.
    imported = [_imported(library, value) for library, value in zip(libraries, values, strict=True)]
    events: dict[int, GpuEvent] = {}
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


def _on_gpu(library: AnyLibrary, on_gpu: "tuple[Device, Imported]", events: dict[int, GpuEvent]) -> Tensor:
    """A tensor on a GPU for the engine, with the event of its stream, which is added to `events`, by address."""
    device, imported = on_gpu
    stream = imported.stream
    if stream.ptr not in events:
        with device.current():
            events[stream.ptr] = device.record(stream)
    array = gpu_input(imported.array, device, events[stream.ptr], imported.allocate)
    if go_by_host():
        copies = host_copies_of(device)
        return Tensor(copies.fetched(array), lambda result: library.from_gpu(copies.returned(result, array)))
    return Tensor(array, library.from_gpu)


def _on_host(library: AnyLibrary, value: TensorLike) -> Tensor:
    return _native(_convert(value, lambda: library.to_numpy(value)), library)


def _native(array: np.ndarray, library: AnyLibrary = NUMPY) -> Tensor:
    """The array in C order and the byte order of this machine."""
    array = np.asarray(array, order="C")
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
