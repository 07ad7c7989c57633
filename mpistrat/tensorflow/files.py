"""Files under a strategy: one rank writes a file for all ranks, and all ranks wait until the file exists.

All ranks call `write_once`, and the chief (rank 0) writes. Then the ranks exchange their paths and errors. So an error
on one rank is raised on all ranks, even if they have called different functions of this module. If ranks have passed a
path that is not the chief's, one of them writes that file. If a host does not see the chief's file, one of its ranks
writes the file there. So hosts need no common file system, but each host must find the file under the same path.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from ..api import array_ops, runtime
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import CollectiveError, ShutdownError
from .bridge import names

T = TypeVar("T")


@dataclass(frozen=True)
class FileStatus:
    """What one rank reports to the other ranks about a file."""

    path: str = ""  # The absolute path of the file; "" without a file.
    # The error of this rank: errno or None, whether it is an OSError, and the text.
    error: tuple[int | None, bool, str] | None = None
    # Time of change and size of the file, as this rank sees it; None if there is no file.
    stamp: tuple[int, int] | None = None
    value: Any = None  # Anything else to send to the other ranks.


class _State(threading.local):
    def __init__(self) -> None:
        self.alone = False
        self.known: dict[Hashable, tf.Tensor] = {}


_state = _State()


def in_alone() -> bool:
    return _state.alone


def is_alone() -> bool:
    """Return whether this thread writes without the other ranks: in the context `alone`, or in a job of one rank."""
    return _state.alone or not runtime.is_initialized() or runtime.current().topology.size == 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which one rank works without the other ranks. In it the strategy calls no collectives.

    write_once calls its function and returns. New variables get this rank's initial value. A variable that is
    aggregated over the ranks when it is read has the value that was passed to `known`, or else this rank's value.
    Everything else that would wait for other ranks is an error.
    """
    before, _state.alone = _state.alone, True
    try:
        yield
    finally:
        _state.alone = before


@contextlib.contextmanager
def known(values: dict[Hashable, tf.Tensor]) -> Iterator[None]:
    """A context, within `alone`, in which reading a variable returns its value in `values`. Keys: variable.ref()."""
    before, _state.known = _state.known, values
    try:
        yield
    finally:
        _state.known = before


def known_value(variable: tf.Variable) -> tf.Tensor | None:
    """Return the value that was passed to `known` for a variable, or None."""
    return _state.known.get(variable.ref())


def write_once(path: str, write: Callable[[], object], prepare: Callable[[int], object] | None = None) -> None:
    """Call `write` on the chief, and then on each other rank that must write the file too. Collective.

    `write` itself must not be collective. All ranks call `prepare(r)`, which may be collective, before rank r writes.

    Raises:
        OSError: On every rank, if a rank could not write.
        CollectiveError: On the other ranks, if `write` has raised an error other than OSError on one rank.
    """
    if is_alone():
        write()
        return
    topology = runtime.current().topology
    own = path if "://" in path else os.path.abspath(path)
    if prepare is not None and exchange_status() is not None:
        prepare(0)
    _, error = attempt(write) if topology.rank == 0 else (None, None)
    statuses = exchange_status(error, own)
    if statuses is not None and (len(topology.hosts) > 1 or any(status.path != own for status in statuses)):
        writes = writes_too(topology.rank, [status.path for status in statuses], topology.local_ranks,
                            statuses[0].stamp == _stamp(own))
        writers = [topology.rank] if writes else []
        if prepare is not None:
            writers = [rank for rank, status in enumerate(exchange_status(value=writes) or ()) if status.value]
        error = None
        for rank in writers:
            if prepare is not None:
                prepare(rank)
            if rank == topology.rank:
                _, error = attempt(write)
        exchange_status(error, own)


def writes_too(rank: int, paths: Sequence[str], local_ranks: Sequence[int], sees_file: bool) -> bool:
    """Return whether `rank` must write after the chief. `paths`: The paths of all ranks.

    `local_ranks`: All ranks on the host of `rank`. `sees_file`: Whether `rank` sees the file as the chief has written
    it; ignored if the path of `rank` is not the chief's.
    """
    if rank == 0:
        return False
    if paths[rank] != paths[0]:
        return paths.index(paths[rank]) == rank
    return not sees_file and 0 not in local_ranks and \
        rank == min(other for other in local_ranks if paths[other] == paths[0])


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call `action` in the context `alone`. Return (result, None), or (None, error) for the caller to raise later."""
    try:
        with alone():
            return action(), None
    except Exception as error:
        return None, error


def exchange_status(error: Exception | None = None, path: str = "", value: object = None, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> list[FileStatus] | None:
    """Return what each rank reports about a file; None if the other ranks have ended. Collective.

    This rank reports `error`, `path` and `value`. `name`: The name of the collective; default: "strategy/files".

    Raises:
        Exception: `error`, if it is not None.
        OSError, CollectiveError: Another rank reports an error.
    """
    described = None if error is None else (
        getattr(error, "errno", None), isinstance(error, OSError), f"{type(error).__name__}: {error}")
    own = FileStatus(path, described, _stamp(path) if path else None, value)
    try:
        statuses = array_ops.allgather_object(own, name or names.eager("strategy/files"), process_set)
    except ShutdownError:
        # Usual at the end of a script: the chief saves the model, and the other ranks have nothing left to do.
        if error is not None:
            raise error from None
        return None
    if error is not None:
        raise error
    for rank, other in zip(process_set.group("files").topology.job_ranks, statuses, strict=True):
        if other.error is not None:
            number, is_os_error, text = other.error
            text = f"rank {rank}: {text}"
            raise (OSError(number, text) if number else OSError(text)) if is_os_error else CollectiveError(text)
    return statuses


def _stamp(path: str) -> tuple[int, int] | None:
    """Return a file's modification time and size; None if it is missing. For a URL (0, 0), because all ranks see it."""
    if "://" in path:
        return 0, 0
    try:
        # Opening a file makes network file systems query the server instead of their cache.
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_mtime_ns, found.st_size
