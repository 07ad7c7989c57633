"""Files under a strategy: a file that all ranks write is written once, and all ranks wait until the file exists.

All ranks call `write_once`, and the chief writes. Then the ranks exchange their paths and errors, so that an error is
raised on all ranks, whichever of these functions they have called. Ranks that name a different path write that file
themselves. On each host that does not see the chief's file, one rank writes it too: hosts need no common file system,
as long as each host finds the file under the same path.
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
    """The status of a file on one rank."""

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
    """Whether this thread writes without the other ranks: inside `alone`, or because there is one rank."""
    return _state.alone or not runtime.is_initialized() or runtime.current().topology.size == 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context for work of one rank without the others: nothing in it is a collective of the strategy.

    write_once only calls its function, and new variables get this rank's initial value. A variable that is aggregated
    when it is read has the value that was passed to `known`, or else this rank's value. Anything else that would wait
    for the other ranks is an error.
    """
    before, _state.alone = _state.alone, True
    try:
        yield
    finally:
        _state.alone = before


@contextlib.contextmanager
def known(values: dict[Hashable, tf.Tensor]) -> Iterator[None]:
    """A context in which `alone` code reads these values of variables, by their ref(), instead of aggregating."""
    before, _state.known = _state.known, values
    try:
        yield
    finally:
        _state.known = before


def known_value(variable: tf.Variable) -> tf.Tensor | None:
    """The value that `known` was given for a variable, or None."""
    return _state.known.get(variable.ref())


def write_once(path: str, write: Callable[[], object], prepare: Callable[[int], object] | None = None) -> None:
    """Call `write`, which must not be collective, on the chief, and on each other rank that must write. Collective.

    `prepare` is called with a rank on all ranks, before that rank writes, and may be collective.

    Raises:
        OSError: On every rank, if a rank could not write.
        CollectiveError: On the other ranks, if `write` has raised another error on a rank.
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
    """Whether a rank writes after the chief has, given every rank's path and the ranks of its host.

    `sees_file` is for ranks with the chief's path: whether they see the file as the chief has written it.
    """
    if rank == 0:
        return False
    if paths[rank] != paths[0]:
        return paths.index(paths[rank]) == rank
    return not sees_file and 0 not in local_ranks and \
        rank == min(other for other in local_ranks if paths[other] == paths[0])


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call `action` in `alone`. Returns its result and its error; raise the error when the other ranks know of it."""
    try:
        with alone():
            return action(), None
    except Exception as error:
        return None, error


def exchange_status(error: Exception | None = None, path: str = "", value: object = None, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> list[FileStatus] | None:
    """Return every rank's status of a file; None where the other ranks have ended. Collective.

    `error`, `path` and `value` are this rank's. `name` is that of the collective; None: the name for files of a
    strategy.

    Raises:
        Exception: `error`, if that is not None.
        OSError, CollectiveError: Another rank had an error.
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
    """The time of change and the size; for a URL, which all hosts see, a constant."""
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
