"""Arrays on a GPU as the engine sees them, and Protocols of the GPU, its streams and its events.

device.Device implements the Protocols with cupy; tests have a stand-in. Made by the caller's thread, used by the
engine's.
"""

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .copy.plan import CopyJob
from .nccl.types import NcclCommunicator


@dataclass(frozen=True, eq=False)
class GpuArray:
    """C-contiguous elements in the memory of this rank's GPU.

    Attributes:
        address: The GPU's address of the first element.
        owner: The foreign object that keeps the memory alive. Of a result it is what the caller gets.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: Any

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize


class CudaEvent(Protocol):
    """An event of cupy: a GpuEvent without the stream.

    Attributes:
        ptr: The address of CUDA's event.
    """

    ptr: int


class RecordedStream(Protocol):
    """A stream of another library, or what stands for it, as far as events need it. Any thread may use it."""

    @property
    def ptr(self) -> int:
        """Identifies the stream: its address, if it is one."""

    def record(self, event: CudaEvent) -> object:
        """Record an event after all work that is enqueued so far."""


class GpuStream(RecordedStream, Protocol):
    """A queue of work for the GPU. The GPU executes it in order."""

    def __enter__(self) -> object:
        """Make it the library's current stream."""

    def __exit__(self, *_: object) -> object: ...


class GpuEvent(Protocol):
    """A point in a stream.

    Attributes:
        stream: Identifies the stream.
        number: Of two events of a stream, the later one has the larger number.
    """

    stream: Hashable
    number: int

    @property
    def done(self) -> bool:
        """Whether the GPU has reached it. Does not wait. Raises EngineError if the GPU has failed."""


class GpuDevice(Protocol):
    """This rank's GPU. For the methods see device.Device."""

    identity: str

    def current(self) -> AbstractContextManager[Any]: ...

    def stream(self, is_urgent: bool = False) -> GpuStream: ...

    def record(self, stream: RecordedStream) -> GpuEvent: ...

    def wait(self, stream: GpuStream, event: GpuEvent) -> None: ...  # an event of the same device

    def scratch(self, nbytes: int) -> GpuArray | None: ...

    def pinned(self, nbytes: int) -> np.ndarray: ...

    def copy(self, target: int, source: int, nbytes: int, stream: GpuStream) -> None: ...

    def compile(self, job: CopyJob) -> None: ...

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: GpuStream) -> None: ...

    def nccl_version(self) -> int: ...

    def unique_id(self) -> bytes | tuple[int, ...]: ...

    def communicator(self, size: int, unique_id: bytes | tuple[int, ...], rank: int) -> NcclCommunicator: ...

    def nccl_group(self) -> AbstractContextManager[None]: ...


# An uninitialised array, and the stream whose work so far may still use its memory; None: no work uses it any more.
Allocated = tuple[GpuArray, RecordedStream | None]


@dataclass(frozen=True, eq=False)
class GpuInput(GpuArray):
    """A tensor submitted for a collective, in place of a numpy array.

    The library of the tensor allocates the result, in the order of the caller's stream. So the result may be freed, and
    its memory reused by work that the caller enqueues later, like any memory of that library.

    Attributes:
        device: This rank's GPU.
        ready: An event after all work that the contents depend on; None: the contents are complete. The tensors of a
            request have one event for each stream.
        allocate: Returns an array of the given shape, of the same library and dtype. It may return the memory of the
            input, if the shape is the same: an all-reduce or a broadcast is then in place.
    """

    device: GpuDevice
    ready: GpuEvent | None
    allocate: Callable[[tuple[int, ...]], Allocated]
