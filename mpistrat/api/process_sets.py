"""Horovod's process sets, reduced to the one set that is available: all ranks."""

from ..core.errors import InvalidRequestError
from .runtime import current


class ProcessSet:
    """A set of ranks. The only instance is `global_process_set`, the set of all ranks."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks in the set."""
        return list(range(current().topology.size))

    def size(self) -> int:
        """Number of ranks in the set."""
        return current().topology.size

    def rank(self) -> int:
        """This rank's position in the set."""
        return current().topology.rank

    def included(self) -> bool:
        """Whether this rank is in the set. Always True."""
        return True


global_process_set = ProcessSet()


def require_global(process_set: ProcessSet | None) -> None:
    """Raise InvalidRequestError unless `process_set` is the global one, or None, which means the global one."""
    if process_set is not None and process_set is not global_process_set:
        raise InvalidRequestError("only process_set=global_process_set is available. For a job on fewer ranks, give "
                                  f"init(comm=[...]) their list. Received: {process_set!r}")
