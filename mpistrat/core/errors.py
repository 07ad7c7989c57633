"""The exception tree of mpistrat.

::

    MpistratError
    ├── NotInitializedError     (ValueError)   an op or a query before init() or after shutdown()
    ├── SettingsError           (ValueError)   an unknown MPISTRAT_ name, a value out of range, ranks that differ
    ├── MissingDependencyError  (ImportError)  a package or library is needed now; the text has the pip line
    ├── InvalidRequestError     (ValueError)   one rank's own input is wrong; nothing was sent, the job goes on
    │   └── DuplicateNameError                 the name is still in flight on this rank
    ├── LaunchError             (ValueError)   the command line cannot be turned into an mpirun line
    └── CollectiveError         (RuntimeError) the same on every rank that takes part
        ├── MismatchError       (ValueError)   the ranks disagree about a tensor
        ├── ClusterError        (ValueError)   roles, TF_CONFIG or the network do not make a cluster
        ├── RankDiedError                      a rank has died that the others cannot do without
        └── EngineError                        the engine has ended; every pending and later operation fails
            ├── MessageError                   another rank sent something that is no message
            ├── StallError                     ranks waited too long for others
            └── ShutdownError                  a rank ended while others still wait for it

`CollectiveError` reaches every rank with the same text. A `MismatchError` leaves the engine running, unless the tensor
was in a `tf.function`; an `EngineError` does not.
"""


class MpistratError(Exception):
    """Base of everything that mpistrat raises on purpose."""


class NotInitializedError(MpistratError, ValueError):
    """init() has not been called, or shutdown() has."""


class SettingsError(MpistratError, ValueError):
    """A setting is unknown, malformed, out of range, or not the same on all ranks."""


class MissingDependencyError(MpistratError, ImportError):
    """An optional package or a system library is missing; the message says how to install it."""


class InvalidRequestError(MpistratError, ValueError):
    """This rank's arguments are wrong. Raised before anything is sent to other ranks."""


class DuplicateNameError(InvalidRequestError):
    """A collective of this name is still in flight on this rank."""


class LaunchError(MpistratError, ValueError):
    """The launcher cannot make an mpirun command line from what it was given."""


class CollectiveError(MpistratError, RuntimeError):
    """A collective failed; every rank that takes part gets the same text."""


class MismatchError(CollectiveError, ValueError):
    """The ranks disagree about one tensor, which fails on every rank. The engine goes on, except from a tf.function."""


class ClusterError(CollectiveError, ValueError):
    """The ranks cannot form a cluster: roles or TF_CONFIG do not fit, a port is taken, the chief is not reached."""


class RankDiedError(CollectiveError):
    """A process was killed or its host is gone, and the others cannot go on without it."""


class EngineError(CollectiveError):
    """The engine has ended. Every outstanding and every later operation fails with this error."""


class MessageError(EngineError):
    """Another rank sent a message that does not have the form that messages have; names the rank."""


class StallError(EngineError):
    """Some ranks waited longer than `stall_abort_s` for others.

    These never submitted a tensor, or a process is stopped, or the network between the hosts is down.
    """


class ShutdownError(EngineError):
    """A rank has shut down or ended while other ranks still wait for it."""
