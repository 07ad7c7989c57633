"""This rank's GPU, by cupy: memory, streams, copies, kernels, NCCL, and tensors of other libraries.

This is the only module that calls cupy. It implements the Protocols of arrays.py, so tests can use a stand-in for it.
The import fails where cupy is missing; api.tensors.make_device then raises an error that says how to install cupy. Any
thread may use a Device.
"""

import ctypes
import math
import platform
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import Array, c_char, c_double, c_int32, c_int64, c_uint64, create_string_buffer, memmove
from functools import cache
from itertools import count
from threading import Lock, get_ident
from typing import Any, cast

import cupy
import cupyx
import numpy as np
from cupy.cuda import compiler, nccl

from ..core.errors import EngineError
from ..core.memory import rounded_up
from ..core.tuning import COPY_BLOCK_THREADS
from . import driver
from .arrays import GpuArray, GpuEvent, GpuStream, RecordedStream
from .copy_kernel import GUARD, NAME, PIECE, PIECES_PER_LAUNCH, CopyJob, source, variant

# Beyond the range of any GPU, which is 0 to -5. cudaStreamCreateWithPriority then takes the end of the range.
_URGENT = -100
_HAS_PRIORITIES = int(cupy.__version__.split(".")[0]) >= 14
_RESULT_ALIGNMENT = 512  # of the allocations of cupy and torch
_PER_THREAD = 2  # cudaStreamPerThread
_PLAIN = CopyJob("float32", "float32")
# Options of the compiler. Denormal floats are not flushed to zero.
OPTIONS = ("-std=c++17", "-ftz=false")
# Results of NCCL's calls that cupy 13 and 14 have no name for; its NcclError(7) is a KeyError.
RESULTS = {7: "ncclInProgress: the call has not ended (is NCCL_COMM_BLOCKING=0 set?)", 8: "ncclTimeout"}


class Event:
    """A recorded event, see arrays.GpuEvent. Device.record makes it. Any thread may use it."""

    def __init__(self, cupy_event: cupy.cuda.Event, stream: RecordedStream, number: int, spare: list[Any]):
        self.cupy_event, self.number = cupy_event, number
        # Gets cupy's event back for reuse: a stream that waits for an event does not wait for its next record.
        self._spare = spare
        self._stream = stream  # so that no other stream gets the address while the event exists
        # The per-thread default streams of all threads have the same address.
        self.stream: Hashable = (stream.ptr, get_ident() if stream.ptr == _PER_THREAD else 0)

    @property
    def done(self) -> bool:
        return driver.is_done(self.cupy_event.ptr)

    def __del__(self) -> None:
        self._spare.append(self.cupy_event)


