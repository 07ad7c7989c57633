"""The exception tree of mpistrat.

::

    MpistratError
    ├── NotInitializedError     (ValueError)   an op or a query before init() or after shutdown()
    ├── SettingsError           (ValueError)   an unknown MPISTRAT_ name, a value out of range, ranks that disagree
    ├── MissingDependencyError  (ImportError)  a package or library is missing; the text has the pip command
    ├── InvalidRequestError     (ValueError)   a call or its arguments are wrong; no tensor was sent, the job continues
    │   └── DuplicateNameError                 a collective of this name is in flight on this rank
    ├── LaunchError             (ValueError)   the arguments cannot be turned into a command line of mpirun
    ├── RunError                (RuntimeError) a function that run() has called in other processes has failed
    ├── ElasticError            (RuntimeError) an elastic job cannot keep a commit, or has no agent on a host
    ├── RecoveryError           (RuntimeError) the surviving ranks cannot reconnect after a loss of ranks
    └── CollectiveError         (RuntimeError) a collective failed; every rank that takes part raises the same error
        ├── MismatchError       (ValueError)   the ranks disagree on a tensor, weights or steps
        ├── ClusterError        (ValueError)   roles or the network do not fit a cluster
        ├── RankDiedError                      a rank has died, and the others cannot continue
        └── EngineError                        the engine has ended; every pending and later operation fails
            ├── MessageError                   another rank sent an invalid message
            ├── RanksLostError                 ranks have died, or their hosts are lost; the others may recover
            ├── StallError                     ranks waited too long for others
            │   └── DeadlockError              all ranks wait for each other
            └── ShutdownError                  a rank ended while others wait for it

A rank *leaves* if it announces its end, and *dies* if its process ends without an announcement. A host is *lost* if it
is down, or if the link to it is cut. A rank is *lost* if it has died or its host is lost.

A `CollectiveError` has the same text on every rank. The engine continues after a `MismatchError`, unless the tensor was
in a `tf.function`. The engine does not continue after an `EngineError`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# The names that mpistrat exports.
__all__ = [
    "ClusterError", "CollectiveError", "DeadlockError", "DuplicateNameError", "ElasticError", "EngineError",
    "InvalidRequestError", "LaunchError", "MismatchError", "MissingDependencyError", "MpistratError",
    "NotInitializedError", "RankDiedError", "RanksLostError", "RecoveryError", "RunError", "SettingsError",
    "ShutdownError", "StallError",
]


class MpistratError(Exception):
    """Base class of all exceptions that mpistrat raises on purpose."""


class NotInitializedError(MpistratError, ValueError):
    """init() has not been called, or shutdown() has been called after it, or this process was forked from a rank."""


class SettingsError(MpistratError, ValueError):
    """A setting is unknown, malformed, out of range, or not the same on all ranks."""


class MissingDependencyError(MpistratError, ImportError):
    """An optional package or a system library is missing; the message says how to install it."""


class InvalidRequestError(MpistratError, ValueError):
    """A call or its arguments are wrong on this rank. No tensor was sent to other ranks."""


class DuplicateNameError(InvalidRequestError):
    """A collective of this name is in flight on this rank."""


class LaunchError(MpistratError, ValueError):
    """The job cannot be started: an argument of `mpistrat run` or run() is wrong, or there is no usable mpirun."""


class RunError(MpistratError, RuntimeError):
    """The function of run() has raised an exception on a rank, or a rank has ended without a result."""


class ElasticError(MpistratError, RuntimeError):
    """The agent of a host (the process that keeps commits) is unreachable, or a commit cannot be written or read."""


class RecoveryError(MpistratError, RuntimeError):
    """After a loss of ranks, the surviving ranks cannot reconnect. This process must end without MPI_Finalize."""


class CollectiveError(MpistratError, RuntimeError):
    """A collective failed. Every rank that takes part raises the error with the same text."""


class MismatchError(CollectiveError, ValueError):
    """The ranks disagree on a tensor's shape or dtype, or have different weights, steps or callbacks.

    The collective fails on all ranks. The job can continue in eager code, but not after an error in a tf.function.
    """


class ClusterError(CollectiveError, ValueError):
    """The ranks cannot form a cluster: roles do not add up to size(), no port is free, or the chief is unreachable."""


class RankDiedError(CollectiveError):
    """A rank has died, or its host is lost, and the other ranks cannot continue without that rank."""


class EngineError(CollectiveError):
    """The engine has ended. All outstanding and later operations fail with this error."""


class MessageError(EngineError):
    """Another rank sent a malformed message. The text names the rank."""


@dataclass(frozen=True)
class LostRank:
    """A rank that has died, or whose host is lost.

    `rank`: Its number in the job before any recovery. `host`: The name of its host. `how`: How the loss was noticed,
    for example "process 4711 has died".
    """

    rank: int
    host: str
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.how})"


class RanksLostError(EngineError):
    """Ranks have died, or their hosts are lost. On surviving ranks this error ends the engines of all process sets.

    `lost` is a tuple of the lost ranks that this rank knows, possibly empty.
    """

    def __init__(self, lost: Iterable[LostRank] = ()):
        super().__init__(tuple(lost))

    @property
    def lost(self) -> tuple[LostRank, ...]:
        """The lost ranks that this rank knows, in the order in which it noticed their loss."""
        return self.args[0]

    def add(self, lost: Iterable[LostRank]) -> None:
        """Add lost ranks to `self.lost`. Ranks that `self.lost` already has are ignored."""
        known = {each.rank for each in self.lost}
        self.args = ((*self.lost, *(each for each in lost if each.rank not in known)),)

    def __str__(self) -> str:
        who = "; ".join(map(str, self.lost)) or "at least one rank, which other ranks name in their errors"
        return f"Lost: {who}. Collectives of this rank fail until the ranks that are left have reconnected."


class StallError(EngineError):
    """Some ranks waited longer than MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS for other ranks.

    Either the other ranks did not call the collective, or a process is stopped, or the network between hosts is down.
    """


class DeadlockError(StallError):
    """Every rank waits for a collective that some other rank will never call, so no rank can ever continue.

    The ranks detect a deadlock within seconds. Other stalls raise StallError, after a longer time: see StallError.
    """


class ShutdownError(EngineError):
    """A rank has shut down or ended, and other ranks wait for that rank."""
