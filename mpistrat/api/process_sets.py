"""Process sets: collectives among some of the ranks. Names and semantics are Horovod's.

A process set is made from ranks, and registered by init(process_sets=[...]) or add_process_set(). Each rank in the set
then has a Group for the set, with an engine and an MPI communicator. The methods of ProcessSet are local.
"""

import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..core.errors import InvalidRequestError, MpistratError, NotInitializedError
from ..core.interruption import Interruption
from ..core.settings import Settings
from ..core.topology import describe_by_rank, rank_list, ranks_by_value
from ..transport.mpi import mpi_library
from .group import Group, backends_over

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

Ranks = tuple[int, ...]
_NOT_INITIALIZED = "mpistrat has not been initialized; use hvd.init()."


class ProcessSet:
    """A subset of the ranks of the job. Collectives can run among these ranks.

    Args:
        ranks_or_comm: Distinct ranks of the job, in any order; or an mpi4py communicator of ranks of the job. After an
            MPI_Comm_split each rank passes the communicator of its part, and all parts are registered together.

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
        self._ranks: Ranks | None = None
        self._group: Group | None = None  # Only members have a group.
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = cast("MPI.Comm", ranks_or_comm)
            return
        values: list = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm]
        if not all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) and rank >= 0 for rank in values) \
                or len(set(values)) < len(values):
            raise InvalidRequestError("ProcessSet takes distinct ranks, or an mpi4py communicator. "
                                      f"Received: {ranks_or_comm!r}")
        self._ranks = tuple(sorted(int(rank) for rank in values))

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in the set, ascending; None for a set made from a communicator until the set is registered."""
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
        """Return whether the set has this rank and at least one other rank. Local.

        Raises InvalidRequestError: The set is not registered.
        """
        if self._group is None and self.included() is False:
            return False
        return self.group("process_set").topology.size > 1

    def group(self, operation: str) -> Group:
        """Return the group that executes collectives of the set. Local. Error texts name the `operation`.

        Raises InvalidRequestError: The set is not registered, or this rank is not in the set.
        """
        if self._group is None:
            if self.process_set_id is None:
                raise InvalidRequestError(  # It begins with Horovod's words.
                    f"{operation}: Process set does not exist or has not been registered. Call init(process_sets=[...])"
                    " or add_process_set() on all ranks first.")
            raise InvalidRequestError(f"{operation}: this rank is not a member of the provided process set, whose "
                                      f"ranks are {rank_list(self._ranks or ())}. Check process_set.included() first.")
        return self._group

    def bind(self, number: int | None, ranks: Sequence[int] | None = None, group: Group | None = None) -> None:
        """Store the id (`number`; None: not registered), ranks and group of the set. Local. mpistrat calls bind()."""
        self.process_set_id, self._group = number, group
        if ranks is not None:
            self._ranks = tuple(ranks)

    def __deepcopy__(self, memo: dict) -> "ProcessSet":
        """Return this set itself, because a copy of an object that has a set needs the registered set."""
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _AllRanks(ProcessSet):
    """The set of all ranks, which init() registers."""

    why_none = _NOT_INITIALIZED  # The error text before init(), and after shutdown()

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
            raise NotInitializedError(self.why_none)
        return self._group

    def __repr__(self) -> str:
        ranks = None if self._group is None else self.ranks
        return f"ProcessSet(process_set_id=0, ranks={ranks}, mpi_comm={self.mpi_comm})"


global_process_set = _AllRanks()


def resolved(process_set: ProcessSet | None) -> ProcessSet:
    """Return `process_set`, or the set of all ranks if `process_set` is None.

    Raises InvalidRequestError: `process_set` is neither None nor a ProcessSet.
    """
    if process_set is None:
        return global_process_set
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError("process_set must be a ProcessSet that init() or add_process_set() has registered. "
                                  f"Received: {process_set!r}")
    return process_set


# -- registration -----------------------------------------------------------------------------------------------------