class Device:
    """A GPU. Any thread may call the methods, within `with device.current():`.

    `number`: CUDA's index of the GPU, among those visible to this process.
    """

    checked_bytes = 2**25  # The size of the copies of a check; 40 copies take 0.5 ms on an H200, by its bandwidth.

    def __init__(self, number: int):
        self.number = number
        self.identity = f"{driver.uuid(number)} on {platform.node()}"
        self._module = cache(_functions)  # a cache for each Device
        self._recording, self._event_numbers = Lock(), count()
        self._spare_events: list[Any] = []  # Operations on lists are atomic.
        self._context = 0
        with self.current():
            # Tensors of other libraries are imported on this stream, which waits for their contents.
            self._imports = _imports_of(number)
            self._context = driver.context()

    def current(self) -> AbstractContextManager[None]:
        """Return a `with` context that selects this GPU for CUDA in this thread. Makes no CUDA context on other GPUs.

        At its end, a thread that used a different GPU is back on that GPU. A thread that used no GPU stays on this one.
        """
        return driver.Selected(self._context, lambda: cupy.cuda.runtime.setDevice(self.number))

    # -- order --------------------------------------------------------------------------------------------------------

    def stream(self, is_urgent: bool = False) -> GpuStream:
        """Return a new stream, which does not synchronise with the default stream.

        `is_urgent`: Whether its kernels have priority over kernels of other streams. cupy 13 ignores this.
        """
        urgency = {"priority": _URGENT} if is_urgent and _HAS_PRIORITIES else {}
        made: GpuStream = cupy.cuda.Stream(non_blocking=True, **urgency)
        return made

    def stream_at(self, address: int) -> GpuStream:
        """Return the stream at `address`, which another library has made."""
        made: GpuStream = cupy.cuda.ExternalStream(address)
        return made

    def record(self, stream: RecordedStream | None = None) -> Event:
        """Record an event after all work enqueued so far on `stream` (None: on cupy's current stream), and return it.

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
        """Return False for the per-thread default stream, whose address means a different stream in each thread."""
        return stream.ptr != _PER_THREAD

    def wait(self, stream: RecordedStream, event: GpuEvent) -> None:
        """Make all work enqueued on `stream` from now on start after `event`. The host does not wait."""
        cast("cupy.cuda.Stream", stream).wait_event(cast("Event", event).cupy_event)

    # -- memory -------------------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> GpuArray | None:
        """Allocate `nbytes` uninitialised bytes of GPU memory. Return None if there is not enough memory."""
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
        """Enqueue a copy of `nbytes` bytes. Each address may be in GPU memory or in pinned host memory."""
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)

    def write_number(self, address: int, number: int, words: int, stream: GpuStream) -> None:
        """Enqueue a write of the integer `number`, which has 32 * `words` bits. The host does not wait."""
        driver.write_number(address, number, words, stream.ptr)

    def compile(self, job: CopyJob) -> None:
        """Compile and load the kernels for `job`. Raises EngineError like `compiled`, or an error of CUDA's driver."""
        self._module(variant(job))

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: GpuStream, lost: int = 0) -> None:
        """Launch the copy kernel (see copy_kernel.py). `table` has at most PIECES_PER_LAUNCH rows. Allocates no memory.

        `lost`: The address of a flag, see `guard`. If it is set, the kernel fills the targets with NaN. 0: No flag.
        """
        # Not by cupy, whose launch takes 23 us on an H200's host.
        driver.launch(self._module(variant(job))[NAME].ptr, blocks, COPY_BLOCK_THREADS, stream.ptr, (
            _by_value(table), c_int32(len(table)), c_double(job.factor), c_int64(job.divisor), c_uint64(lost)))

    def guard(self, target: int, nbytes: int, lost: int, stream: GpuStream) -> None:
        """Enqueue a kernel that fills `target` with NaN if the flag at address `lost` (uint32) is set when it runs."""
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
        """Return cupy's current stream in this thread."""
        stream: GpuStream = cupy.cuda.get_current_stream()
        return stream

    def imported(self, tensors: Sequence[object]) -> tuple[list[Any], GpuStream]:
        """Return DLPack tensors as C-contiguous cupy arrays, and the stream in which their contents are complete.

        By the DLPack protocol, the library of a tensor makes this stream wait for the tensor. The host does not wait.
        """
        with self._imports:
            return [cupy.ascontiguousarray(cupy.from_dlpack(tensor)) for tensor in tensors], self._imports

    # -- NCCL, here so that a stand-in for a device has it, too -------------------------------------------------------

    @staticmethod
    def nccl_version() -> int:
        """NCCL's version code (22805 is 2.28.5); 0 if cupy was built without NCCL, or cannot load it."""
        return int(nccl.get_version()) if nccl.available else 0

    @staticmethod
    def unique_id() -> bytes | tuple[int, ...]:
        """Return a new id for a communicator: bytes, or a tuple before cupy 14. One rank calls this for all ranks."""
        made: bytes | tuple[int, ...] = nccl.get_unique_id()
        return made

    @staticmethod
    def communicator(size: int, unique_id: bytes | tuple[int, ...], rank: int) -> "Communicator":
        """Return a new communicator. Collective: blocks until all ranks call it."""
        return Communicator(size, unique_id, rank)

    @staticmethod
    @contextmanager
    def nccl_group() -> Iterator[None]:
        """Return a `with` context whose NCCL calls form one group (ncclGroupStart, ncclGroupEnd)."""
        with explained("a group"):
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()


@cache
def _imports_of(number: int) -> cupy.cuda.Stream:
    """Return the stream that all Devices of GPU `number` use for imported tensors and for `scratch`.

    The stream is the same after each init(), so that new fusion buffers reuse the memory of old ones: cupy's pool
    reuses memory only on the stream on which it was allocated.
    """
    return cupy.cuda.Stream(non_blocking=True)


def _by_value(table: np.ndarray) -> "Array[c_char]":
    made = create_string_buffer(PIECES_PER_LAUNCH * PIECE.itemsize)
    memmove(made, table.ctypes.data, table.nbytes)
    return made


