"""GPU arrays in the form that the engine takes, and Protocols of a GPU, its streams, its events and NCCL.

device.py implements the Protocols with cupy; tests use a stand-in for the GPU. The caller's thread makes the arrays,
and the engine's thread uses them.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, mul
from typing import Any, NamedTuple, Protocol

import numpy as np

from .copy_kernel import CopyJob

_ITEMSIZE = attrgetter("itemsize")


class GpuArray(NamedTuple):
    """C-contiguous elements in the memory of this rank's GPU."""

    address: int  # Of the first element, in the GPU's memory.
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: Any  # The object that keeps the memory alive.

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class CudaEvent(Protocol):
    """A cupy.cuda.Event. `ptr`: The address of CUDA's event."""

    ptr: int


class RecordedStream(Protocol):
    """A CUDA stream on which events are recorded, or a substitute if the address of TensorFlow's stream is unknown."""

    @property
    def ptr(self) -> int:
        """The address of the CUDA stream, or a number that identifies the substitute."""

    def record(self, event: CudaEvent) -> object:
        """Record `event` after all work that is enqueued so far."""


class GpuStream(RecordedStream, Protocol):
    """A CUDA stream: the GPU executes the work in the order in which it was enqueued."""

    def __enter__(self) -> object:
        """Make this stream cupy's current stream in this thread."""

    def __exit__(self, *_: object) -> object: ...


class GpuEvent(Protocol):
    """An event that is recorded in a stream. The GPU reaches the event after all earlier work of the stream."""

    stream: Hashable  # Identifies the stream
    number: int  # Of two events of a stream, the later one has the larger number

    @property
    def done(self) -> bool:
        """Whether the GPU has reached the event. Does not wait. Raises EngineError if the GPU has failed."""


class NcclCommunicator(Protocol):
    """The methods of cupy's NcclCommunicator, and `revoke`. `dtype` and `op` are NCCL's numbers, see nccl_data.py."""

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None: ...  # noqa: N802
    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int,  # noqa: N802
                      stream: int) -> None: ...
    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None: ...  # noqa: N802
    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...
    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None: ...
    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None: ...
    def revoke(self) -> bool: ...  # of device.Communicator; all other methods are cupy's
    def abort(self) -> None: ...
    def destroy(self) -> None: ...


class GpuDevice(Protocol):
    """This rank's GPU. See device.Device for the methods."""

    identity: str
    checked_bytes: int

    def current(self) -> AbstractContextManager[Any]: ...
    def stream(self, is_urgent: bool = False) -> GpuStream: ...
    def record(self, stream: RecordedStream) -> GpuEvent: ...
    def wait(self, stream: RecordedStream, event: GpuEvent) -> None: ...  # an event of the same device
    def scratch(self, nbytes: int) -> GpuArray | None: ...
    def pinned(self, nbytes: int) -> np.ndarray: ...
    def copy(self, target: int, source: int, nbytes: int, stream: GpuStream) -> None: ...
    def write_number(self, address: int, number: int, words: int, stream: GpuStream) -> None: ...
    def compile(self, job: CopyJob) -> None: ...
    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: GpuStream, lost: int = 0) -> None: ...
    def guard(self, target: int, nbytes: int, lost: int, stream: GpuStream) -> None: ...
    def nccl_version(self) -> int: ...
    def unique_id(self) -> bytes | tuple[int, ...]: ...
    def communicator(self, size: int, unique_id: bytes | tuple[int, ...], rank: int) -> NcclCommunicator: ...
    def nccl_group(self) -> AbstractContextManager[None]: ...


class Allocated(NamedTuple):
    """Memory for the results of a request."""

    addresses: Sequence[int]  # Of each result.
    results: list[Any]  # The object that the caller gets for each result. It keeps the memory alive.
    # The work in this stream may still use the memory. None: no work uses it, or an event of the request follows it.
    stream: RecordedStream | None


@dataclass(frozen=True, eq=False)
class BucketList:
    """A list of tensors that is reduced in buckets. Each bucket is one request, and the requests may come in any order.

    The streams in which the caller reads results are the same for all buckets. They wait for no result until all
    buckets are enqueued, because a wait would delay the work that computes the tensors of later buckets.
    """

    count: int  # The number of buckets, which are numbered from 0.


class GpuTensors(Sequence[GpuArray]):
    """The tensors of a request, all on one GPU, as a sequence of GpuArrays.

    A step has hundreds of tensors. Therefore their fields are stored as lists, and indexing makes a GpuArray. The
    library of the tensors (cupy, TensorFlow) allocates the results. The caller may drop a result at any time, because
    the library reuses its memory only for later work of the caller's stream.
    """

    def __init__(self, device: GpuDevice, addresses: Sequence[int], shapes: Sequence[tuple[int, ...]],
                 dtypes: Sequence[np.dtype], owner: object, streams: Sequence[RecordedStream],
                 readers: Sequence[RecordedStream] | None,
                 allocate: Callable[[Sequence[tuple[int, ...]]], Allocated]):
        # owner: The object that keeps the memory of the tensors alive.
        self.device, self.addresses, self.shapes, self.dtypes, self.owner = device, addresses, shapes, dtypes, owner
        # streams: When they have done their work so far, the contents are complete and the memory of results is free.
        # readers: The streams in whose order the caller reads the results. The caller waits for nothing else. None: the
        # caller reads the results as soon as the request is complete, in any order.
        # allocate: Allocates results of the given shapes, of the same dtypes.
        self.streams, self.readers, self.allocate = streams, readers, allocate
        self.ready: Sequence[GpuEvent] = ()  # Events of `streams`.
        self.bucket: tuple[BucketList, int] | None = None  # The list of buckets, and the index of this bucket in it.
        self.made: Allocated | None = None  # The results, if their shapes are known when the request is submitted.
        # Events after which the results are complete, if the request was complete before.
        self.ends: Sequence[GpuEvent] = ()

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, i: int) -> GpuArray:  # type: ignore[override]
        return GpuArray(self.addresses[i], self.shapes[i], self.dtypes[i], self.owner)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all elements of all tensors."""
        return sum(map(mul, map(math.prod, self.shapes), map(_ITEMSIZE, self.dtypes)))

    def prepare(self, keeps_shapes: bool) -> None:
        """Record an event in each stream that computes the tensors. The caller calls this once, before submitting.

        `keeps_shapes`: Whether the results have the shapes of the tensors. If so, this allocates the results before it
        records the events, because the events must follow all work that may still use the results' memory.
        """
        with self.device.current():
            if keeps_shapes:
                addresses, results, _ = self.allocate(self.shapes)
                self.made = Allocated(addresses, results, None)
            self.ready = [self.device.record(stream) for stream in self.streams]

    def follow(self, stream: RecordedStream) -> None:
        """Make `stream` wait for the results. Does nothing if the executor has already made this stream wait."""
        if self.ends and stream.ptr not in [reader.ptr for reader in self.readers or ()]:
            with self.device.current():
                for end in self.ends:
                    self.device.wait(stream, end)
