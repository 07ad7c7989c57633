"""Processes that were forked from a rank: they are no ranks, and every call that needs one is an error there.

A fork copies the memory of a rank, but neither the engine's thread nor MPI's, and its connections are shared: what the
copy says would count as said by the rank. Ranks and sizes are fields that the copy has, too; a worker that loads data
asks for them to know its shard.
"""

import os
from collections.abc import MutableMapping

from .errors import NotInitializedError

_TEXT = ("this process was forked from a rank (process {parent}), and is none itself: only the parent can take part in "
         "collectives, init() and shutdown(). Call them there, and hand over what this process needs. A process that "
         "shall share nothing with its parent is started by multiprocessing.get_context('spawn').")
# In the environment of what a rank starts: the rank's process id. Not a setting.
RANK_PROCESS = "_MPISTRAT_RANK"

_is_rank = False
_parent = 0


def claim(environ: MutableMapping[str, str]) -> None:
    """From now on this process is a rank, and what it starts is none. `environ` is what that inherits."""
    global _is_rank
    _is_rank = True
    environ[RANK_PROCESS] = str(os.getpid())


def release(environ: MutableMapping[str, str]) -> None:
    """This process is a rank no more, and what it starts may become one."""
    global _is_rank
    _is_rank = False
    environ.pop(RANK_PROCESS, None)


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


def _note() -> None:
    global _parent
    if _is_rank and not _parent:
        _parent = os.getppid()


# The first of the package's functions that are called after a fork, since the others import this module.
os.register_at_fork(after_in_child=_note)