def gpu_count() -> int:
    """Return the number of GPUs visible to this process; 0 if there is no driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


# -- kernels -----------------------------------------------------------------------------------------------------------


def _functions(job: CopyJob) -> dict[str, Any]:
    """Compile and load the kernels for `job` on the current GPU, and return them by name. Raises as `compiled`."""
    module = cupy.cuda.Module()
    module.load(compiled(source(job)))
    return {name: module.get_function(name) for name in (NAME, GUARD)}


def compiled(code: str) -> bytes:
    """Compile CUDA source for the current GPU, and return the machine code. Any thread, within `Device.current()`.

    This does not use cupy's RawModule, because RawModule adds the option -ftz=true. Raises EngineError with the
    compiler's message: NVRTC is missing, does not work, or rejects the code.
    """
    try:
        find_nvrtc()
        binary: bytes = compiler.compile_using_nvrtc(code, OPTIONS, cache_in_memory=True)[0]
    except (RuntimeError, OSError, compiler.CompileException) as error:
        raise EngineError("a CUDA kernel cannot be compiled (GPUs of the Blackwell generation need NVRTC 12.8 or "
                          f"later): {error}") from error
    return binary


def find_nvrtc() -> None:
    """Load NVRTC, if cupy does not find it. Raises OSError if NVRTC is not installed."""
    try:
        compiler.nvrtc.getVersion()  # cupy's own way
    except RuntimeError:
        driver.load_nvrtc(cupy.cuda.driver.get_build_version() // 1000)


# -- NCCL --------------------------------------------------------------------------------------------------------------


class Communicator:
    """Wraps cupy's NcclCommunicator. It has the same methods, but raises EngineErrors with NCCL's own message.

    Implements arrays.NcclCommunicator. The constructor is collective, and blocks until all ranks call it. One thread
    calls the methods. Meanwhile a second thread may call `revoke` and `abort`: a call that waits in NCCL then returns,
    and later calls raise EngineError. The second thread can run, because cupy's calls release the GIL. Call `revoke`
    before `abort`, because ncclCommAbort frees the communicator that the waiting call uses. Later calls do not reach
    cupy, because its object refers to the freed communicator until ncclCommAbort has returned.
    """

    def __init__(self, size: int, unique_id: bytes | tuple[int, ...], rank: int):
        with explained(f"connecting rank {rank} of {size}"):
            self._cupy_communicator = nccl.NcclCommunicator(size, unique_id, rank)
        self._rank, self._lock, self._is_ended, self._is_aborted = rank, Lock(), False, False

    def revoke(self) -> bool:
        """Make the call that waits in NCCL return. Frees nothing. Any thread may call this.

        Returns False if ncclCommRevoke is missing or fails, or if `revoke` or `abort` was called before.
        """
        try:
            comm_revoke = ctypes.CDLL("libnccl.so.2").ncclCommRevoke
        except (OSError, AttributeError):
            return False
        comm_revoke.argtypes = ctypes.c_void_p, ctypes.c_int
        with self._lock:
            if self._is_ended:
                return False
            self._is_ended = True
        return bool(comm_revoke(self._cupy_communicator.comm, 0) == 0)

    def abort(self) -> None:
        """Abort all work of the communicator, and free it. May be called twice, and by any thread."""
        with self._lock:
            is_first, self._is_aborted, self._is_ended = not self._is_aborted, True, True
        if is_first:
            with explained(f"abort on rank {self._rank}"):
                self._cupy_communicator.abort()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cupy_communicator, name)

        def call(*arguments: Any) -> Any:
            if self._is_ended:
                raise EngineError(f"NCCL's communicator was aborted before {name} on rank {self._rank}.")
            with explained(f"{name} on rank {self._rank}"):
                return method(*arguments)

        setattr(self, name, call)  # so that later calls bypass __getattr__
        return call


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Return a `with` context that turns NCCL's errors into EngineErrors. `doing`: Names the call in the message."""
    try:
        yield
    except (nccl.NcclError, KeyError) as error:
        text = str(error)
        if isinstance(error, KeyError):
            if not error.args or error.args[0] not in RESULTS:
                raise
            text = RESULTS[error.args[0]]
        raise EngineError(f"NCCL has failed ({doing}): {text}. {last_error()}".rstrip(". ") + ".") from error


def last_error() -> str:
    """Return NCCL's message on its latest error in this process; "" if there is no such message."""
    try:
        get_last_error = ctypes.CDLL("libnccl.so.2").ncclGetLastError
    except (OSError, AttributeError):
        return ""
    get_last_error.restype, get_last_error.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    return (get_last_error(None) or b"").decode(errors="replace")
