"""Process sets: collectives among some of the ranks. Names and semantics are Horovod's.

A process set is made from ranks, and registered with init(process_sets=[...]) or add_process_set(); see registry.py.
Each member then has a Group for the set, with its own engine. The methods here are local.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from ..core.errors import InvalidRequestError, NotInitializedError
from ..core.topology import rank_list
from .group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

NOT_INITIALIZED = "mpistrat has not been initialized; use hvd.init()."
_UNKNOWN = "Process set does not exist or has not been registered."  # Horovod's words


def _checked(ranks: object) -> tuple[int, ...]:
    """Return the ranks, ascending. Raises InvalidRequestError unless they are distinct integers, 0 or more."""
    values: list = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    if not all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) and rank >= 0 for rank in values) \
            or len(set(values)) < len(values):
        raise InvalidRequestError("ProcessSet takes distinct ranks, or an mpi4py communicator. "
                                  f"Received: {ranks!r}")
    return tuple(sorted(int(rank) for rank in values))


class ProcessSet:
    """A subset of the ranks of the job. Collectives can run among these ranks.

    Args:
        ranks_or_comm: Distinct ranks of the job, in any order; or an mpi4py communicator of such ranks. Each rank
            passes its own communicator, so one call makes a set for each part of an MPI_Comm_split.

    Attributes:
        process_set_id: The id of the set; None unless the set is registered. The set of all ranks has id 0. The id of
            a removed set is not used again until shutdown().
        mpi_comm: The communicator that the set was made from; None if the set was made from ranks. The set of all ranks
            has the communicator that was passed to init().

    Raises:
        ValueError: `ranks_or_comm` is neither a communicator nor a list of distinct integers, 0 or more.
    """

    def __init__(self, ranks_or_comm: "Iterable[int] | int | MPI.Comm"):
        self.process_set_id: int | None = None
        self.mpi_comm: MPI.Comm | None = None
        self._ranks: tuple[int, ...] | None = None
        self._group: Group | None = None  # Only members have a group.
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = cast("MPI.Comm", ranks_or_comm)
        else:
            self._ranks = _checked(ranks_or_comm)

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in the set, ascending; None for a communicator before it is registered."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if the set is not registered. Local."""
        return None if self.process_set_id is None or self._ranks is None else len(self._ranks)

    def rank(self) -> int | None:
        """Return this rank's index in the set; None if it is not in the set, or the set is not registered. Local."""
        return None if self._group is None else self._group.topology.rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if the set is not registered. Local."""
        return None if self.process_set_id is None else self._group is not None

    def has_others(self) -> bool:
        """Return whether this rank is in the set together with other ranks, so that it must communicate. Local.

        Raises:
            InvalidRequestError: The set is not registered.
        """
        if self._group is None and self.included() is False:
            return False
        return self.group("process_set").topology.size > 1

    def group(self, operation: str) -> Group:
        """Return the group that executes collectives of the set. Local.

        Raises:
            InvalidRequestError: The set is not registered, or this rank is not in the set. The text has `operation`.
        """
        if self._group is None:
            if self.process_set_id is None:
                raise InvalidRequestError(f"{operation}: {_UNKNOWN} Call init(process_sets=[...]) or add_process_set() "
                                          "on all ranks first.")
            raise InvalidRequestError(f"{operation}: this rank is not a member of the provided process set, whose "
                                      f"ranks are {rank_list(self._ranks or ())}. Check process_set.included() first.")
        return self._group

    def bind(self, number: int | None, ranks: Sequence[int] | None = None, group: Group | None = None) -> None:
        """Note that the set is registered as `number`; None: it is no longer registered. Local; for this package."""
        self.process_set_id, self._group = number, group
        if ranks is not None:
            self._ranks = tuple(ranks)

    def __deepcopy__(self, memo: dict) -> "ProcessSet":
        """Return the set itself: a copy of an object that holds a set (a callback) is for the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _AllRanks(ProcessSet):
    """The set of all ranks, which init() registers."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0
        self._ranks = None

    @property
    def ranks(self) -> list[int]:
        return list(range(self.size()))

    def size(self) -> int:
        return self.group("size()").topology.size

    def rank(self) -> int:
        return self.group("rank()").topology.rank

    def included(self) -> bool:
        self.group("included()")
        return True

    def group(self, operation: str) -> Group:
        if self._group is None:
            raise NotInitializedError(NOT_INITIALIZED)
        return self._group

    def __repr__(self) -> str:
        ranks = None if self._group is None else self.ranks
        return f"ProcessSet(process_set_id=0, ranks={ranks}, mpi_comm={self.mpi_comm})"


global_process_set = _AllRanks()


def resolved(process_set: ProcessSet | None) -> ProcessSet:
    """Return the set for an argument `process_set`. None stands for the set of all ranks.

    Raises InvalidRequestError: The argument is not a ProcessSet.
    """
    if process_set is None:
        return global_process_set
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError("process_set must be a ProcessSet that init() or add_process_set() has registered. "
                                  f"Received: {process_set!r}")
    return process_set
