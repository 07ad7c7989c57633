"""Makes collectives and init() raise an error in processes that were forked from a rank.

A forked process has a copy of the rank's memory, but no threads of the engine or MPI. It shares the rank's connections,
so its messages would look like messages of the rank. `rank()` and `size()` still work: they only read fields, and data
loading workers need them to choose a shard. Any thread may call the functions of this module.
"""

import os
from collections.abc import MutableMapping

from .errors import NotInitializedError

_TEXT = ("this process was forked from a rank (process {parent}), and is not a rank itself: only the parent can call "
         "collectives and init(). Call them in the parent, and pass the results to this process. To start "
         "a process that shares nothing with its parent, use multiprocessing.get_context('spawn').")
# An environment variable in the processes that a rank starts, with the process id of the rank. Not a setting.
RANK_PROCESS = "_MPISTRAT_RANK"

_is_rank = False
_parent = 0


def claim(environ: MutableMapping[str, str]) -> None:
    """Mark this process as a rank, also in `environ`, which child processes inherit."""
    global _is_rank
    _is_rank = True
    environ[RANK_PROCESS] = str(os.getpid())


def release(environ: MutableMapping[str, str]) -> None:
    """Undo `claim`: child processes started from now on may become ranks."""
    global _is_rank
    _is_rank = False
    environ.pop(RANK_PROCESS, None)


def is_child() -> bool:
    return _parent != 0


def error() -> NotInitializedError:
    return NotInitializedError(_TEXT.format(parent=_parent))


def require_rank() -> None:
    """Raise NotInitializedError in a process that was forked from a rank."""
    if _parent:
        raise error()


def _note() -> None:
    global _parent
    if _is_rank and not _parent:
        _parent = os.getppid()


# Runs before the other after-fork functions of the package, whose modules import this module.
os.register_at_fork(after_in_child=_note)
