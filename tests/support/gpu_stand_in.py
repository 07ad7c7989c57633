"""What stands in for a GPU where there is none: streams that run late and in any order that events allow.

Memory is the host's, kernels are their models in numpy, and collectives run over MPI. Nothing here is NCCL or CUDA: it
shows that what is enqueued is the right work, waits for what it must wait for, and uses no memory after it is free.
"""

import itertools
import random
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.copy_kernel import PIECES_PER_LAUNCH, CopyJob
from mpistrat.gpu.nccl_data import AVERAGE
from tests.support import copy_model

_DTYPES = [np.dtype(name) for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32",
                                       "float64")] + [np.dtype(ml_dtypes.bfloat16)]
_OPERATIONS = [np.add, np.multiply, np.maximum, np.minimum]
_POISON = 0x7F


class Stream:
    """Work in order: each piece says whether it is done, and is asked again until it is."""

    def __init__(self, number: int):
        self.ptr = number
        self.work: deque[Callable[[], bool]] = deque()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        return


class Event:
    """Fires when its stream gets to it; to ask is what makes streams run."""

    def __init__(self, device: "Device", stream: Stream, number: int):
        self._device, self.has_fired, self.stream, self.number = device, False, stream.ptr, number
        self.is_late = False  # Whether the next answer is one of some time ago.

    @property
    def done(self) -> bool:
        if self.is_late:
            self.is_late = False
            return False
        self._device.run_a_little()
        return self.has_fired

    def fire(self) -> bool:
        self.has_fired = True
        return True


class Array:
    def __init__(self, device: "Device", shape: tuple[int, ...], dtype: np.dtype):
        self.memory = device.allocate(max(int(np.prod(shape)) * dtype.itemsize, 1))
        self.shape, self.dtype, self.device = shape, dtype, device
        self.data = SimpleNamespace(ptr=self.memory.ctypes.data, device_id=device.number)
        device.count(self.memory.nbytes)
        weakref.finalize(self, device.free, self.memory)

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("on the stand-in")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.number

    def view(self) -> np.ndarray:
        nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        return self.memory[:nbytes].view(self.dtype).reshape(self.shape)


class Scratch:
    def __init__(self, memory: np.ndarray):
        self.bytes = memory


