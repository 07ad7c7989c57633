"""GpuBackend, the interface of the backends for GPU arrays, and StagedData, the backend without NCCL.

The backend with NCCL is in nccl_data.py. GpuBackend is like interfaces.DataPlane, but its methods may only enqueue work
on the GPU. The work starts after the events that `wait_for` gets, and is complete when the events that `finish` returns
are done. The engine's thread calls the methods. The thread of a Watchdog may call `revoke` and `abandon`.
"""

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from ..core.arithmetic import Reduction
from ..core.errors import EngineError
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp
from ..core.tuning import WATCHDOG_LONGEST_SLEEP_S, WATCHDOG_LOOKS, WATCHDOG_REVOKE_S
from .arrays import Allocated, GpuArray, GpuDevice, GpuEvent, GpuTensors

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Enqueues an all-reduce of arrays at the addresses of the first list to those of the second one. Collective.
Reducer = Callable[[Sequence[int], Sequence[int]], None]


def await_on_host(event: GpuEvent, limit_s: float) -> None:
    """Block this thread until `event` is done. The thread yields its core to other threads while it waits.

    Raises EngineError: The event is not done after `limit_s` seconds (0: no limit).
    """
    deadline = time.monotonic() + limit_s if limit_s else float("inf")
    while not event.done:
        if time.monotonic() > deadline:
            raise EngineError(f"a copy between GPU and host is not complete after {limit_s:g} s")
        os.sched_yield()


def last_of_streams(events: list[GpuEvent]) -> list[GpuEvent]:
    """Return the last one of `events` in each stream. Whoever waits for these has waited for all `events`."""
    if len(events) < 2:  # The usual case.
        return events
    last: dict[Hashable, GpuEvent] = {}
    for event in events:
        known = last.get(event.stream)
        if known is None or known.number < event.number:
            last[event.stream] = event
    return list(last.values())


class GpuBackend(ABC):
    """Collectives on GPU arrays. The engine's thread calls the methods, within `GpuDevice.current()`.

    `allgather`, `broadcast`, `reducescatter`, `alltoall`, `close` and the function that `reducer` returns are
    collective. Enqueued work is complete when the events of the next `finish` are done. In a backend whose methods wait
    for the GPU, `check`, `revoke`, `abandon` and `close` do nothing.
    """

    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        """Return why the backend cannot all-reduce these arrays; "" if it can. All ranks get the same result."""
        return ""

    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        """Return why the backend cannot reduce-scatter this array; "" if it can. All ranks get the same result."""
        return ""

    @abstractmethod
    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        """Make all work enqueued from now on start after these events. Called before each list of collectives."""

    @abstractmethod
    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction, wire_dtype: str = "") -> Reducer:
        """Return a function that all-reduces arrays with the sizes and the dtype of `arrays`. First call `why_not`.

        If `wire_dtype` is given, wider floating-point numbers may be sent and reduced as `wire_dtype`.
        """

    @abstractmethod
    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        """Concatenate the `source` of all ranks in `target`, in rank order. Rank r has `counts[r]` elements."""

    @abstractmethod
    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Copy the `sources` of rank `root_rank` to the `targets` of all ranks."""

    @abstractmethod
    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of the result to `target`.

        The parts are in rank order. The part of rank r has `counts[r]` elements.
        """

    @abstractmethod
    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        """Send `sent[r]` elements to each rank r, and receive `received[r]` elements from it.

        `source` and `target` have the elements in the order of the ranks that get or send them. The dtype is the same
        on all ranks. `largest`: The largest number of elements that any rank sends to any rank.
        """

    def finish(self) -> list[GpuEvent]:
        """Return events that follow all work enqueued since `wait_for`; [] if the host has waited for this work."""
        return []

    @abstractmethod
    def last_events(self) -> list[GpuEvent]:
        """Return events that follow all enqueued work. May also be called after a method has raised. Local."""

    def check(self) -> None:  # noqa: B027
        """Raise EngineError if enqueued work has failed. Does not wait."""

    def revoke(self) -> bool:
        """End the wait for other ranks in the engine's thread, but free nothing. Any thread may call this.

        Returns False if this cannot end the wait. In that case, call `abandon`.
        """
        return True

    def abandon(self) -> None:  # noqa: B027
        """Abort all enqueued work, because this rank or another rank has failed. May be called twice, by any thread."""

    def close(self) -> None:  # noqa: B027
        """Release all resources. Call it when all enqueued work is complete. May be called twice."""


# -- a time limit for calls that may block for ever --------------------------------------------------------------------


