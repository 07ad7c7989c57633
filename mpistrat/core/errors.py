"""The exception tree of mpistrat.

::

    MpistratError
    ├── NotInitializedError     (ValueError)   an op or a query before init() or after shutdown()
    ├── SettingsError           (ValueError)   an unknown MPISTRAT_ name, a value out of range, ranks that differ
    ├── MissingDependencyError  (ImportError)  a package or library is needed; the text has the pip line
    ├── InvalidRequestError     (ValueError)   one rank's own input is wrong; nothing was sent, the job continues
    │   └── DuplicateNameError                 a collective of this name is in flight on this rank
    ├── LaunchError             (ValueError)   the command line cannot be turned into an mpirun line
    ├── RunError                (RuntimeError) a function that run() has called on other processes has failed
    ├── ElasticError            (RuntimeError) an elastic job cannot keep a commit, or has no agent on a host
    ├── RecoveryError           (RuntimeError) the ranks that are left after a loss cannot go on in their processes
    └── CollectiveError         (RuntimeError) the same on every rank that takes part
        ├── MismatchError       (ValueError)   the ranks disagree on a tensor, weights or steps
        ├── ClusterError        (ValueError)   roles or the network do not fit a cluster
        ├── RankDiedError                      a rank has died, and the others cannot continue
        └── EngineError                        the engine has ended; every pending and later operation fails
            ├── MessageError                   another rank sent an invalid message
            ├── RanksLostError                 ranks have died, or their hosts are lost; the others may recover
            ├── StallError                     ranks waited too long for others
            │   └── DeadlockError              all ranks wait for each other
            └── ShutdownError                  a rank ended while others wait for it

Three words for an end: a rank *leaves* when it says so before, and *dies* when its process ends otherwise; a *host is
lost* when it is down, or the link to it is cut. Ranks that have died or were on a lost host are *lost*.

A `CollectiveError` is raised on every rank with the same text. After a `MismatchError` the engine goes on, unless the
tensor was in a `tf.function`. After an `EngineError` it does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass


class MpistratError(Exception):
    """Base class of all exceptions that mpistrat raises on purpose."""


class NotInitializedError(MpistratError, ValueError):
    """init() has not been called, or shutdown() has been called since."""


class SettingsError(MpistratError, ValueError):
    """A setting is unknown, malformed, out of range, or not the same on all ranks."""


class MissingDependencyError(MpistratError, ImportError):
    """An optional package or a system library is missing; the message says how to install it."""


class InvalidRequestError(MpistratError, ValueError):
    """This rank's arguments are wrong. Raised before anything is sent to other ranks."""


class DuplicateNameError(InvalidRequestError):
    """A collective of this name is in flight on this rank."""


class LaunchError(MpistratError, ValueError):
    """The arguments of the launcher cannot become a command line of mpirun."""


class RunError(MpistratError, RuntimeError):
    """The function of run() has raised an exception on a rank, or a rank has ended without a result."""


class ElasticError(MpistratError, RuntimeError):
    """A rank of an elastic job has no agent, or a commit cannot be written or read."""


class RecoveryError(MpistratError, RuntimeError):
    """The ranks that are left after a loss cannot connect anew. This process has to end, without MPI_Finalize."""


class CollectiveError(MpistratError, RuntimeError):
    """A collective failed. Every rank that takes part raises it with the same text."""


class MismatchError(CollectiveError, ValueError):
    """The ranks disagree on a tensor's shape or dtype, or have different weights, steps or callbacks.

    The collective fails on all ranks. The job can go on in eager code, and cannot in a tf.function.
    """


class ClusterError(CollectiveError, ValueError):
    """The ranks cannot form a cluster: roles do not fit, there is no free port, or the chief is unreachable."""


class RankDiedError(CollectiveError):
    """A rank has died, or its host is lost, and the others cannot continue without it."""


class EngineError(CollectiveError):
    """The engine has ended. All outstanding and later operations fail with this error."""


class MessageError(EngineError):
    """Another rank sent a malformed message. Names the rank."""


@dataclass(frozen=True)
class LostRank:
    """A rank that has died, or whose host is lost.

    Attributes:
        rank: Its rank in the job, before any recovery.
        host: The name of its host.
        how: How it was noticed: "process 4711 has died".
    """

    rank: int
    host: str
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.how})"


class RanksLostError(EngineError):
    """Ranks have died, or their hosts are lost. On each rank that is left, all its engines end with this error.

    Args:
        lost: The ranks; () if this rank does not know which.
    """

    def __init__(self, lost: Iterable[LostRank] = ()):
        super().__init__(tuple(lost))

    @property
    def lost(self) -> tuple[LostRank, ...]:
        """The lost ranks that this rank knows of, in the order in which it has learnt of them."""
        return self.args[0]

    def add(self, lost: Iterable[LostRank]) -> None:
        """Add ranks that are not known to be lost."""
        known = {each.rank for each in self.lost}
        self.args = ((*self.lost, *(each for each in lost if each.rank not in known)),)

    def __str__(self) -> str:
        who = "; ".join(map(str, self.lost)) or "a rank that another rank knows of"
        return f"Lost: {who}. No collective among the ranks that there were can be completed any more."


class StallError(EngineError):
    """Some ranks waited longer than MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS for others.

    The other ranks did not submit a tensor, or a process is stopped, or the network between the hosts is down.
    """


class DeadlockError(StallError):
    """Every rank waits for a collective that another rank cannot reach, so that no rank can ever go on.

    The ranks find a deadlock within seconds; StallError comes after its limit.
    """


class ShutdownError(EngineError):
    """A rank has shut down or ended while other ranks wait for it."""
