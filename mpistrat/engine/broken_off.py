"""Executions of graphs that end in an error, and leave collectives that this rank has submitted.

They cannot be taken back: the other ranks may wait for them, and would reduce them with what this rank submits for the
next step. So the engine ends on all ranks.
"""

from collections.abc import Iterable

from ..core.errors import DuplicateNameError, EngineError
from ..core.handle import Entry


class BrokenOffError(EngineError):
    """Ends the engine. The ranks raise it as EngineError, with the same text."""


def require_wanted(entries: Iterable[Entry], rank: int) -> None:
    """Raise BrokenOffError if the execution that has submitted one of `entries` has ended.

    Args:
        entries: They are not complete.
        rank: This rank in the job.
    """
    for entry in entries:
        was_given_up = entry.handle.was_given_up
        if was_given_up is not None and was_given_up(entry.handle):
            raise BrokenOffError(
                f"{entry.request.name}: on rank {rank} the tf.function that has submitted it ended in an error before "
                f"it was complete. The error was raised on rank {rank}, and says why. {_WAY_OUT}")


def of_duplicate(error: DuplicateNameError, entries: Iterable[Entry], rank: int) -> BrokenOffError:
    """What ends the engine because a graph of this rank cannot submit a collective. `entries` are in flight."""
    try:
        require_wanted(entries, rank)  # An execution that has ended is the cause if there is one.
    except BrokenOffError as cause:
        return cause
    return BrokenOffError(f"{error} That was in a tf.function on rank {rank}. {_WAY_OUT}")


_WAY_OUT = ("The other collectives of the step cannot be taken back, so the engine has ended on all ranks. To go on in "
            "the same process, call shutdown() and init() on every rank.")
