"""Files under a strategy: what all ranks write to one path is written once, and nobody goes on before it is there.

All ranks call `write_once`, and the chief writes. Then the ranks meet, each with its path and the error that it has
had, so that an error reaches all of them, whichever of these calls they are in. Ranks that name a path of their own
write it themselves, and so does one rank of a host that does not see the chief's file: hosts need not share a file
system to have what was written, as long as they find it under the same path.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...api import ops as array_ops
from ...api import runtime
from ...core.errors import CollectiveError, EngineError, ShutdownError
from .threads import wire_name

T = TypeVar("T")
# An attribute of exceptions that all ranks know of.
SHARED = "_mpistrat_shared"


@dataclass(frozen=True)
class FileStatus:
    """What a rank tells the others of a file.

    Attributes:
        path: Its absolute path; "" where it is about no file.
        error: What went wrong: errno or None, whether it is an OSError, and the text.
        stamp: Time of change and size of the file, as this rank sees it; None where there is none.
        value: What else the others are to know.
    """

    path: str = ""
    error: tuple[int | None, bool, str] | None = None
    stamp: tuple[int, int] | None = None
    value: Any = None


class _State(threading.local):
    def __init__(self) -> None:
        self.alone = False
        self.known: dict[Any, Any] = {}


_state = _State()


def is_alone() -> bool:
    """Whether what this thread writes is its own business: within `alone`, or there is one rank."""
    return _state.alone or not runtime.is_initialized() or runtime.current().topology.size == 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it, write_once and on_chief only call what they are given, on this rank."""
    before, _state.alone = _state.alone, True
    try:
        yield
    finally:
        _state.alone = before


@contextlib.contextmanager
def known(values: dict[Any, Any]) -> Iterator[None]:
    """Within it, variables have these values, by their ref(), for a rank that reads them alone to write them."""
    before, _state.known = _state.known, values
    try:
        yield
    finally:
        _state.known = before


def known_value(variable: Any) -> Any:
    """What `known` was given for a variable, where this rank is alone; else None."""
    return _state.known.get(variable.ref()) if _state.alone else None


def write_once(path: str, write: Callable[[], Any], value: Callable[[], Any] = lambda: None) -> Any:
    """Have `write` called on the chief, and on whatever rank else needs it to have the file. Collective.

    Args:
        path: Of the file or directory, on this rank.
        write: Writes it; it may not be collective.
        value: Called on the chief after the write.

    Returns:
        The chief's value.

    Raises:
        OSError: On every rank, when a rank could not write.
        CollectiveError: On the other ranks, when a rank has had another error.
    """
    if is_alone():
        write()
        return value()
    topology = runtime.current().topology
    own = path if "://" in path else os.path.abspath(path)
    _, error = _attempt(write) if topology.rank == 0 else (None, None)
    everybody = meet(error, own, value() if topology.rank == 0 and error is None else None)
    if everybody is None:
        return value()
    if len(topology.hosts) > 1 or any(told.path != own for told in everybody):
        error = None
        if writes_too(topology.rank, [told.path for told in everybody], topology.local_ranks,
                      everybody[0].stamp == _stamp(own)):
            _, error = _attempt(write)
        meet(error, own)
    return everybody[0].value


def writes_too(rank: int, paths: Sequence[str], local_ranks: Sequence[int], sees_file: bool) -> bool:
    """Whether a rank writes after the chief has.

    Args:
        rank: Which.
        paths: Every rank's path.
        local_ranks: The ranks of its host.
        sees_file: Whether the chief's file is there, as the chief has written it, if the paths are the same.
    """
    if rank == 0:
        return False
    if paths[rank] != paths[0]:
        return paths.index(paths[rank]) == rank
    return not sees_file and 0 not in local_ranks and \
        rank == min(other for other in local_ranks if paths[other] == paths[0])


def on_chief(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, which alone calls it. Collective; errors as in write_once."""
    if is_alone():
        return action()
    result, error = _attempt(action) if runtime.current().topology.rank == 0 else (None, None)
    everybody = meet(error, value=result)
    return result if everybody is None else everybody[0].value  # type: ignore[return-value]


@contextlib.contextmanager
def errors_shared() -> Iterator[None]:
    """When one rank fails within it, all do; in its next meeting, or at the end. Collective: all ranks enter it."""
    try:
        yield
    except Exception as error:
        if not getattr(error, SHARED, False) and not isinstance(error, EngineError):
            meet(error)
        raise
    meet(None)


def meet(error: Exception | None = None, path: str = "", value: Any = None) -> list[FileStatus] | None:
    """Tell all ranks what has become of a file here, and hear of theirs. Collective.

    Returns:
        What each rank tells; None where the other ranks have ended, so that nobody waits for the file.

    Raises:
        Exception: `error`, if that is not None.
        OSError, CollectiveError: Another rank had an error.
    """
    told = FileStatus(path, _description(error), _stamp(path) if path else None, value)
    try:
        everybody = array_ops.allgather_object(told, wire_name("files"))
    except ShutdownError:
        # The usual end of a script: the chief saves the model, and the others have nothing left to do.
        if error is not None:
            raise error from None
        return None
    if error is not None:
        setattr(error, SHARED, True)
        raise error
    for rank, other in enumerate(everybody):
        if other.error is not None:
            number, is_os_error, text = other.error
            text = f"rank {rank}: {text}"
            raised = (OSError(number, text) if number else OSError(text)) if is_os_error else CollectiveError(text)
            setattr(raised, SHARED, True)
            raise raised
    return everybody


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        with alone():
            return action(), None
    except Exception as error:  # raised when the other ranks know of it
        return None, error


def _description(error: Exception | None) -> tuple[int | None, bool, str] | None:
    if error is None:
        return None
    return getattr(error, "errno", None), isinstance(error, OSError), f"{type(error).__name__}: {error}"


def _stamp(path: str) -> tuple[int, int] | None:
    """The time of change and the size; of a file elsewhere, which all hosts see, the same on all of them."""
    if "://" in path:
        return 0, 0
    try:
        # Opening makes network file systems look at the server, and not at what they remember.
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_mtime_ns, found.st_size
