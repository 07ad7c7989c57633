"""Interfaces of the backends: DataPlane for arrays, ControlPlane for messages, DeviceExecutor for GPU tensors.

Observer is the engine's interface to the trace, which records operations (trace/). Only the thread that drives the
engine calls these methods, unless a docstring allows any thread. A DataPlane method is collective unless its docstring
says otherwise: all ranks call it in the same order, with arguments they agreed on.
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
    """Another rank has called DataPlane.abandon. That rank also sends a control message, which names the cause."""


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
        """Continue to pack this rank's part of the data. Local; never waits."""

    def finish(self, all_packed: bool) -> None:
        """Complete the all-reduce. Collective. `all_packed`: Every rank has packed its part, and all ranks know it."""
        self.plane.allreduce(self.sources, self.targets, self.reduction)


class DataPlane(ABC):
    """Collectives on C-contiguous numpy arrays. The arrays are 1-D in all collectives except allreduce."""

    name: str

    @abstractmethod
    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        """Reduce `sources[i]` over all ranks into `targets[i]`, which has the same size and dtype.

        There is at least one source, and all sources have the same dtype. `targets[i]` may be `sources[i]` itself.

        The values of the ranks are combined in a fixed order (`arithmetic.combine`), so the results have the same bits
        on all ranks. Unless `reduction` is quantised, the result of an element does not depend on its index.
        """

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        """Do the short first part of an all-reduce. Prepared.finish does the rest. Local; never waits.

        The caller may discard the result, and must do so if another collective runs before `finish`.
        """
        return Prepared(self, sources, targets, reduction)

    @abstractmethod
    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """Write the `source` of every rank to `target`, in rank order. Rank r has `counts[r]` elements."""

    @abstractmethod
    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        """Send `sent[r]` elements of `source` to each rank r, and write `received[r]` elements from rank r to `target`.

        `source` and `target` are in rank order. `largest` is the largest number in the `sent` lists of all ranks. All
        ranks pass the same `largest`.
        """

    @abstractmethod
    def reducescatter(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int],
                      reduction: Reduction) -> None:
        """Reduce `source` over all ranks, and write this rank's part of the result to `target`.

        The parts are in rank order; the part of rank r has `counts[r]` elements. If all ranks are on one host, the
        result has the same bits as the result of allreduce.
        """

    @abstractmethod
    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        """Overwrite `array` with the array of `root_rank`."""

    def measured_choices(self) -> list[str]:
        """Return sentences on what this rank has chosen by measuring, for example chunk sizes. Local; any thread."""
        return []

    def abandon(self, is_stalled: bool) -> None:
        """Leave all collectives. Other ranks that wait for this rank get an error, if the backend can tell them. Local.

        `is_stalled`: Whether this rank leaves because it has waited too long for other ranks.
        """
        return

    def revoke(self) -> list[Any]:
        """Give up all resources after a loss of ranks, when `close` is impossible because it needs all ranks. Local.

        Returns the communicators and requests of MPI, for the caller to discard.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class DeviceExecutor:
    """Executes the entries whose tensors are on a device, asynchronously.

    This base class is for ranks without a device: it cannot execute anything. Methods raise EngineError if the device
    reports an error, or has taken longer than the stall limit.
    """

    batches: Sized = ()  # The enqueued entries that are not complete. As long as there are any, `poll` must be called.
    kept: Sized = ()  # Complete entries whose memory the device still uses. `poll` must be called now and then.
    findings: Sequence[str] = ()  # Facts about the device that were found before its first collective, for users.

    def execute(self, entries: Sequence[Entry], divisor: int | None = None) -> None:
        """Enqueue the collectives of `entries`, which are the same on all ranks. Collective.

        Handles may be complete on return; `poll` completes the others. An average divides by `divisor`; None: by the
        number of ranks.
        """
        raise NotImplementedError("there is no device to execute on")

    def uploaded(self, arrays: Sequence[np.ndarray]) -> Sequence[Array]:
        """Copy arrays to the device. Return the copies, from which the caller makes an Entry.

        Raises EngineError: This rank has not used its device yet, or the device has no memory for the copies.
        """
        raise EngineError("this rank waits in join() and has not used its GPU yet, but all ranks together must choose "
                          "the backend of GPU tensors. Call a collective on GPU tensors on all ranks before join().")

    def poll(self) -> bool:
        """Complete the handles of the work that the device has finished. Returns whether there was such work."""
        return False

    def await_kept(self) -> None:
        """Wait for the work that the device had not finished when its handle was completed. Local; any thread."""

    def drain(self) -> None:
        """Wait until all handles are complete, and the device no longer uses the memory of their tensors."""

    def unfinished(self) -> list[Entry]:
        """Return the entries that are not finished. The device may write to their memory even after a failure."""
        return []

    def halt(self) -> None:
        """Before handles fail, make memory of unfinished work safe to reuse. Takes seconds at most. Never raises."""

    def abandon(self) -> None:
        """Give up all work, because this rank or another rank has failed. Never raises."""

    def close(self) -> None:
        """Release communicators and memory, after all ranks have called `drain`. Collective. May be called twice."""


class ControlPlane(ABC):
    """Messages of a few hundred bytes between ranks. Messages of one sender arrive in order."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Send a message, without waiting for the receiver."""

    @abstractmethod
    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        """Wait until all messages to `ranks` will arrive even if this rank makes no further calls.

        The engine flushes before a collective that the messages announce to `ranks`, and before the engine ends. A
        flush waits for room in the receivers' queues, so the receivers must be able to make progress without this rank.

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

        `spin_s`: Seconds to poll before sleeping. `quiet_s`: For how many seconds the engine has had nothing to do. A
        backend that must poll sleeps longer between polls if `quiet_s` is larger.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return at once: the call in progress, or else the next. Any thread may call it. Never blocks."""

    def revoke(self) -> list[Any]:  # See DataPlane.
        return []

    @abstractmethod
    def close(self) -> None:
        """Deliver all messages, and release all resources. May be called twice."""


