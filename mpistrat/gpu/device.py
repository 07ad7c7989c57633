"""This rank's GPU: memory, streams, copies and tensors of other libraries, by cupy.

This module and the two that it imports (copy/compiler.py, nccl_library.py) are the only ones that call cupy. It
implements the Protocols of `arrays` and `nccl_types`, so all other modules run with a stand-in in tests. Importing it
fails where cupy is missing; api.tensors.make_device names the remedy. Any thread may use a Device.
"""

import math
import platform
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from ctypes import Array, c_char, c_double, c_int32, c_int64, c_uint64, create_string_buffer, memmove
from functools import cache
from itertools import count
from threading import Lock, get_ident
from typing import Any, cast

import cupy
import cupyx
import numpy as np

from ..core.memory import rounded_up
from ..core.tuning import COPY_BLOCK_THREADS
from . import driver, nccl_library
from .arrays import GpuArray, GpuEvent, GpuStream, RecordedStream
from .copy.compiler import compiled
from .copy.copy_kernel import GUARD, NAME, source, variant
from .copy.copy_plan import PIECE, PIECES_PER_LAUNCH, CopyJob

# Beyond the range of any GPU, which is 0 to -5. cudaStreamCreateWithPriority then takes the end of the range.
_URGENT = -100
_RESULT_ALIGNMENT = 512  # of the allocations of cupy and torch
_PER_THREAD = 2  # cudaStreamPerThread
_PLAIN = CopyJob("float32", "float32")


class Event:
    """A point in a stream, see arrays.GpuEvent. Device.record makes it. Any thread may use it.

    `spare`: The list that gets cupy's event back for reuse. A stream that waits does not wait for the next record.
    """

    def __init__(self, cupy_event: cupy.cuda.Event, stream: RecordedStream, number: int, spare: list[Any]):
        self.cupy_event, self.number, self._spare = cupy_event, number, spare
        self._stream = stream  # so that no other stream gets the address while the event exists
        # The per-thread default streams of all threads have the same address.
        self.stream: Hashable = (stream.ptr, get_ident() if stream.ptr == _PER_THREAD else 0)

    @property
    def done(self) -> bool:
        """Whether the stream has reached the event. Raises EngineError if the GPU has failed."""
        return driver.is_done(self.cupy_event.ptr)

    def __del__(self) -> None:
        self._spare.append(self.cupy_event)