class Registry:
    """One rank's registry of the process sets of a job. init() and the public functions on process sets call it.

    All ranks of the job register and remove the same sets in the same order, so a set has the same id on all ranks.
    Before a change, the ranks exchange their arguments. If the arguments of any rank are invalid, all ranks raise an
    error and nothing changes. An id is not used again before shutdown(). So code that refers to a removed set by its
    id, such as a traced tf.function, gets an error instead of a different set.

    `world` is the group of all ranks of the job. `interruption` ends the waits of all groups after a loss of ranks.
    """

    def __init__(self, world: Group, settings: Settings, interruption: Interruption):
        self.groups: dict[int, Group] = {0: world}  # The groups of the sets that this rank is in, by id; 0 is `world`.
        self._world, self._settings, self._interruption = world, settings, interruption
        self.sets: dict[int, ProcessSet] = {0: global_process_set}  # All registered sets by id.
        self.ranks_of: dict[int, Ranks] = {}  # The ranks of each set by id, without the set of all ranks.
        self._ids = itertools.count(1)
        global_process_set.bind(0, group=world)

    def add(self, process_sets: Sequence[ProcessSet]) -> None:
        """Register sets; see add_process_set. Collective over all ranks of the job."""
        own: list[Ranks] = []
        from_comm: list[bool] = []
        problem = ""
        try:
            from_comm = [resolved(process_set).mpi_comm is not None for process_set in process_sets]
            own = [self._ranks_of(process_set) for process_set in process_sets]
            self._check(process_sets, own)
        except MpistratError as error:
            problem = str(error)
        everybody = self._exchange([problem, own, from_comm], "add_process_set")
        problems = {rank: text for rank, (text, *_) in enumerate(everybody) if text}
        if problems:
            raise InvalidRequestError(problem or "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
        problem = disagreement([[tuple(ranks) for ranks in lists] for _, lists, _ in everybody],
                               [any(flags) for flags in zip(*(flags for *_, flags in everybody))])
        if problem:
            raise InvalidRequestError(problem)
        for process_set, ranks, group in zip(process_sets, own, self._connect_all(own), strict=True):
            self._register(next(self._ids), process_set, ranks, group)

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set; see remove_process_set. Collective over all ranks of the job."""
        number = process_set.process_set_id
        if number is None or self.sets.get(number) is not process_set:
            number = -1
        numbers = self._exchange(number, "remove_process_set")
        if len(set(numbers)) > 1:
            raise InvalidRequestError("the ranks disagree on the process set to remove: " + describe_by_rank(
                ["a set that is not registered" if each < 0 else f"set {each}" for each in numbers]))
        if number < 1:
            return False
        del self.sets[number], self.ranks_of[number]
        process_set.bind(None)
        group = self.groups.pop(number, None)
        if group is not None:
            _close(group)
        return True

    def restore(self, former: "Registry", new_ranks: Mapping[int, int]) -> None:
        """Register the sets of `former`, whose job has lost ranks, with the same ids. Collective over all ranks.

        The sets lose the lost ranks, so several sets may have the same ranks afterwards. A set without any surviving
        rank is removed. The errors are those of _connect_all.

        `new_ranks`: The number of each surviving rank in this job, by its number in the former job.
        """
        sets = {number: tuple(new_ranks[rank] for rank in former.ranks_of[number] if rank in new_ranks)
                for number in sorted(former.ranks_of)}
        # Sets that are empty here are included: ranks outside the set of a communicator may not know its ranks.
        for (number, ranks), group in zip(sets.items(), self._connect_all(list(sets.values())), strict=True):
            process_set = former.sets[number]
            if ranks:
                self._register(number, process_set, ranks, group)
            else:
                process_set.bind(None)
        self._ids = former._ids

    def _register(self, number: int, process_set: ProcessSet, ranks: Ranks, group: Group | None) -> None:
        self.sets[number], self.ranks_of[number] = process_set, ranks
        if group is not None:
            self.groups[number] = group
        process_set.bind(number, ranks, group)

    def unbind(self) -> None:
        """Mark all sets as not registered, because the job is shut down. Local."""
        for process_set in self.sets.values():
            process_set.bind(0 if process_set is global_process_set else None)
        global_process_set.why_none = f"{_NOT_INITIALIZED} It was shut down before this call."

    def _exchange(self, value: object, name: str) -> list[Any]:
        """Return the `value` of each rank of the job, in rank order. Tuples become lists. Collective.

        Raises InvalidRequestError: On all ranks that call it, if other ranks send no value because they wait in join().
        """
        received = [json.loads(text) for text in self._world.exchange(json.dumps(value).encode(), name)[0]]
        if len(received) < self._world.topology.size:
            raise InvalidRequestError("process sets cannot change while some ranks wait in join(). Add or remove "
                                      "them before the first rank calls join(), or after the last.")
        return received

    def _ranks_of(self, process_set: ProcessSet) -> Ranks:
        comm = process_set.mpi_comm
        if comm is None or self._world.comm is None:
            return tuple(process_set.ranks or ())
        ranks = mpi_library.ranks_in(comm, self._world.comm)
        if any(rank < 0 for rank in ranks):
            raise InvalidRequestError("the communicator of a process set has processes that are not in the job.")
        return tuple(sorted(ranks))

    def _check(self, process_sets: Sequence[ProcessSet], own: Sequence[Ranks]) -> None:
        """Raise MpistratError if this rank finds the sets invalid. `own`: The ranks of each set. Local."""
        size = self._world.topology.size
        taken = {tuple(each.ranks or ()): number for number, each in self.sets.items()}
        for i, (process_set, ranks) in enumerate(zip(process_sets, own, strict=True)):
            if not ranks or ranks[-1] >= size:
                raise InvalidRequestError(f"a process set needs at least one rank, and ranks are from 0 to {size - 1}. "
                                          f"Received: {list(ranks)}")
            if process_set.process_set_id is not None:
                raise InvalidRequestError(f"{process_set} is registered already.")
            if ranks in taken or ranks in own[:i]:
                raise InvalidRequestError(f"a process set with the same ranks {list(ranks)} is registered already"
                                          + (f", as set {taken[ranks]}." if ranks in taken else "."))
            if len(ranks) > 1:
                mpi_library.require_several_threads(mpi_library.load_mpi())

    def _connect_all(self, sets: Sequence[Ranks]) -> list[Group | None]:
        """Return this rank's group for each set; None for a set without this rank. Collective over the whole job.

        Raises MpistratError: On all ranks, if any rank cannot connect. All new groups are closed.
        """
        groups: list[Group | None] = []
        for ranks in sets:
            group, problem = None, ""
            try:
                group = self._connect(ranks) if self._world.topology.rank in ranks else None
            except Exception as error:  # Of any kind: the other ranks must not wait for this one in the next set.
                logger.debug("rank %d: a process set failed", self._world.topology.rank, exc_info=True)
                problem = str(error) if isinstance(error, MpistratError) else repr(error)
            problems = ranks_by_value(
                text.decode() for text in self._world.exchange(problem.encode(), "add_process_set")[0])
            problems.pop("", None)
            if problems:
                if group is not None:
                    _abandon(group)
                for each in reversed(groups):
                    if each is not None:
                        _close(each)
                raise MpistratError("; ".join(f"ranks {rank_list(where)} cannot connect to the process set "
                                              f"{list(ranks)}: {text}" for text, where in problems.items()))
            groups.append(group)
        return groups

    def _connect(self, ranks: Ranks) -> Group:
        """Connect the ranks of a set, and return this rank's group. Collective over the ranks of the set."""
        topology, world, comm = self._world.topology.subset(ranks), self._world.comm, None
        if len(ranks) > 1:
            assert world is not None  # Several ranks have been connected over MPI.
            comm = mpi_library.subset(world, ranks)
        backends = backends_over(comm, topology, self._settings, self._interruption)
        return Group(self._settings, topology, backends, comm, self._interruption)


def _close(group: Group) -> None:
    """Close this rank's group. Collective over the group."""
    group.engine.end()
    if group.error is None:
        group.free()


def _abandon(group: Group) -> None:
    """End this rank's group without its other ranks, because some of them could not make the group. Local."""
    group.engine.abandon("The process set could not be connected.")
    if group.comm is not None:
        from ..transport.mpi.requests import never_free
        never_free(group)  # MPI may have requests that use its memory.


def disagreement(lists: Sequence[Sequence[Ranks]], from_comm: Sequence[bool]) -> str:
    """Return an error text if the ranks want to register different sets; "" if they agree. Pure.

    `lists`: For each rank, its sets. The sets at one index of all lists are compared. `from_comm`: For each index,
    whether any set there is made from a communicator. Ranks that are not in the set may then name a different set.
    """
    if len({len(sets) for sets in lists}) > 1:
        numbers = describe_by_rank([len(sets) for sets in lists])
        return f"the ranks register different numbers of process sets: {numbers}."
    for named, is_partly_known in zip(zip(*lists, strict=True), from_comm):
        if any(named[member] != ranks for ranks in named for member in ranks) or \
                (len(set(named)) > 1 and not is_partly_known):
            return f"the ranks disagree on a process set: {describe_by_rank([list(ranks) for ranks in named])}."
    return ""
