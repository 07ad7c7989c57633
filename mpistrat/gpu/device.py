"""This rank's GPU: memory, streams, events, the copy kernel and NCCL, by cupy. The only module that imports cupy.

It implements the Protocols of `arrays` and `nccl.types`.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import nccl

from ..core.errors import EngineError
from ..core.tuning import COPY_BLOCK_THREADS
from . import driver
from .arrays import GpuArray, GpuStream
from .copy.kernel import NAME, source, variant
from .copy.plan import CopyJob
from .dlpack import CUDA

_NOT_READY = 600  # cudaErrorNotReady


class Device:
    """A GPU. Any thread may use it, within `current()`.

    Args:
        number: CUDA's index of the GPU, among those visible to this process.
    """

    dlpack_type = CUDA

    def __init__(self, number: int):
        self.number = number
        self.identity = f"{driver.uuid(number)} on {platform.node()}"
        self._launch = cache(self._compile)
        self._context = 0
        with self.current():
            # Tensors of other libraries are imported on this stream, which waits for their contents.
            self._imports = cupy.cuda.Stream(non_blocking=True)
            # Memory that is lent comes from this stream's part of cupy's pool, and so goes to nobody else afterwards.
            self._lending = cupy.cuda.Stream(non_blocking=True)
            self._context = driver.context()

    def current(self) -> AbstractContextManager[None]:
        """A context in which CUDA uses this GPU in this thread. Makes no CUDA context on another GPU.

        Afterwards a thread that used another GPU uses that one again. A thread that used none stays on this one.
        """
        return driver.selected(self._context, lambda: cupy.cuda.runtime.setDevice(self.number))

    # -- order --------------------------------------------------------------------------------------------------------

    def stream(self) -> GpuStream:
        """A new stream, which does not synchronise with the default stream."""
        made: GpuStream = cupy.cuda.Stream(non_blocking=True)
        return made

    def record(self, stream: GpuStream | None = None) -> "Event":
        """An event after all work enqueued so far on `stream`, or on cupy's current stream."""
        return Event(cupy.cuda.get_current_stream() if stream is None else stream)

    def wait(self, stream: Any, event: "Event") -> None:
        """Make all work enqueued on `stream` from now on start after `event`. The host does not wait."""
        stream.wait_event(event.cupy_event)

    # -- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> GpuArray | None:
        """Allocate uninitialised bytes on this GPU; None if there is not enough memory."""
        # On a stream of ours: memory in cupy's pool of the caller's stream may still be in use by enqueued work.
        return self._allocated(nbytes, self._imports)

    def lendable(self, nbytes: int) -> GpuArray | None:
        """As `scratch`, for a library that imports the memory, and gives it back while its work is still enqueued.

        The memory is lent again only. So only the library's own work may use it at first: that of the same stream, or
        after which the stream has been waited for.
        """
        return self._allocated(nbytes, self._lending)

    def _allocated(self, nbytes: int, stream: GpuStream) -> GpuArray | None:
        try:
            with stream:
                memory = cupy.cuda.alloc(nbytes)
        except cupy.cuda.memory.OutOfMemoryError:
            return None
        return GpuArray(memory.ptr, (nbytes,), np.dtype(np.uint8), memory)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate uninitialised bytes of pinned host memory."""
        return np.asarray(cupyx.empty_pinned(nbytes, np.uint8))

    def copy(self, target: int, source: int, nbytes: int, stream: GpuStream) -> None:
        """Enqueue a copy between addresses of GPU memory or pinned memory."""
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: Any) -> object:
        """Enqueue the copies of a table, see copy.plan. The caller keeps the result until they are complete."""
        staged = self.pinned(table.nbytes)
        staged[:] = table.view(np.uint8)
        with stream:
            on_gpu = cupy.cuda.alloc(table.nbytes)
            self.copy(on_gpu.ptr, staged.ctypes.data, table.nbytes, stream)
            self._launch(variant(job))((blocks,), (COPY_BLOCK_THREADS,), (
                np.uint64(on_gpu.ptr), np.int32(len(table)), np.float64(job.factor), np.int64(job.divisor)))
        return staged, on_gpu

    def _compile(self, job: CopyJob) -> Any:
        return cupy.RawModule(code=source(job), options=("-std=c++17",)).get_function(NAME)

    # -- tensors of other libraries -----------------------------------------------------------------------------------

    def seen(self, array: Any) -> GpuArray:
        """Wrap a C-contiguous cupy array."""
        return GpuArray(array.data.ptr, array.shape, array.dtype, array)

    def contiguous(self, array: Any) -> Any:
        """Return a cupy array in C order: `array`, or a copy made on cupy's current stream."""
        return cupy.ascontiguousarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Allocate an uninitialised cupy array on cupy's current stream."""
        return cupy.empty(shape, dtype)

    def current_stream(self) -> GpuStream:
        """cupy's current stream in this thread."""
        stream: GpuStream = cupy.cuda.get_current_stream()
        return stream

    def imported(self, tensor: Any) -> tuple[Any, "Event"]:
        """Import a tensor of another library as a C-contiguous cupy array, with an event after its contents.

        By the DLPack protocol the library makes our stream wait for the tensor. The host does not wait.
        """
        with self._imports:
            array = cupy.ascontiguousarray(cupy.from_dlpack(tensor))
            return array, self.record(self._imports)

    def complete(self) -> "Event":
        """An event that waits for no work of the caller: for a tensor whose library has waited on the host already."""
        return self.record(self._imports)

    def empty_on_arrival(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, "Event"]:
        """Allocate a cupy array for a library with its own memory, with an event after the former use of the memory."""
        with self._imports:
            return cupy.empty(shape, dtype), self.record(self._imports)

    # -- NCCL ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def nccl_version() -> int:
        """NCCL's version code (22805 is 2.28.5); 0 if cupy was built without NCCL, or cannot load it."""
        return int(nccl.get_version()) if nccl.available else 0

    @staticmethod
    def unique_id() -> bytes | tuple[int, ...]:
        """A new id for a communicator, made by one rank for all: bytes, or a tuple before cupy 14."""
        made: bytes | tuple[int, ...] = nccl.get_unique_id()
        return made

    @staticmethod
    def communicator(size: int, unique_id: bytes | tuple[int, ...], rank: int) -> "Communicator":
        """Connect the ranks that have `unique_id`. Collective; waits for all of them."""
        return Communicator(size, unique_id, rank)

    @staticmethod
    @contextmanager
    def nccl_group() -> Iterator[None]:
        """A context in which NCCL's operations are enqueued as one."""
        with explained("a group"):
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()


