"""What backends implement: DataPlane moves arrays, ControlPlane small messages, DeviceExecutor GPU tensors.

All are used by the engine's thread alone, except ControlPlane.wake. Every DataPlane method is collective: the engine
calls it on all ranks in the same order, with arguments on which the ranks have agreed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from .arithmetic import Reduction
from .handle import Entry


class Prepared:
    """An all-reduce that has been begun as far as that is local. The arguments are those of DataPlane.allreduce.

    Attributes:
        is_packed: Whether what the other ranks need of this one is where they find it, once they know that it is.
    """

    __slots__ = ("is_packed", "reduction", "sources", "targets")

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction):
        self.sources, self.targets, self.reduction = sources, targets, reduction
        self.is_packed = False


class DataPlane(ABC):
    """Collectives on C-contiguous arrays in this process's memory; 1-D ones, but for those of allreduce."""

    name: str

    @abstractmethod
    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        """Reduce each of `sources` over all ranks into the one of `targets` of the same place, size and dtype.

        They are C-contiguous, at least one, and all of one dtype; a target may be its own source.

        Every element is combined in the order of the ranks (`arithmetic.combine`), so the result is the same on all
        ranks, and does not depend on where in an array the element lies.
        """

    def prepare(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> Prepared:
        """Begin an all-reduce, and do the little that is local and pays in any case. Local, never waits.

        What is returned may be dropped; for `finish`, it must be the next collective.
        """
        return Prepared(sources, targets, reduction)

    def pack_ahead(self, prepared: Prepared) -> None:
        """Do what else is local, and is not to hold up other ranks. Never waits."""
        return

    def finish(self, prepared: Prepared, all_packed: bool) -> None:
        """Do the rest of an all-reduce.

        Args:
            prepared: What `prepare` has returned.
            all_packed: All ranks have agreed on it knowing that each of them `is_packed`.
        """
        self.allreduce(prepared.sources, prepared.targets, prepared.reduction)

    @abstractmethod
    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `source` in `target`; rank r brings `counts[r]` elements."""

    @abstractmethod
    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        """Overwrite `array` with root_rank's."""

    @property
    def in_use(self) -> str:
        """The name of the plane that reduces now: this one, or one that it passes everything on to."""
        return self.name

    def knobs(self) -> dict[str, tuple[Any, ...]]:
        """What `choose` can choose among, by name; the first value of each is what is used unless told otherwise."""
        return {"backend": (self.name,)}

    def choose(self, choice: Mapping[str, Any]) -> None:
        """Reduce in this way from now on. Collective; other names than those of `knobs` are not for this plane."""
        return

    def abandon(self, is_stalled: bool) -> None:
        """This rank will take part in no more collectives: those that wait for it shall fail, where they can.

        Args:
            is_stalled: Because it has itself waited too long for others.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Release what the backend holds. May be called twice."""


class DeviceExecutor:
    """Executes entries of tensors on a device, which works on them while the caller goes on.

    This class stands for no device: it is never busy, and cannot execute anything.
    """

    @property
    def is_busy(self) -> bool:
        """Whether something is to be polled for."""
        return False

    def patience(self, now: float) -> float:
        """Seconds after which to poll again; 0: at once, though others may run in between."""
        return 0.0

    def execute(self, entries: Sequence[Entry]) -> None:
        """Enqueue the collectives of entries that are the same on all ranks. Collective.

        `poll` completes their handles.
        """
        raise NotImplementedError("there is no device to execute on")

    def poll(self) -> bool:
        """Complete the handles of what the device has done. Returns whether there was any.

        Raises:
            EngineError: The device reports an error, or has taken longer than the limit on stalls.
        """
        return False

    def drain(self) -> None:
        """Wait until all handles are complete. Raises as `poll`."""
        return

    def unfinished(self) -> list[Entry]:
        """The entries that the device has not completed. It may write to their memory even after a failure."""
        return []

    def abandon(self) -> None:
        """Give up what the device has been given: this rank, or another one, has failed. Does not raise."""
        return

    def close(self) -> None:
        """Release communicators and memory, when all ranks have drained. Collective. May be called twice."""
        return


class ControlPlane(ABC):
    """Messages of a few hundred bytes from rank to rank. Messages of one sender arrive in order."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Send without waiting for the receiver."""

    @abstractmethod
    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        """Return when what was sent to `ranks` will arrive without this rank's help.

        It is called before a collective that those ranks must learn of, and by a rank that sends nothing more. It waits
        for room in their queues, so they must be ranks that can go on without this one.

        Args:
            ranks: Receivers.
            limit_s: How long it may take; None: as long as the settings allow.

        Raises:
            StallError: It has taken longer.
        """

    @abstractmethod
    def poll(self) -> list[tuple[int, bytes]]:
        """The messages that have come, as (sender, message). Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        """Return when a message may have come, after wake(), or after `timeout_s`, whichever is first.

        Args:
            timeout_s: Upper limit in seconds. The method may return early.
            spin_s: How long to look again and again before going to sleep.
            quiet_s: How long nothing has happened; who must sleep and look by turns sleeps the longer.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a wait in progress, or the next one, return at once. Any thread may call it; it never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Deliver what was sent, and release what the backend holds. May be called twice."""


class Outcome(IntEnum):
    """Of a vote."""

    REFUSED = 0
    AGREED = 1  # all ranks have voted for the same
    ALL_READY = 2  # likewise, and each of them is ready


class AgreementRound(Protocol):
    """Agreement among the ranks, in rounds (as MPIX_Comm_agree): each rank gives a number in each of them.

    Used by the engine's thread alone.
    """

    has_voted: bool  # whether this rank has voted in this round

    def cast(self, number: int, is_ready: bool = False) -> None:
        """Vote for `number`, 61 bits, or with 0 against all. Once in a round. Ranks that sleep are woken."""

    def outcome(self) -> Outcome | None:
        """Whether all ranks have voted for the same number; None: not all have voted, this rank among them or not.

        An answer ends the round, and is the same on all ranks.
        """

    def has_news(self) -> bool:
        """Whether `outcome` should be called."""

    def missing(self) -> list[int]:
        """The ranks that have not voted in this round, or more, where this one cannot tell."""

    def close(self) -> None:
        """Release what it holds. Collective; no round is under way."""


class LocalChannel(Protocol):
    """Messages among the ranks of one host. Used by the engine's thread alone, except `wake`."""

    @property
    def is_sending(self) -> bool:
        """Whether something waits for room at a receiver."""

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """Whether something waits for room at one of `ranks`."""

    def send(self, rank: int, message: bytes) -> None:
        """Send to a rank of this host. Never blocks."""

    def flush(self) -> None:
        """Send what waits, as far as there is room."""

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come, as (sender, message). Does not wait."""

    def ready(self) -> bool:
        """Whether something has come, or was brought about that is watched for, or `wake` was called, told of once."""

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Let `ready`, and this rank's wait while it is awake, also answer to `has_news()`."""

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Wait until something has come, for at most `timeout_s`, awake for the first `spin_s`. Returns whether."""

    def wake(self) -> None:
        """Make this rank's own wait return. Any thread may call it."""

    def close(self) -> None:
        """Release what it holds."""
