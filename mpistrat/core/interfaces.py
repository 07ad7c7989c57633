"""Interfaces of the backends: DataPlane for arrays, ControlPlane for messages, DeviceExecutor for GPU tensors.

Observer is the engine's interface to the trace, which records operations (trace/). Only the thread that drives the
engine calls the methods, except `wake` and methods for any thread. A DataPlane method is collective unless its
docstring says otherwise: all ranks call it in the same order, with arguments they agreed on.
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
from .request import Array


class RankLeftError(EngineError):
    """Another rank has called DataPlane.abandon. A control message of that rank, which names the cause, follows."""


class Prepared:
    """An all-reduce whose local part has begun. The arguments are those of DataPlane.allreduce."""

    __slots__ = ("is_packed", "plane", "reduction", "sources", "targets")

    def __init__(self, plane: "DataPlane", sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 reduction: Reduction):
        self.plane, self.sources, self.targets, self.reduction = plane, sources, targets, reduction
        # Whether this rank's part is in memory that the other ranks can read. If all ranks know that it is
        # (`all_packed` in `finish`), they read it without waiting for this rank.
        self.is_packed = False

    def pack_ahead(self) -> None:
        """Continue the local part. Local; never waits."""

    def finish(self, all_packed: bool) -> None:
        """Complete the all-reduce. Collective. `all_packed`: All ranks know that `is_packed` is true on all ranks."""
        self.plane.allreduce(self.sources, self.targets, self.reduction)


class DataPlane(ABC):
    """Collectives on C-contiguous arrays in this process's memory. Arrays are 1-D, except for allreduce."""

    name: str

    @abstractmethod
    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        """Reduce `sources[i]` over all ranks into `targets[i]`, which has the same size and dtype.

        There is at least one source, and all sources have the same dtype. `targets[i]` may be `sources[i]` itself.

        Each element is combined in rank order (`arithmetic.combine`). So the results have the same bits on all ranks,
        and the result of an element does not depend on its index in the array.
        """

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        """Begin an all-reduce: only the part that is local and short. Local; never waits.

        The caller may drop the result. It may call `finish` on it only if there was no other collective in between.
        """
        return Prepared(self, sources, targets, reduction)

    @abstractmethod
    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `source` in `target`. Rank r has `counts[r]` elements."""

    @abstractmethod
    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        """Send the next `sent[r]` elements of `source` to rank r, and receive `received[r]` elements from rank r.

        `target` gets the received elements in rank order. `largest` is the largest number in the `sent` of all ranks,
        the same on all ranks.
        """

    @abstractmethod
    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of the result to `target`.

        The parts are in rank order; the part of rank r has `counts[r]` elements. Among the ranks of one host, the
        result has the same bits as that of allreduce.
        """

    @abstractmethod
    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        """Overwrite `array` with the array of `root_rank`."""

    def measured_choices(self) -> list[str]:
        """Return sentences on what this rank has chosen for all ranks from measured times. Local; any thread."""
        return []

    def abandon(self, is_stalled: bool) -> None:
        """Take part in no more collectives. If the backend can, it makes ranks that wait for this rank fail. Local.

        `is_stalled`: Whether this rank itself has waited too long for other ranks.
        """
        return

    def revoke(self) -> list[Any]:
        """Give up all resources after a loss of ranks, instead of `close`, which needs all ranks. Local.

        Returns the communicators and requests of MPI, for the caller to discard.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class DeviceExecutor:
    """Executes entries of tensors on a device, asynchronously.

    This base class is for ranks without a device: it is never busy, and cannot execute anything. Methods raise
    EngineError if the device reports an error, or has taken longer than the stall limit.
    """

    batches: Sized = ()  # The enqueued entries that are not complete. As long as there are any, `poll` must be called.
    kept: Sized = ()  # Complete entries whose memory the device still uses. `poll` must be called now and then.
    findings: Sequence[str] = ()  # Facts about the device that were found before its first collective, for users.

    def execute(self, entries: Sequence[Entry], divisor: int | None = None) -> None:
        """Enqueue the collectives of entries that are the same on all ranks. Collective.

        It completes the handles, or leaves that to `poll`. An average divides by `divisor`; None: by the number of
        ranks.
        """
        raise NotImplementedError("there is no device to execute on")

    def uploaded(self, arrays: Sequence[np.ndarray]) -> Sequence[Array]:
        """Copy arrays to the device, and return the copies in the form for an Entry.

        Raises EngineError: This rank has not used its device yet, or the device has no memory for the copies.
        """
        raise EngineError("join() needs an earlier collective on this rank's GPU: the ranks choose the backend of GPU "
                          "tensors together. Call a collective on GPU tensors on all ranks before join().")

    def poll(self) -> bool:
        """Complete the handles of finished work. Returns whether any work has finished."""
        return False

    def await_kept(self) -> None:
        """Wait until the device has finished all enqueued work of handles that are complete. Local; any thread."""

    def drain(self) -> None:
        """Wait until all handles are complete and the device uses no memory of theirs."""

    def unfinished(self) -> list[Entry]:
        """Return the entries that are not complete. The device may write to their memory even after a failure."""
        return []

    def halt(self) -> None:
        """Stop enqueued work from using memory, before its handles fail. Takes some seconds at most. Never raises."""

    def abandon(self) -> None:
        """Give up all work, because this rank or another rank has failed. Never raises."""

    def close(self) -> None:
        """Release communicators and memory, after all ranks have drained. Collective. May be called twice."""


class ControlPlane(ABC):
    """Messages of a few hundred bytes between ranks. Messages of one sender arrive in order."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Send a message, without waiting for the receiver."""

    @abstractmethod
    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        """Wait until this rank has nothing more to do for its messages to `ranks`, which then arrive by themselves.

        The engine calls it before a collective that these ranks must learn of, and before the engine ends. It waits for
        room in the receivers' queues, so the receivers must be able to make progress without this rank.

        `limit_s`: The longest wait, after which StallError is raised; None: the limit in the settings.
        """

    @abstractmethod
    def is_sending_to(self, ranks: Sequence[int]) -> bool:
        """Return whether any message to `ranks` is still queued on this rank."""

    @abstractmethod
    def poll(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, as (sender, message). Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        """Wait until a message may have arrived, wake() is called, or `timeout_s` has passed. May return early.

        `spin_s`: Seconds to poll before sleeping. `quiet_s`: Seconds without any event so far. Backends that must poll
        use `quiet_s` to sleep longer.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a wait in progress, or the next one, return at once. Any thread may call it. Never blocks."""

    def revoke(self) -> list[Any]:  # See DataPlane.
        return []

    @abstractmethod
    def close(self) -> None:
        """Deliver all messages, and release all resources. May be called twice."""


class Observer:
    """Watches an engine: it gets each executed entry, and may exchange messages with the observers of the other ranks.

    This base class is for an engine that is not watched. The messages travel over the control plane of all ranks, along
    the tree of negotiation: from rank 0 to all other ranks, and from each other rank to rank 0.
    """

    def __init__(self) -> None:
        # The messages for the engine to send, in order. Any thread may append one, and must then wake the engine. The
        # engine sends one at a time, so that messages of the negotiation need not wait for many of them.
        self.outgoing: deque[bytes] = deque()

    def add(self, entry: Entry, bucket: int, began: int, ended: int) -> None:
        """Record an entry that is complete: its handle has the result. Local; takes a microsecond at most.

        `bucket`: The number of the first entry in the same reduction. `began`, `ended`: When the reduction began and
        ended, as time.monotonic_ns(). If the entry has several, when the first one began, and the last one ended.
        """

    def receive(self, message: bytes) -> None:
        """Handle a message that has arrived. Called in the thread that drives the engine; must not block."""

    def fail(self) -> None:
        """Note that the engine ends with an error, before operations in flight fail. Called like `receive`."""


class Outcome(IntEnum):
    """The outcome of a round of votes."""

    REFUSED = 0
    AGREED = 1  # All ranks have voted for the same number.
    ALL_READY = 2  # All ranks have voted for the same number, with `is_ready`.


class AgreementRound(ABC):
    """Agreement among all ranks in rounds, like MPIX_Comm_agree: each rank votes for a number in each round."""

    @abstractmethod
    def vote(self, number: int, is_ready: bool = False) -> None:
        """Vote for `number` (61 bits), or vote against any (0). Once in a round. Wakes ranks that sleep."""

    @abstractmethod
    def outcome(self) -> Outcome | None:
        """Return the outcome of the round, the same on all ranks, and end the round. None if votes are missing."""

    @abstractmethod
    def has_news(self) -> bool:
        """Return whether the result of `outcome` may have changed."""

    @abstractmethod
    def missing(self) -> list[int]:
        """Return the ranks that have not voted in this round. May include ranks whose vote is not known here."""

    def revoke(self) -> list[Any]:  # See DataPlane.
        return []

    def close(self) -> None:
        """Release all resources. Collective; no round is under way."""
        return
