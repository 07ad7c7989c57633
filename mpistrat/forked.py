"""Processes that a rank has started: they are no ranks, and every call that needs one is an error there.

A fork copies the memory of a rank, but neither the engine's thread nor MPI's, and its connections are shared: what the
copy says would count as said by the rank. Ranks and sizes are fields that the copy has, too; a worker that loads data
asks for them to know its shard.

A program that a rank starts has the rank's environment, by which the launcher's MPI would take it for the rank. That
happens by mistake where multiprocessing starts a process afresh ("spawn"), which imports the script once more.
"""

import os
from collections.abc import Mapping, MutableMapping

from . import processes
from .errors import NotInitializedError
from .launch_environment import identity

_TEXT = ("this process was forked from a rank (process {parent}), and is none itself: only the parent can take part in "
         "collectives, init() and shutdown(). Call them there, and hand over what this process needs. A process that "
         "shall share nothing with its parent is started by multiprocessing.get_context('spawn').")
_STARTED = ("this process was started by a rank (process {rank}), and is none itself: only that process can call "
            "init(). If multiprocessing has started it, and so has imported the script once more, put what only the "
            "script itself shall do below: if __name__ == '__main__':")
_NAME = "_MPISTRAT_RANK"  # in the environment of what a rank starts: the rank's process. Not a setting.

_is_rank = False
_parent = 0


def claim(environ: MutableMapping[str, str]) -> None:
    """From now on this process is a rank, and what it starts is none. `environ` is what that inherits."""
    global _is_rank
    _is_rank = True
    environ[_NAME] = str(os.getpid())


def release(environ: MutableMapping[str, str]) -> None:
    """This process is a rank no more, and what it starts may become one."""
    global _is_rank
    _is_rank = False
    environ.pop(_NAME, None)


def is_child() -> bool:
    """Whether this process was forked from a rank."""
    return _parent != 0


def error() -> NotInitializedError:
    """What calls in a forked process raise."""
    return NotInitializedError(_TEXT.format(parent=_parent))


def require_rank() -> None:
    """Raise NotInitializedError in a process that was forked from a rank."""
    if _parent:
        raise error()


def require_own_place(environ: Mapping[str, str]) -> None:
    """Raise NotInitializedError in a process that has its place in the job from a rank that has started it.

    One that mpirun has started, even if a rank has started mpirun, has a place of its own; and without a launcher every
    process may be a rank.
    """
    number = environ.get(_NAME, "")
    own = identity(environ)
    if own and number.isdigit() and int(number) != os.getpid():
        above = any(process.pid == int(number) for process in processes.ancestors(os.getpid()))
        if above and identity(processes.environment_of(int(number)) or {}) == own:
            raise NotInitializedError(_STARTED.format(rank=number))


def _note() -> None:
    global _parent
    if _is_rank and not _parent:
        _parent = os.getppid()


# The first of the package's functions that are called after a fork, since the others import this module.
os.register_at_fork(after_in_child=_note)