class Device:
    """In place of mpistrat.gpu.device.Device. Like that one it is used by the engine's thread and by callers at once.

    `seed` is of the order in which streams run. Scratch memory beyond `free_bytes` is refused.
    """

    checked_bytes = 64

    def __init__(self, number: int = 0, seed: int = 0, free_bytes: int = 2**40):
        self.number, self.identity, self.free_bytes = number, f"stand-in-{seed}", free_bytes
        self.used_bytes = 0  # Of tensors.
        self.log: list[tuple[Any, ...]] = []
        self._random = random.Random(seed)
        # Of what is counted, and of the streams; one thread may come back to it, by way of a finalizer.
        self._lock = threading.RLock()
        self._streams: list[Stream] = []
        self._numbers = itertools.count()
        self._all_memory: list[np.ndarray] = []  # Never freed, so that what is used too long is poison and no crash.
        self._user = self.stream()
        self._transfers: list[Transfer] | None = None  # of the group of NCCL's calls that is open
        self._ran_at, self._runs_alone = 0.0, False

    def current(self) -> Any:
        return nullcontext()

    # -- order --------------------------------------------------------------------------------------------------------

    def stream(self, is_urgent: bool = False) -> Stream:
        self._streams.append(Stream(len(self._streams) + 1))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        return self._user

    def record(self, stream: Stream | None = None) -> Event:
        with self._lock:
            event = Event(self, stream or self._user, next(self._numbers))
            (stream or self._user).work.append(event.fire)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.work.append(lambda: event.has_fired)

    def can_wait(self, stream: Stream) -> bool:
        return True

    def enqueue(self, stream: Stream, work: Callable[[], Any]) -> None:
        """Do this once, in its turn."""
        def once() -> bool:
            work()
            return True
        stream.work.append(once)

    def run_a_little(self) -> None:
        """Go on with some streams, as far as each can."""
        with self._lock:
            self._ran_at = time.monotonic()
            for stream in self._random.sample(self._streams, len(self._streams)):
                for _ in range(self._random.randrange(1, 4)):
                    if not stream.work or not stream.work[0]():
                        break
                    stream.work.popleft()

    def run_alone(self) -> None:
        """From now on, go on also when nobody has asked for 20 ms: other ranks wait for this one's collectives."""
        if not self._runs_alone:
            self._runs_alone = True
            threading.Thread(target=_run_alone, args=(weakref.ref(self),), daemon=True).start()

    def synchronize(self, stream: Stream | None = None) -> None:
        """Go on until a stream, by default the user's, has done its work."""
        while (stream or self._user).work:
            self.run_a_little()

    def run_all(self) -> None:
        while any(stream.work for stream in self._streams):
            self.run_a_little()

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.full(nbytes + 64, _POISON, np.uint8)
        self._all_memory.append(memory)
        start = -memory.ctypes.data % 64
        return memory[start:start + nbytes]

    def count(self, nbytes: int) -> None:
        """A tensor has taken so much memory; less than 0: it has given it back."""
        with self._lock:
            self.used_bytes += nbytes

    def free(self, memory: np.ndarray) -> None:
        """Poison a tensor's memory when its stream has come to that: until then the work before it may use it."""
        self.enqueue(self._user, lambda: memory.fill(_POISON))
        self.count(-memory.nbytes)

    def scratch(self, nbytes: int) -> GpuArray | None:
        if nbytes > self.free_bytes:
            return None
        memory = Scratch(self.allocate(nbytes))
        self._count_scratch(nbytes)
        weakref.finalize(memory, self._count_scratch, -nbytes)
        return GpuArray(memory.bytes.ctypes.data, (nbytes,), np.dtype(np.uint8), memory)

    def _count_scratch(self, nbytes: int) -> None:
        with self._lock:
            self.free_bytes -= nbytes

    def pinned(self, nbytes: int) -> np.ndarray:
        return self.allocate(nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        byte = np.dtype(np.uint8)
        if nbytes:
            self.enqueue(stream, lambda: np.copyto(copy_model.memory_at(target, nbytes, byte),
                                                   copy_model.memory_at(source, nbytes, byte)))

    def write_number(self, address: int, number: int, words: int, stream: Stream) -> None:
        kind = np.dtype(np.int64 if words == 2 else np.int32)
        self.enqueue(stream, lambda: copy_model.memory_at(address, 1, kind).fill(number))

    def compile(self, job: CopyJob) -> None:
        """There is nothing to compile."""

    def batched_copy(self, table: np.ndarray, blocks: int, job: CopyJob, stream: Stream, lost: int = 0) -> None:
        assert len(table) <= PIECES_PER_LAUNCH, "the table does not fit into the parameters of a launch"
        self.log.append(("batched_copy", len(table), job, stream.ptr))
        by_value = table.copy()
        self.enqueue(stream, lambda: copy_model.batched_copy(by_value, job, lost))

    def guard(self, target: int, nbytes: int, lost: int, stream: Stream) -> None:
        self.enqueue(stream, lambda: copy_model.guard(target, nbytes, lost))

    # -- tensors ------------------------------------------------------------------------------------------------------

    def seen(self, array: Array) -> GpuArray:
        return GpuArray(array.memory.ctypes.data, array.shape, array.dtype, array)

    def contiguous(self, array: Array) -> Array:
        return array

    def empty_all(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> list[Array]:
        return [Array(self, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def tensor(self, values: np.ndarray) -> Array:
        """A tensor whose contents come later, by work on the user's stream."""
        array = Array(self, values.shape, values.dtype)
        self.enqueue(self._user, lambda: np.copyto(array.view(), values))
        return array

    # -- collectives --------------------------------------------------------------------------------------------------

    def nccl_version(self) -> int:
        return 23203

    def unique_id(self) -> tuple[int, ...]:
        return tuple(self._random.randrange(256) for _ in range(16))

    def communicator(self, size: int, unique_id: tuple[int, ...], rank: int) -> "Communicator":
        return Communicator(self, size, rank, unique_id)

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        self.log.append(("group",))
        transfers: list[Transfer] = []
        self._transfers = transfers
        yield
        self._transfers = None
        self.log.append(("end of group",))
        if transfers:
            self.stream_at(transfers[0].stream).work.append(Exchange(transfers))

    def transfer(self, transfer: "Transfer") -> None:
        """Let it begin together with the others of the group: alone, two ranks that send would wait for each other."""
        assert self._transfers is not None, "outside of a group"
        self._transfers.append(transfer)

    def stream_at(self, ptr: int) -> Stream:
        return next(stream for stream in self._streams if stream.ptr == ptr)


def _run_alone(device: "weakref.ref[Device]") -> None:
    from mpi4py import MPI
    while (alive := device()) is not None and not MPI.Is_finalized():
        if time.monotonic() - alive._ran_at > 0.02:
            alive.run_a_little()
        del alive
        time.sleep(0.005)


@dataclass
class Transfer:
    """`count` elements on their way to or from another rank."""

    comm: Any
    address: int
    count: int
    dtype: np.dtype
    peer: int
    stream: int
    is_sent: bool

    def begin(self, own: deque[np.ndarray]) -> Any:
        """Its request of MPI; None when there is no more to do. `own` is what this rank has sent itself."""
        memory = copy_model.memory_at(self.address, self.count, self.dtype).view(np.uint8)
        if self.comm is None or self.peer == self.comm.Get_rank():
            if self.is_sent:
                own.append(memory.copy())
            else:
                memory[:] = own.popleft()
            return None
        return (self.comm.Isend if self.is_sent else self.comm.Irecv)(memory, self.peer)


class Exchange:
    """A group of transfers: work for a stream."""

    def __init__(self, transfers: list[Transfer]):
        self._transfers = transfers
        self._requests: list[Any] | None = None

    def __call__(self) -> bool:
        if self._requests is None:
            own: deque[np.ndarray] = deque()
            self._requests = [transfer.begin(own) for transfer in sorted(self._transfers, key=lambda t: not t.is_sent)]
        self._requests = [request for request in self._requests if request is not None and not request.Test()]
        return not self._requests


class Communicator:
    """With the methods of cupy's NcclCommunicator: writes down each call, and does the work over MPI."""

    def __init__(self, device: Device, size: int, rank: int = 0, unique_id: tuple[int, ...] = ()):
        self._device, self._size, self._rank = device, size, rank
        self._comm: Any = self.meet(unique_id) if size > 1 else None

    def meet(self, unique_id: tuple[int, ...]) -> Any:
        """MPI's communicator of those who know the same id. All ranks make communicators at the same time."""
        from mpi4py import MPI
        self._device.run_alone()
        return MPI.COMM_WORLD.Split(zlib.crc32(bytes(unique_id)) >> 1, self._rank)

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        self._device.log.append(("allReduce", count, dtype, op, stream))
        kind = _DTYPES[dtype]

        def combine(parts: np.ndarray) -> None:
            copy_model.memory_at(target, count, kind)[:] = _combined(parts, op)

        self._with_all(source, count, kind, stream, combine)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        self._device.log.append(("reduceScatter", count, dtype, op, stream))
        kind = _DTYPES[dtype]

        def keep(parts: np.ndarray) -> None:
            copy_model.memory_at(target, count, kind)[:] = _combined(parts, op)[self._rank * count:][:count]

        self._with_all(source, count * self._size, kind, stream, keep)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._device.log.append(("reduce", count, dtype, op, root, stream))
        kind = _DTYPES[dtype]

        def keep(parts: np.ndarray) -> None:
            if root == self._rank:
                copy_model.memory_at(target, count, kind)[:] = _combined(parts, op)

        self._with_all(source, count, kind, stream, keep)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._device.log.append(("send", count, dtype, peer, stream))
        self._device.transfer(Transfer(self._comm, source, count, _DTYPES[dtype], peer, stream, True))

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._device.log.append(("recv", count, dtype, peer, stream))
        self._device.transfer(Transfer(self._comm, target, count, _DTYPES[dtype], peer, stream, False))

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:  # noqa: N802
        self._device.log.append(("allGather", count, dtype, stream))
        kind = _DTYPES[dtype]

        def join(parts: np.ndarray) -> None:
            copy_model.memory_at(target, count * self._size, kind)[:] = parts.reshape(-1)

        self._with_all(source, count, kind, stream, join)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._device.log.append(("broadcast", count, dtype, root, stream))
        kind = _DTYPES[dtype]

        def take(parts: np.ndarray) -> None:
            copy_model.memory_at(target, count, kind)[:] = parts[root]

        self._with_all(source, count, kind, stream, take)

    def check_async_error(self) -> None:
        """There is none."""

    def revoke(self) -> bool:
        self._device.log.append(("revoke",))
        return True

    def abort(self) -> None:
        self._device.log.append(("abort",))

    def destroy(self) -> None:
        self._device.log.append(("destroy",))
        if self._comm is not None:
            self._comm.Free()

    def _with_all(self, source: int, count: int, dtype: np.dtype, stream: int,
                  use: Callable[[np.ndarray], None]) -> None:
        parts = np.empty((self._size, count), dtype)
        pending: list[Any] = []

        def work() -> bool:
            if not pending:
                own = copy_model.memory_at(source, count, dtype).copy()
                if self._comm is None:
                    parts[:] = own
                pending.append((own, self._comm and self._comm.Iallgather(own.view(np.uint8), parts.view(np.uint8))))
            if pending[0][1] and not pending[0][1].Test():
                return False
            use(parts)
            return True

        self._device.stream_at(stream).work.append(work)


def _combined(parts: np.ndarray, op: int) -> np.ndarray:
    """The rows, reduced. An average as NCCL makes it: each row is divided, in its own dtype, before they are added."""
    if op == AVERAGE:
        parts, op = parts * parts.dtype.type(1 / len(parts)), 0
    result: np.ndarray = parts[0]
    for part in parts[1:]:
        result = _OPERATIONS[op](result, part)
    return result