def within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return `call()`, executed in a new thread; None if it takes longer than `limit_s`. A late call is not stopped."""
    returned: list[T] = []
    thread = threading.Thread(target=lambda: returned.append(call()), name="mpistrat-gpu-ends", daemon=True)
    thread.start()
    thread.join(limit_s)
    return returned[0] if returned else None


class Watchdog:
    """Ends a call of the engine's thread that takes too long, from a separate thread. Does this at most once.

    Each `with watchdog:` block is a guarded call. If it takes too long, the watchdog calls `revoke`. If the guarded
    call still does not return, the watchdog calls `abort`, which frees memory that the guarded call may use.

    Args:
        limit_s: Seconds that a guarded call may take; 0: no limit, and no thread.
        revoke: Makes the guarded call return or raise. Returns False if it cannot. Must not raise.
        abort: Makes the guarded call return or raise, and frees its memory. Must not raise.
        text: The message of the EngineError that a guarded call raises when it took too long.
    """

    def __init__(self, limit_s: float, revoke: Callable[[], bool], abort: Callable[[], None], text: str):
        self._limit_s, self._revoke, self._abort, self._text = limit_s, revoke, abort, text
        self._ended = threading.Event()  # The guarded call that was too long has ended.
        self._since: float | None = None
        self._has_fired = False
        self._lock = threading.Lock()  # of `_since` and `_has_fired`: a call that has ended in time is not aborted
        self._closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._watch, name="mpistrat-gpu-watchdog", daemon=True).start()

    def __enter__(self) -> None:
        """Begin a guarded call. Only one thread at a time may do so."""
        self._since = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End a guarded call. If it took too long, raise EngineError in place of the exception that it raised."""
        with self._lock:
            self._since, has_fired = None, self._has_fired
            if has_fired:
                self._ended.set()
        if has_fired and (error is None or isinstance(error, Exception)):
            raise EngineError(self._text) from error

    def close(self) -> None:
        """End the watchdog's thread. May be called twice, by any thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._limit_s / WATCHDOG_LOOKS, WATCHDOG_LONGEST_SLEEP_S)):
            with self._lock:
                since = self._since
                self._has_fired = since is not None and time.monotonic() - since > self._limit_s
            if self._has_fired:
                logger.debug("%s", self._text)
                if not (within(WATCHDOG_REVOKE_S, self._revoke) and self._ended.wait(WATCHDOG_REVOKE_S)):
                    self._abort()
                return


# -- through the host --------------------------------------------------------------------------------------------------


class StagedData(GpuBackend):
    """A backend that copies arrays to pinned host memory, reduces them there over `host`, and copies the results back.

    It is for ranks that share a GPU, for hosts without NCCL, and for tensors that NCCL cannot reduce. Each call waits
    for the GPU and for the other ranks. Tensors are sent in their own dtype.

    Args:
        host: The data plane for CPU tensors of the same ranks. StagedData does not close it.
        limit_s: Seconds after which a copy between host and GPU fails; 0: never.
    """

    def __init__(self, device: GpuDevice, rank: int, host: DataPlane, limit_s: float):
        self._device, self._rank, self._host, self._limit_s = device, rank, host, limit_s
        self._stream = device.stream()
        self._events: list[GpuEvent] = []  # that the next copy waits for

    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        self._events = list(events)

    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction, wire_dtype: str = "") -> Reducer:
        kinds = [(array.nbytes, array.dtype) for array in arrays]

        def reduce(sources: Sequence[int], targets: Sequence[int]) -> None:
            fetched = [self.fetched(source, nbytes).view(dtype)
                       for source, (nbytes, dtype) in zip(sources, kinds, strict=True)]
            self._host.allreduce(fetched, fetched, reduction)
            for result, target in zip(fetched, targets, strict=True):
                self._copy_back(result, target)

        return reduce

    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            own = self.fetched(source.address, source.nbytes)
            self._host.broadcast(own, root_rank)
            self._copy_back(own, target.address)

    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        own, gathered = self.fetched(source.address, source.nbytes), self._device.pinned(target.nbytes)
        self._host.allgather(own, gathered, [count * source.dtype.itemsize for count in counts])
        self._copy_back(gathered, target.address)

    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        reduced = self.fetched(source.address, source.nbytes).view(source.dtype)
        self._host.allreduce([reduced], [reduced], reduction)
        first = sum(counts[:self._rank])
        self._copy_back(reduced[first:first + counts[self._rank]].view(np.uint8), target.address)

    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        itemsize, received_bytes = source.dtype.itemsize, self._device.pinned(target.nbytes)
        # `source` may have more rows than are sent.
        own = self.fetched(source.address, source.nbytes)[:sum(sent) * itemsize]
        self._host.alltoall(own, received_bytes, [count * itemsize for count in sent],
                            [count * itemsize for count in received], largest * itemsize)
        self._copy_back(received_bytes, target.address)

    def last_events(self) -> list[GpuEvent]:
        return [self._device.record(self._stream)]  # The host may have given up.

    def uploaded(self, arrays: Sequence[np.ndarray]) -> GpuTensors:
        """Return GPU copies of arrays that a rank in join() gives to a collective. Local. Waits for the GPU.

        Raises EngineError: The GPU does not have enough memory.
        """
        dtypes = [array.dtype for array in arrays]

        def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
            made: list[GpuArray] = []
            for shape, dtype in zip(shapes, dtypes, strict=True):
                nbytes = math.prod(shape) * dtype.itemsize
                memory = self._device.scratch(max(nbytes, 1))
                if memory is None:
                    raise EngineError(f"the GPU has no memory for {nbytes} bytes, which this rank needs for the "
                                      "collectives of other ranks while it waits in join().")
                made.append(memory)
            # Nothing else uses the memory, and it is freed when the collective is done.
            return Allocated([each.address for each in made], made, None)

        shapes = [array.shape for array in arrays]
        inputs = allocate(shapes)
        for array, address in zip(arrays, inputs.addresses, strict=True):
            staged = self._device.pinned(array.nbytes)
            staged[:] = array.reshape(-1).view(np.uint8)
            self._copy_back(staged, address)
        return GpuTensors(self._device, inputs.addresses, shapes, dtypes, inputs.results, (), (), allocate)

    def fetched(self, source: int, nbytes: int) -> np.ndarray:
        """Return a copy, in pinned memory, of `nbytes` bytes at the GPU address `source`. Waits for the GPU."""
        while self._events:
            self._device.wait(self._stream, self._events.pop())
        own = self._device.pinned(nbytes)
        self._device.copy(own.ctypes.data, source, nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
        return own

    def _copy_back(self, result: np.ndarray, target: int) -> None:
        """Copy `result` to the GPU address `target`. Waits for the GPU, so the caller may then free `result`."""
        self._device.copy(target, result.ctypes.data, result.nbytes, self._stream)
        await_on_host(self._device.record(self._stream), self._limit_s)