class Communicator:
    """cupy's NcclCommunicator, with all its methods. Their errors become EngineErrors with NCCL's own message.

    Implements nccl.types.NcclCommunicator.
    """

    def __init__(self, size: int, unique_id: bytes | tuple[int, ...], rank: int):
        with explained(f"connecting rank {rank} of {size}"):
            self._cupy_communicator = nccl.NcclCommunicator(size, unique_id, rank)
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cupy_communicator, name)

        def call(*arguments: Any) -> Any:
            with explained(f"{name} on rank {self._rank}"):
                return method(*arguments)

        setattr(self, name, call)  # so that later calls bypass __getattr__
        return call


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """A context that turns NCCL's errors into EngineErrors with NCCL's own message."""
    try:
        yield
    except nccl.NcclError as error:
        raise EngineError(f"NCCL has failed ({doing}): {error}. {last_error()}".rstrip(". ") + ".") from error


class Event:
    """A point in a stream."""

    def __init__(self, stream: Any):
        self.cupy_event = cupy.cuda.Event(disable_timing=True)
        self.cupy_event.record(stream)

    @property
    def done(self) -> bool:
        """Whether the stream has reached it. Raises EngineError if the GPU has failed."""
        status = cupy.cuda.runtime.eventQuery(self.cupy_event.ptr)
        if status not in (0, _NOT_READY):
            raise EngineError(f"the GPU has failed: {cupy.cuda.runtime.CUDARuntimeError(status)}")
        return bool(status == 0)


def gpu_count() -> int:
    """The number of GPUs visible to this process; 0 without a driver, too."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def last_error() -> str:
    """NCCL's message on its latest error in this process; "" if it is not available."""
    try:
        get_last_error = ctypes.CDLL("libnccl.so.2").ncclGetLastError
    except (OSError, AttributeError):
        return ""
    get_last_error.restype, get_last_error.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    return (get_last_error(None) or b"").decode(errors="replace")
