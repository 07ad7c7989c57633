"""The interface of what moves GPU arrays among ranks: as collectives.base.DataPlane, but it enqueues and returns."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.arithmetic import Reduction
from ..core.errors import EngineError
from ..core.request import ReduceOp
from .arrays import GpuArray


@dataclass
class Completion:
    """Work that was given to the GPU.

    Attributes:
        events: Are all done when the work is.
        kept: Memory that it uses until then.
    """

    events: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the work is complete. Does not wait."""
        return all(event.done for event in self.events)


def await_on_host(event: Any, limit_s: float) -> None:
    """Wait until the GPU has come to `event`, giving way to other threads.

    Raises:
        EngineError: It has not, after `limit_s` (0: for ever).
    """
    until = time.monotonic() + limit_s if limit_s else float("inf")
    while not event.done:
        if time.monotonic() > until:
            raise EngineError(f"a copy between GPU and host is not complete after {limit_s:g} s")
        os.sched_yield()


class GpuBackend(ABC):
    """Collectives on GPU arrays. Used by the thread that drives the engine, with this rank's GPU as the current one.

    Every method but `finish`, `check` and `abandon` is collective. What they enqueue runs in the order of the calls,
    and is complete when the Completion of the next `finish` is done.
    """

    @abstractmethod
    def why_not(self, arrays: Sequence[GpuArray], op: ReduceOp, wire: str = "") -> str:
        """Why it cannot all-reduce these arrays; "" if it can. The same on all ranks. For `wire` see `allreduce`."""

    @abstractmethod
    def why_not_scatter(self, source: GpuArray, reduction: Reduction) -> str:
        """Why it cannot reduce and scatter this array; "" if it can. The same on all ranks."""

    @abstractmethod
    def wait_for(self, events: Iterable[Any]) -> None:
        """Let what is enqueued from now on begin after these events. The host does not wait."""

    @abstractmethod
    def allreduce(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], reduction: Reduction,
                  wire: str = "") -> None:
        """Reduce each of `sources` over all ranks into the one of `targets` of the same place. As DataPlane's.

        Wider floating-point tensors may travel, and be reduced, in the dtype `wire`.
        """

    @abstractmethod
    def allgather(self, source: GpuArray, target: GpuArray, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `source` in `target`; rank r brings `counts[r]` elements."""

    @abstractmethod
    def broadcast(self, sources: Sequence[GpuArray], targets: Sequence[GpuArray], root_rank: int) -> None:
        """Write root_rank's `sources` to `targets`."""

    @abstractmethod
    def reducescatter(self, source: GpuArray, target: GpuArray, counts: Sequence[int], reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of it to `target`.

        The parts follow each other in the order of the ranks, and rank r's has `counts[r]` elements. The reduction as
        in allreduce.
        """

    @abstractmethod
    def alltoall(self, source: GpuArray, target: GpuArray, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send each rank r the next `sent[r]` elements of `source`, and put what comes into `target` in their order.

        `received[r]` elements come from rank r, which are as many as it sends this one; dtypes are the same.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Let what is enqueued until the next `finish` be complete only when all ranks have come so far."""

    @abstractmethod
    def finish(self) -> Completion:
        """What tells when everything enqueued since the last call is complete."""

    @abstractmethod
    def check(self) -> None:
        """Raise what has gone wrong since it was enqueued, if anything has. Does not wait."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up what is enqueued: a rank takes part no more. May be called twice."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds, when all that was enqueued is complete. May be called twice."""
