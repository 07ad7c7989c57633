"""The interface of backends for GPU arrays. Like interfaces.DataPlane, but a call only enqueues work on the GPU.

Work is ordered by events: it starts after events of the caller's streams (`wait_for`), and is complete when the events
of `finish` are done. Backends are nccl_data.NcclData and staged.StagedData. Used by the engine's thread; a watchdog's
thread may call `revoke` and `abandon`.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from ..core.arithmetic import Reduction
from ..core.errors import EngineError
from ..core.request import ReduceOp
from .arrays import GpuArray, GpuEvent

# Enqueues an all-reduce of arrays at the addresses of the first list to those of the second one. Collective.
Reducer = Callable[[Sequence[int], Sequence[int]], None]


def await_on_host(event: GpuEvent, limit_s: float) -> None:
    """Wait until `event` is done, and yield the processor to other threads meanwhile.

    Raises EngineError: The event is not done after `limit_s` seconds (0: no limit).
    """
    deadline = time.monotonic() + limit_s if limit_s else float("inf")
    while not event.done:
        if time.monotonic() > deadline:
            raise EngineError(f"a copy between GPU and host is not complete after {limit_s:g} s")
        os.sched_yield()


def last_of_streams(events: list[GpuEvent]) -> list[GpuEvent]:
    """The last event of each stream. Work that waits for these waits for all `events`."""
    if len(events) < 2:  # The usual case.
        return events
    last: dict[Hashable, GpuEvent] = {}
    for event in events:
        known = last.get(event.stream)
        if known is None or known.number < event.number:
            last[event.stream] = event
    return list(last.values())


class GpuBackend(ABC):
    """Collectives on GPU arrays. Used by the engine's thread, within `GpuDevice.current()`.

    The methods up to `alltoall` and `close` are collective. The GPU executes the enqueued work in the order of the
    calls. The work is complete when the events of the next `finish` are done. The last four methods do nothing if the
    host waits for the work.
    """

    @abstractmethod
    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire_dtype: str = "") -> str:
        """Return why the backend cannot all-reduce these arrays; "" if it can. The same on all ranks."""

    @abstractmethod
    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        """Return why the backend cannot reduce-scatter this array; "" if it can. The same on all ranks."""

    @abstractmethod
    def wait_for(self, events: Sequence[GpuEvent]) -> None:
        """Make all work enqueued from now on start after these events. The host does not wait."""

    @abstractmethod
    def reducer(self, arrays: Sequence[GpuArray], reduction: Reduction, wire_dtype: str = "") -> Reducer:
        """Return a function that reduces arrays of these sizes and this dtype. `why_not` must have returned "".

        Floating-point tensors wider than `wire_dtype` may be sent and reduced in that dtype.
        """

    @abstractmethod
    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `source` in `target`. Rank r has `counts[r]` elements."""

    @abstractmethod
    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write root_rank's `sources` to `targets`."""

    @abstractmethod
    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of the result to `target`.

        The parts are in the order of the ranks; the part of rank r has `counts[r]` elements.
        """

    @abstractmethod
    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        """Send rank r the next `sent[r]` elements of `source`, and receive `received[r]` elements from rank r.

        `target` gets the received elements in the order of the ranks. The dtype is the same on all ranks. `largest` is
        the largest number of elements that any rank sends to any rank.
        """

    @abstractmethod
    def finish(self) -> list[GpuEvent]:
        """Return events after all work enqueued since `wait_for`, which comes before each list of collectives."""

    @abstractmethod
    def last_events(self) -> list[GpuEvent]:
        """Events after all work that may use tensors, also after a call has failed. Local."""

    def check(self) -> None:  # noqa: B027
        """Raise the error of enqueued work that has failed, if any. Does not wait."""

    def revoke(self) -> bool:
        """Make a call that waits for other ranks return with an error, and free nothing. Any thread may call it.

        Returns:
            False if only `abandon` makes the call return.
        """
        return True

    def abandon(self) -> None:  # noqa: B027
        """Abort the enqueued work, because a rank has left. May be called twice."""

    def close(self) -> None:  # noqa: B027
        """Release resources. All enqueued work is complete. May be called twice."""