class Observer:
    """Watches an engine: it gets each executed entry, and may exchange messages with the observers of the other ranks.

    This base class ignores everything. The engines carry the messages along the tree of negotiation. A message of rank
    0 goes to all other ranks, and a message of another rank goes to rank 0.
    """

    def __init__(self) -> None:
        # The messages for the engine to send, in order. Any thread may append one, and must then wake the engine. The
        # engine sends one at a time, so that messages of the negotiation need not wait for many of them.
        self.outgoing: deque[bytes] = deque()

    def add(self, entry: Entry, bucket: int, began: int, ended: int) -> None:
        """Record an entry whose handle has its result. Local; takes a microsecond at most.

        `bucket`: The Entry.number of the first entry in the same reduction. `began`: When the entry's first reduction
        began. `ended`: When its last reduction ended. An entry may have several. Both times are time.monotonic_ns().
        """

    def receive(self, message: bytes) -> None:
        """Handle a message of another rank's observer. Called in the thread that drives the engine; must not block."""

    def fail(self) -> None:
        """Note that the engine ends with an error. Called like `receive`, before operations in flight fail."""


class Outcome(IntEnum):
    """The outcome of an AgreementRound. ALL_READY: All ranks have voted for the same number, with `is_ready` true."""

    REFUSED = 0
    AGREED = 1  # All ranks have voted for the same number.
    ALL_READY = 2  # All ranks have voted for the same number, with `is_ready`.


class AgreementRound(ABC):
    """Agreement of all ranks on a number, in rounds, like MPIX_Comm_agree: each rank votes once in each round."""

    @abstractmethod
    def vote(self, number: int, is_ready: bool = False) -> None:
        """Vote for `number` (61 bits); 0 refuses to agree. Wakes ranks. `is_ready`: This rank's data is packed."""

    @abstractmethod
    def outcome(self) -> Outcome | None:
        """Return the outcome of the round, equal on all ranks, and end the round. None: a rank has not voted yet."""

    @abstractmethod
    def has_news(self) -> bool:
        """Return whether `outcome` should be called, because votes have arrived."""

    @abstractmethod
    def missing(self) -> list[int]:
        """Return the ranks that have not voted in this round, as far as this rank knows."""

    def revoke(self) -> list[Any]:  # See DataPlane.
        return []

    def close(self) -> None:
        """Release all resources. Collective. No round may be in progress."""
        return
