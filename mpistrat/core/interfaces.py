"""Interfaces of the backends: DataPlane for arrays, ControlPlane for messages, DeviceExecutor for GPU tensors.

Observer is all that the engine knows of the trace, which records its operations (trace/).

Only the thread that drives the engine calls them, except `wake`. A DataPlane method is collective unless its docstring
says otherwise: the engine calls it on all ranks in the same order, with arguments on which the ranks have agreed.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence, Sized
from enum import IntEnum
from typing import Any

import numpy as np

from .arithmetic import Reduction
from .errors import EngineError
from .handle import Entry
from .protocols import Array


class RankLeftError(EngineError):
    """Another rank has called DataPlane.abandon. Its message, which names the cause, follows."""


class Prepared:
    """An all-reduce whose local part has begun. The arguments are those of DataPlane.allreduce.

    `is_packed`: This rank's part is in memory that the other ranks can read. They read it without waiting for this rank
    if they know that (`all_packed` in `finish`).
    """

    __slots__ = ("is_packed", "plane", "reduction", "sources", "targets")

    def __init__(self, plane: "DataPlane", sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 reduction: Reduction):
        self.plane, self.sources, self.targets, self.reduction = plane, sources, targets, reduction
        self.is_packed = False

    def pack_ahead(self) -> None:
        """Go on with the local part. Local; never waits."""

    def finish(self, all_packed: bool) -> None:
        """Complete the all-reduce. Collective. `all_packed`: All ranks know that `is_packed` is true on all ranks."""
        self.plane.allreduce(self.sources, self.targets, self.reduction)


class DataPlane(ABC):
    """Collectives on C-contiguous arrays in this process's memory. Arrays are 1-D, except for allreduce."""

    name: str

    @abstractmethod
    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        """Reduce `sources[i]` over all ranks into `targets[i]`, which has the same size and dtype.

        There is at least one source, and all have one dtype. A target may be its own source.

        Each element is combined in the order of the ranks (`arithmetic.combine`). So all ranks have the same bits, and
        an element does not depend on its place in the array.
        """

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        """Begin an all-reduce: the part that is local and short. Local; never waits.

        The result may be dropped. It may be finished if no other collective came in between.
        """
        return Prepared(self, sources, targets, reduction)

    @abstractmethod
    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `source` in `target`. Rank r has `counts[r]` elements."""

    @abstractmethod
    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        """Send rank r the next `sent[r]` elements of `source`, and receive `received[r]` elements from it.

        `target` gets the received elements in the order of the ranks. `largest` is the most elements that any rank
        sends to any rank.
        """

    @abstractmethod
    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of the result to `target`.

        The parts are in the order of the ranks; the part of rank r has `counts[r]` elements. The result has
        the bits of allreduce among the ranks of one host.
        """

    @abstractmethod
    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        """Overwrite `array` with the array of `root_rank`."""

    def measured_choices(self) -> list[str]:
        """Sentences on what this rank has chosen for all ranks by the times of collectives. Local; any thread."""
        return []

    def abandon(self, is_stalled: bool) -> None:
        """Take part in no more collectives. Ranks that wait for this one fail, where the backend can make them. Local.

        `is_stalled`: This rank has itself waited too long for others.
        """
        return

    def revoke(self) -> list[Any]:
        """Give up all resources in the place of `close`, which needs all ranks: some are lost. Local.

        Returns:
            The communicators and requests of MPI, which the caller discards.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class DeviceExecutor:
    """Executes entries of tensors on a device, which works while the caller goes on.

    This base class is for ranks without a device: it is never busy, and cannot execute anything.
    """

    # The entries that are enqueued and not complete. As long as there are any, `poll` must be called.
    batches: Sized = ()
    # Those that are complete while the device still uses their memory. `poll` must be called now and then.
    kept: Sized = ()
    # What was found out about the device before its first collective, for users.
    findings: Sequence[str] = ()

    def execute(self, entries: Sequence[Entry], divisor: int | None = None) -> None:
        """Enqueue the collectives of entries that are the same on all ranks. Collective.

        The handles are complete then, or `poll` completes them.

        An average divides by `divisor`; None: by the number of ranks.
        """
        raise NotImplementedError("there is no device to execute on")

    def uploaded(self, arrays: Sequence[np.ndarray]) -> Sequence[Array]:
        """Copies of arrays on the device, as what an Entry has.

        Raises EngineError: This rank has not used its device yet, or the device has no memory for them.
        """
        raise EngineError("a rank cannot join before the first collective on its GPU: ranks choose the backend for "
                          "GPU tensors together.")

    def poll(self) -> bool:
        """Complete the handles of finished work. Returns whether there was any.

        Raises EngineError: The device reports an error, or has taken longer than the limit on stalls.
        """
        return False

    def await_kept(self) -> None:
        """Wait until the device has done what it had enqueued when a handle was completed. Local; any thread.

        Raises EngineError: The device reports an error, or has taken longer than the limit on stalls.
        """

    def drain(self) -> None:
        """Wait until all handles are complete and no memory is used. Raises as `poll`."""

    def unfinished(self) -> list[Entry]:
        """The entries that are not complete. The device may write to their memory even after a failure."""
        return []

    def halt(self) -> None:
        """Keep enqueued work from memory that is freed when its handles fail, which comes next. Does not raise.

        It takes some seconds at most.
        """

    def abandon(self) -> None:
        """Give up all work: this rank or another one has failed. Does not raise."""

    def close(self) -> None:
        """Release communicators and memory, after all ranks have drained. Collective. May be called twice."""


class ControlPlane(ABC):
    """Messages of a few hundred bytes between ranks. Messages of one sender arrive in order."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Send a message. Does not wait for the receiver."""

    @abstractmethod
    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        """Return when all messages to `ranks` will arrive without further calls on this rank.

        The engine calls it before a collective that those ranks must learn of, and before it ends. The method waits for
        room in the receivers' queues, so the receivers must be able to go on without this rank.

        Args:
            ranks: Receivers.
            limit_s: Limit in seconds; None: the limit of the settings.

        Raises:
            StallError: The limit has passed.
        """

    @abstractmethod
    def is_sending_to(self, ranks: Sequence[int]) -> bool:
        """Whether a message to one of `ranks` waits until it has been sent."""

    @abstractmethod
    def poll(self) -> list[tuple[int, bytes]]:
        """The messages that have arrived, as (sender, message). Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        """Return when a message may have arrived, after wake(), or after `timeout_s`, whichever is first.

        Args:
            timeout_s: Upper limit in seconds. The method may return early.
            spin_s: Seconds to poll before sleeping.
            quiet_s: Seconds since something has happened. Backends that must poll sleep longer in between.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a wait in progress, or the next one, return at once. Any thread may call it. Never blocks."""

    def revoke(self) -> list[Any]:
        """See DataPlane."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Deliver all messages, and release all resources. May be called twice."""


