"""Add and remove process sets while a job runs. Both are collective over all ranks of the job."""

from collections.abc import Iterable

from . import runtime
from .process_sets import ProcessSet


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, and return it. Collective over all ranks of the job, also those that are not in the set.

    Args:
        process_set: A ProcessSet, or ranks. The same on all ranks, except for a ProcessSet of a communicator.

    Raises:
        InvalidRequestError: On all ranks, and nothing changes: the set is empty, has ranks that do not exist, or is
            registered already, or the ranks disagree on it.
        NotInitializedError: Before init() or after shutdown().
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    runtime.current().registry.add([made])
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks of the job. Operations in flight in the set are completed first.

    Returns:
        False if it is the set of all ranks, or is not registered.

    Raises:
        InvalidRequestError: On all ranks, if they remove different sets.
        NotInitializedError: Before init() or after shutdown().
    """
    return runtime.current().registry.remove(process_set)