class Device:
    """A GPU. Any thread may use it, within `current()`.

    `number`: CUDA's index of the GPU, among those visible to this process.
    """

    checked_bytes = 2**25  # The size of the copies of a check; 40 copies take 0.5 ms on an H200, by its bandwidth.

    def __init__(self, number: int):
        self.number = number
        self.identity = f"{driver.uuid(number)} on {platform.node()}"
        self._module = cache(lambda job: _functions(source(job), NAME, GUARD))
        self._recording, self._event_numbers = Lock(), count()
        self._spare_events: list[Any] = []  # Operations on lists are atomic.
        self._context = 0
        with self.current():
            # Tensors of other libraries are imported on this stream, which waits for their contents.
            self._imports = _imports_of(number)
            self._context = driver.context()

    def current(self) -> AbstractContextManager[None]:
        """A context in which CUDA uses this GPU in this thread. Makes no CUDA context on another GPU.

        Afterwards a thread that used another GPU uses that GPU again. A thread that used no GPU stays on this GPU.
        """
        return driver.Selected(self._context, lambda: cupy.cuda.runtime.setDevice(self.number))

    # -- order --------------------------------------------------------------------------------------------------------

    def stream(self, is_urgent: bool = False) -> GpuStream:
        """A new stream, which does not synchronise with the default stream.

        The kernels of an urgent stream start before waiting kernels of other streams. cupy 13 ignores `is_urgent`.
        """
        urgency = {"priority": _URGENT} if is_urgent and _has_priorities() else {}
        made: GpuStream = cupy.cuda.Stream(non_blocking=True, **urgency)
        return made

    def stream_at(self, address: int) -> GpuStream:
        """A stream that another library has made."""
        made: GpuStream = cupy.cuda.ExternalStream(address)
        return made

    def record(self, stream: RecordedStream | None = None) -> Event:
        """An event after all work enqueued so far on `stream`, or on cupy's current stream.

        Events are numbered in the order in which they are recorded.
        """
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        try:
            cupy_event = self._spare_events.pop()
        except IndexError:
            cupy_event = cupy.cuda.Event(disable_timing=True)
        with self._recording:
            stream.record(cupy_event)
            return Event(cupy_event, stream, next(self._event_numbers), self._spare_events)

    def can_wait(self, stream: RecordedStream) -> bool:
        """Whether any thread can make the stream wait: the per-thread default stream differs in each thread."""
        return stream.ptr != _PER_THREAD

    def wait(self, stream: RecordedStream, event: GpuEvent) -> None:
        """Make all work enqueued on `stream` from now on start after `event`. The host does not wait."""
        cast("cupy.cuda.Stream", stream).wait_event(cast("Event", event).cupy_event)

    # -- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> GpuArray | None:
        """Allocate uninitialised bytes on this GPU; None if there is not enough memory."""
        # On the stream for imports: memory in cupy's pool of the caller's stream may still be in use by enqueued work.
        try:
            with self._imports:
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

    def write_number(self, address: int, number: int, words: int, stream: GpuStream) -> None:
        """Enqueue the write of an integer of `words` words of 32 bits. The host does not wait."""
        driver.write_number(address, number, words, stream.ptr)

    def compile(self, job: CopyJob) -> None:
        """Compile and load the kernel for `job`. Raises what `compiled` raises, or the error of the GPU's driver."""
        self._module(variant(job))

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: GpuStream, lost: int = 0) -> None:
        """Enqueue the copies of a table of at most PIECES_PER_LAUNCH rows, see copy.copy_plan. Allocates no memory.

        `lost`: As for `guard`; 0: the copies are not guarded.
        """
        # Not by cupy, whose launch takes 23 us on an H200's host.
        driver.launch(self._module(variant(job))[NAME].ptr, blocks, COPY_BLOCK_THREADS, stream.ptr, (
            _by_value(table), c_int32(len(table)), c_double(job.factor), c_int64(job.divisor), c_uint64(lost)))

    def guard(self, target: int, nbytes: int, lost: int, stream: GpuStream) -> None:
        """Enqueue a kernel that fills memory with NaN if the uint32 at `lost`, in pinned memory, is not 0 by then."""
        driver.launch(self._module(_PLAIN)[GUARD].ptr, 1, COPY_BLOCK_THREADS, stream.ptr, (
            c_uint64(target), c_uint64(nbytes), c_uint64(lost)))

    # -- tensors of other libraries -----------------------------------------------------------------------------------

    def contiguous(self, array: Any) -> Any:
        """Return a cupy array in C order: `array`, or a copy made on cupy's current stream."""
        return array if array.flags.c_contiguous else cupy.ascontiguousarray(array)

    def empty_all(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> list[Any]:
        """Allocate uninitialised cupy arrays on cupy's current stream, in one block of memory."""
        offsets, end = [], 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            offsets.append(end)
            end = rounded_up(end + math.prod(shape) * dtype.itemsize, _RESULT_ALIGNMENT)
        memory = cupy.cuda.alloc(end)
        return [cupy.ndarray(shape, dtype, memory + offset)
                for shape, dtype, offset in zip(shapes, dtypes, offsets, strict=True)]

    def current_stream(self) -> GpuStream:
        """cupy's current stream in this thread."""
        stream: GpuStream = cupy.cuda.get_current_stream()
        return stream

    def imported(self, tensors: Sequence[object]) -> tuple[list[Any], GpuStream]:
        """Import tensors of another library as C-contiguous cupy arrays; also return the stream of their contents.

        By the DLPack protocol the library makes this stream wait for a tensor. The host does not wait.
        """
        with self._imports:
            return [cupy.ascontiguousarray(cupy.from_dlpack(tensor)) for tensor in tensors], self._imports

    # -- NCCL, here so that a stand-in for a device has it, too -------------------------------------------------------

    nccl_version = staticmethod(nccl_library.version)
    unique_id = staticmethod(nccl_library.unique_id)
    communicator = staticmethod(nccl_library.Communicator)
    nccl_group = staticmethod(nccl_library.group)


@cache
def _imports_of(number: int) -> cupy.cuda.Stream:
    """One stream for all Devices of the current GPU, which has this number.

    cupy's pool keeps the memory that was allocated on a stream for that stream. So the fusion buffers of an elastic
    job's next generation reuse the memory of the previous generation, even if its communicators were aborted.
    """
    return cupy.cuda.Stream(non_blocking=True)


def _functions(code: str, *names: str) -> dict[str, Any]:
    """Kernels of these names in the code, compiled for the current GPU and loaded. Raises as `compiled`."""
    module = cupy.cuda.Module()
    module.load(compiled(code))
    return {name: module.get_function(name) for name in names}


def _by_value(table: np.ndarray) -> "Array[c_char]":
    made = create_string_buffer(PIECES_PER_LAUNCH * PIECE.itemsize)
    memmove(made, table.ctypes.data, table.nbytes)
    return made


@cache
def _has_priorities() -> bool:
    return int(cupy.__version__.split(".")[0]) >= 14


def gpu_count() -> int:
    """The number of GPUs visible to this process; 0 also without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
