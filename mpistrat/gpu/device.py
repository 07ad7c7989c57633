"""This rank's GPU, by cupy: all that the rest of the package needs of it. This is the only module that imports cupy."""

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
from .arrays import GpuArray
from .copy.kernel import NAME, source, variant
from .copy.plan import BLOCK_THREADS, CopyJob

_NOT_READY = 600  # cudaErrorNotReady


class Device:
    """A GPU, with streams, events, memory, the copy kernel and NCCL. Any thread may use it, within `current()`.

    Args:
        number: As CUDA counts the GPUs that this process sees.
    """

    def __init__(self, number: int):
        self.number = number
        # GPUs of different hosts may have the same bus. The instances of a divided GPU (MIG) have its bus in common:
        # NCCL takes them for one GPU, and refuses ("Duplicate GPU detected").
        self.identity = f"{platform.node()} {cupy.cuda.runtime.deviceGetPCIBusId(number)}"
        self._launch = cache(self._compile)
        with self.current():
            # What tensors of other libraries wait for is waited for here, so that nothing else has to.
            self._arrivals = self.stream()

    def current(self) -> AbstractContextManager[Any]:
        """Makes this the GPU that CUDA uses in this thread."""
        device: AbstractContextManager[Any] = cupy.cuda.Device(self.number)
        return device

    # -- order --------------------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A stream that waits for no other by itself; its address is `.ptr`."""
        return cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any = None) -> "Event":
        """An event after what `stream`, or cupy's current stream, has been given so far."""
        return Event(cupy.cuda.get_current_stream() if stream is None else stream)

    def wait(self, stream: Any, event: "Event") -> None:
        """Let what `stream` is given from now on begin after `event`. The host does not wait."""
        stream.wait_event(event.of_cupy)

    # -- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> GpuArray | None:
        """Uninitialised bytes of this GPU, or None where there are not so many left."""
        try:
            # In the order of a stream of our own: work of the caller's may still be at what cupy's pool holds free.
            with self._arrivals:
                memory = cupy.cuda.alloc(nbytes)
        except cupy.cuda.memory.OutOfMemoryError:
            return None
        return GpuArray(memory.ptr, (nbytes,), np.dtype(np.uint8), memory)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Uninitialised bytes of the host that the GPU reads and writes by itself."""
        return np.asarray(cupyx.empty_pinned(nbytes, np.uint8))

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy between addresses of the GPU or of pinned memory."""
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: Any) -> Any:
        """Enqueue the copies of a table, see `copy_plan`. The result is to be kept until they are complete."""
        staged = self.pinned(table.nbytes)
        staged[:] = table.view(np.uint8)
        with stream:
            on_gpu = cupy.cuda.alloc(table.nbytes)
            self.copy(on_gpu.ptr, staged.ctypes.data, table.nbytes, stream)
            self._launch(variant(job))((blocks,), (BLOCK_THREADS,), (
                np.uint64(on_gpu.ptr), np.int32(len(table)), np.float64(job.factor), np.int64(job.divisor)))
        return staged, on_gpu

    def _compile(self, job: CopyJob) -> Any:
        return cupy.RawModule(code=source(job), options=("-std=c++17",)).get_function(NAME)

    # -- tensors of other libraries -----------------------------------------------------------------------------------

    def seen(self, array: Any) -> GpuArray:
        """A cupy array as it is seen here. It must be C-contiguous."""
        return GpuArray(array.data.ptr, array.shape, array.dtype, array)

    def contiguous(self, array: Any) -> Any:
        """A cupy array in C order: itself, or a copy made on cupy's current stream."""
        return cupy.ascontiguousarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised cupy array, of memory that is in order on cupy's current stream."""
        return cupy.empty(shape, dtype)

    def current_stream(self) -> Any:
        """cupy's current stream in this thread."""
        return cupy.cuda.get_current_stream()

    def imported(self, tensor: Any) -> tuple[Any, Any]:
        """A tensor of another library as a C-contiguous cupy array over its memory, and an event after its contents.

        The library makes the stream that it is told of wait for the tensor, as DLPack has it; the host does not wait.
        """
        with self._arrivals:
            array = cupy.ascontiguousarray(cupy.from_dlpack(tensor))
            return array, self.record(self._arrivals)

    def empty_on_arrival(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, Any]:
        """An uninitialised cupy array for a library with memory of its own, and an event after its former use."""
        with self._arrivals:
            return cupy.empty(shape, dtype), self.record(self._arrivals)

    # -- NCCL ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def nccl_version() -> int:
        """NCCL's version code (22805 is 2.28.5), or 0 where cupy was built without it, or cannot load it."""
        return int(nccl.get_version()) if nccl.available else 0

    @staticmethod
    def unique_id() -> bytes | tuple[int, ...]:
        """What the ranks of a new communicator have to know, made by one of them: a tuple before cupy 14."""
        made: bytes | tuple[int, ...] = nccl.get_unique_id()
        return made

    @staticmethod
    def communicator(size: int, unique_id: bytes | tuple[int, ...], rank: int) -> "Communicator":
        """A communicator. Collective."""
        return Communicator(size, unique_id, rank)

    @staticmethod
    @contextmanager
    def nccl_group() -> Iterator[None]:
        """Within it, operations of NCCL are enqueued as one."""
        with explained("a group"):
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()


class Communicator:
    """cupy's NcclCommunicator with its methods, whose errors say what NCCL says of them."""

    def __init__(self, size: int, unique_id: bytes | tuple[int, ...], rank: int):
        with explained(f"connecting rank {rank} of {size}"):
            self._of_cupy = nccl.NcclCommunicator(size, unique_id, rank)
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of_cupy, name)

        def call(*arguments: Any) -> Any:
            with explained(f"{name} on rank {self._rank}"):
                return method(*arguments)

        setattr(self, name, call)  # Found at once from the second time on.
        return call


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns an error of NCCL's into an EngineError with what NCCL says about it."""
    try:
        yield
    except nccl.NcclError as error:
        raise EngineError(f"NCCL has failed ({doing}): {error}. {last_error()}".rstrip(". ") + ".") from error


class Event:
    """A point in a stream."""

    def __init__(self, stream: Any):
        self.of_cupy = cupy.cuda.Event(disable_timing=True)
        self.of_cupy.record(stream)

    @property
    def done(self) -> bool:
        """Whether the stream has come so far. Raises EngineError when the GPU has failed instead."""
        status = cupy.cuda.runtime.eventQuery(self.of_cupy.ptr)
        if status not in (0, _NOT_READY):
            raise EngineError(f"the GPU has failed: {cupy.cuda.runtime.CUDARuntimeError(status)}")
        return bool(status == 0)


def gpu_count() -> int:
    """How many GPUs this process sees; 0 also where there is no driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def last_error() -> str:
    """What NCCL says about its latest error in this process, or "" where it cannot be asked."""
    try:
        ask = ctypes.CDLL("libnccl.so.2").ncclGetLastError
    except (OSError, AttributeError):
        return ""
    ask.restype, ask.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    return (ask(None) or b"").decode(errors="replace")