class Observer:
    """Watches an engine: it gets what was executed, and may exchange messages with the observers of the other ranks.

    This base class is for an engine that nobody watches. The messages travel over the control plane of all ranks, along
    the tree of negotiation: from rank 0 to all other ranks, from another rank to rank 0.
    """

    def __init__(self) -> None:
        # What the engine is to send, in order. Any thread may append, and then wakes the engine. The engine sends one
        # after the other, so that the messages of the negotiation need not wait for many of them.
        self.outgoing: deque[bytes] = deque()

    def add(self, entry: Entry, bucket: int, began: int, ended: int) -> None:
        """An entry is complete: its handle has the result. Local; takes a microsecond at most.

        Args:
            bucket: The number of the first entry in the same reduction.
            began: When the reduction began, as time.monotonic_ns(). That of the first one, if the entry has several.
            ended: When it ended. That of the last one.
        """

    def receive(self, message: bytes) -> None:
        """A message has arrived. Called in the thread that drives; returns at once."""

    def fail(self) -> None:
        """The engine ends with an error; what is in flight fails after this. Called as `receive`."""


class Outcome(IntEnum):
    """The outcome of a round of votes."""

    REFUSED = 0
    AGREED = 1  # all ranks have voted for the same
    ALL_READY = 2  # likewise, and each of them is ready


class AgreementRound(ABC):
    """Agreement among all ranks in rounds, like MPIX_Comm_agree: each rank votes for a number in each round."""

    @abstractmethod
    def vote(self, number: int, is_ready: bool = False) -> None:
        """Vote for `number` (61 bits), or against (0). Once in a round. Wakes ranks that sleep."""

    @abstractmethod
    def outcome(self) -> Outcome | None:
        """The outcome of the round, the same on all ranks; None until all ranks have voted. It ends the round."""

    @abstractmethod
    def has_news(self) -> bool:
        """Whether `outcome` may have changed."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The ranks that have not voted in this round, and possibly more, where this rank cannot know."""

    def revoke(self) -> list[Any]:
        """See DataPlane."""
        return []

    def close(self) -> None:
        """Release all resources. Collective; no round is under way."""
        return
