"""The tree in which ranks negotiate, and what one rank has learned about itself and the ranks below it in the tree.

The coordinator of each rank has one Subtree, and notes in it what this rank does and what the children announce. From
the Subtree a rank makes its announcements. On rank 0, where the subtree is the whole job, Root makes the decisions from
it. Pure: time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..core.errors import MessageError
from ..core.request import CollectiveType, ReduceOp, Request, join_request
from ..core.topology import Topology
from ..core.tuning import FAN_OUT

# -- the tree ----------------------------------------------------------------------------------------------------------
# Rank 0 is at the root, and each rank has up to FAN_OUT children.


def parent_of(rank: int) -> int | None:
    """Return the parent of `rank` in the tree; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def depth_of(rank: int) -> int:
    """Return the number of tree edges from `rank` to rank 0."""
    parent = parent_of(rank)
    return 0 if parent is None else 1 + depth_of(parent)


def edges_among(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the edges of the tree between two ranks of `ranks`, as pairs (rank, parent)."""
    return [(rank, parent) for rank in ranks if (parent := parent_of(rank)) is not None and parent in ranks]


def subtree(root: int, size: int) -> Iterator[int]:
    """Yield `root` and all ranks below it in the tree of `size` ranks, in ascending order."""
    first = last = root  # The first and the last rank of a level of the subtree, whose ranks are consecutive.
    while first < size:
        yield from range(first, min(last, size - 1) + 1)
        first, last = first * FAN_OUT + 1, last * FAN_OUT + FAN_OUT


@dataclass(frozen=True)
class Node:
    """One rank's place in the tree of `size` ranks."""

    rank: int
    size: int

    @cached_property
    def parent(self) -> int | None:
        return parent_of(self.rank)

    @cached_property
    def children(self) -> tuple[int, ...]:
        return tuple(range(self.rank * FAN_OUT + 1, min(self.rank * FAN_OUT + FAN_OUT, self.size - 1) + 1))

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that send messages to this rank: its parent and its children."""
        return self.children if self.parent is None else (self.parent, *self.children)

    @cached_property
    def ranks_under(self) -> dict[int, int]:
        """The size of each child's subtree, which includes the child; and for this rank itself, 1."""
        return {child: len(list(subtree(child, self.size))) for child in self.children} | {self.rank: 1}


# -- an incomplete request ---------------------------------------------------------------------------------------------


class Pending:
    """The requests of one name that ranks of a node's subtree have submitted.

    A *source* is this rank itself, or a child with all ranks below it. `_whole[source]` is the request if all ranks of
    the source have submitted the same one. `_parts[source]` has requests with lists of ranks. A child sends such lists
    if the requests differ, or if ranks are missing.
    """

    __slots__ = ("_complete", "_node", "_parts", "_whole", "passed_on", "since")

    def __init__(self, node: Node, since: float):
        self._node, self.since = node, since  # since: When the first rank submitted the request.
        self._whole: dict[int, Request] = {}
        self._parts: dict[int, dict[Request, set[int]]] = {}
        self._complete = 0  # The number of sources of which all ranks have submitted.
        self.passed_on = 0  # How many ranks the latest message to the parent listed for this request.

    def add(self, source: int, request: Request, ranks: set[int] | None) -> None:
        """Note that ranks of `source` have submitted `request`: those in `ranks`, or all if `ranks` is None."""
        if ranks is None:
            was_complete = source in self._parts and self._has_all(source, self._parts.pop(source))
            self._whole[source] = request
        else:
            part = self._parts.setdefault(source, {})
            was_complete = self._has_all(source, part)
            part[request] = part.get(request, set()) | ranks
            if not self._has_all(source, part):
                return
        self._complete += not was_complete

    def _has_all(self, source: int, part: dict[Request, set[int]]) -> bool:
        return sum(map(len, part.values())) >= self._node.ranks_under[source]

    @property
    def is_complete(self) -> bool:
        return self._complete == len(self._node.ranks_under)

    def agreed(self) -> Request | None:
        """Return the request if all ranks have submitted the same one, else None. No rank may be missing."""
        if self._parts:
            return None
        first, *others = self._whole.values()
        return first if all(request is first or request == first for request in others) else None

    def by_request(self) -> dict[Request, set[int]]:
        """Return the different requests, each with the ranks that have submitted it."""
        result: dict[Request, set[int]] = {}
        for source in sorted(self._whole.keys() | self._parts.keys()):
            if source in self._whole:
                ranks = (source,) if source == self._node.rank else subtree(source, self._node.size)
                result.setdefault(self._whole[source], set()).update(ranks)
            else:
                for request, some in self._parts[source].items():
                    result.setdefault(request, set()).update(some)
        return result

    def present(self) -> list[int]:
        """Return the ranks that have submitted a request of this name, in ascending order."""
        return sorted(set().union(*self.by_request().values()))

    def missing(self) -> list[int]:
        """Return the ranks of the subtree that have not submitted a request of this name, in ascending order."""
        return sorted(set(subtree(self._node.rank, self._node.size)) - set(self.present()))


# -- ranks that have called join() -------------------------------------------------------------------------------------
# A rank that has no more batches joins, and waits until all ranks have joined. Until then, a collective of the others
# is complete without that rank. The decision of rank 0 names the absent ranks. These ranks still take part, since the
# collectives of MPI and of shared memory are among all ranks. They contribute values that do not change the result
# (engine/executor.py). An average divides by the number of ranks that have submitted a tensor.
#
# Once a rank has joined, no subtree with that rank is complete. So the ranks above it pass on incomplete requests.

JOIN = join_request()


class JoinedRanks:
    """The ranks of a node's subtree that wait in join(). The caller must call `clear` once all ranks have joined."""

    def __init__(self, node: Node):
        self._node = node
        self.clear()

    def clear(self) -> None:
        self.news: list[int] = []  # The ranks that have joined since the last announcement.
        self.ranks: list[int] = []  # In the order in which they have joined.
        # The join as a request that these ranks have submitted, for reports; None if no rank has joined.
        self.pending: Pending | None = None

    def note(self, source: int, ranks: Sequence[int], now: float) -> None:
        """Note that `ranks` have called join(). `source`: This rank, or the child whose subtree has the ranks."""
        if self.pending is None:
            self.pending = Pending(self._node, now)
        self.pending.add(source, JOIN, set(ranks))
        self.ranks += ranks
        self.news += ranks


def problem_without(absent: Sequence[int], request: Request, topology: Topology) -> str:
    """Return why the collective of `request` cannot run without the joined ranks `absent`; "" if it can run."""
    ranks = f"ranks {topology.listed(absent)}"
    if request.kind in (CollectiveType.ALLTOALL, CollectiveType.REDUCESCATTER):
        reason = f"rows for {ranks} would be lost"
    elif request.kind is CollectiveType.BROADCAST and request.root_rank in absent:
        reason = "its root is one of them"
    elif request.scaled.prescale != 1.0 and request.scaled.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        reason = f"no value of theirs leaves {request.scaled.op.name.capitalize()} with a prescale factor unchanged"
    else:
        return ""
    return (f"{request.name}: {request.kind.value} is not supported with join() at this time: {ranks} have joined, and "
            f"{reason}. Call {request.kind.value} before the first rank joins, or after all ranks have joined.")


# -- all that a rank knows ---------------------------------------------------------------------------------------------


@dataclass
class EndedRanks:
    """The ranks that have called shutdown(), and the failure of an engine."""

    # Each rank that has shut down since the last announcement, with the number of operations that it had completed.
    news: list[tuple[int, int]] = field(default_factory=list)
    # On rank 0, the number of completed operations of each rank that has shut down.
    completed: dict[int, int] = field(default_factory=dict)
    are_any: bool = False  # Whether some rank of the job has shut down.
    # The error text of an engine that has failed; None: no engine has, or the text has been sent to the parent.
    failure: str | None = None
    is_stall: bool = False  # Whether the failure was a stall.

    def note(self, ended: tuple[tuple[int, int], ...]) -> None:
        """Note that ranks have called shutdown(). `ended`: Pairs (rank, number of operations that it completed)."""
        self.news += ended
        self.are_any = self.are_any or bool(ended)


class RequestNumbers:
    """Numbers that stand for requests seen before. A repeated request travels as its number, in eight bytes.

    Rank 0 gives the numbers, and its decisions carry them to all ranks. A number stands for one request for ever. Two
    requests that differ only in whether they are from a TensorFlow graph have different numbers. So the number tells
    all ranks whether the request is from a graph, where a mismatch ends the engines.

    `capacity`: The most requests that get a number.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._number_of: dict[tuple[Request, bool], int] = {}
        self.request_of: dict[int, Request] = {}  # The request that each number stands for.
        self._seen_once: OrderedDict[tuple[Request, bool], None] = OrderedDict()  # on rank 0

    def number_of(self, request: Request) -> int | None:
        """Return the number that stands for `request`, or None."""
        return self._number_of.get((request, request.in_graph))

    def add(self, request: Request, number: int) -> None:
        """Let `number` stand for `request`, as rank 0 has decided."""
        self._number_of[request, request.in_graph] = number
        self.request_of[number] = request

    def give(self, request: Request) -> int | None:
        """Give `request` a number, on rank 0, and return it. Returns None at the first use, and when the table is full.

        The first use gets no number, because names that are used once (those with a step counter) would fill the table.
        """
        key = request, request.in_graph
        if key not in self._seen_once:
            self._seen_once[key] = None
            while len(self._seen_once) > max(self._capacity, 1):
                self._seen_once.popitem(last=False)
            return None
        number = len(self._number_of)
        if number >= self._capacity:
            return None
        del self._seen_once[key]
        self.add(request, number)
        return number


class Subtree:
    """The requests in flight in a rank's subtree, and the ranks of the subtree that have joined or ended.

    For `source` see Pending. `cache_capacity`: The most requests that get a number.
    """

    def __init__(self, topology: Topology, cache_capacity: int):
        # node: This rank's place in the tree.
        self.topology, self.node = topology, Node(topology.rank, topology.size)
        self.numbers = RequestNumbers(cache_capacity)
        self.pending: dict[str, Pending] = {}  # The incomplete requests, by name.
        self.joined, self.ended = JoinedRanks(self.node), EndedRanks()
        # The answers of ranks that were asked where they are, until the answers are sent on, or the ranks asked again.
        self.places: dict[int, str] = {}
        self.must_end_vote = False  # Some rank has asked for a decision, which ends an open vote.
        self.ready: list[Pending] = []  # The requests that became complete since the last message, in order.

    def note(self, source: int, request: Request, ranks: set[int] | None, now: float) -> None:
        """Note that ranks of `source` have submitted `request`: those in `ranks`, or all if `ranks` is None."""
        pending = self.pending.get(request.name)
        if pending is None:
            pending = self.pending[request.name] = Pending(self.node, now)
        pending.add(source, request, ranks)
        if pending.is_complete:
            del self.pending[request.name]
            self.ready.append(pending)

    def incomplete(self) -> dict[str, Pending]:
        """Return the incomplete requests by name. While ranks wait in join(), the join is one of these requests."""
        return self.pending if self.joined.pending is None else {**self.pending, JOIN.name: self.joined.pending}

    def request_of(self, number: int, sender: int) -> Request:
        """Return the request for `number`, which rank `sender` has sent. Raises MessageError: `number` is unknown."""
        request = self.numbers.request_of.get(number)
        if request is None:
            raise MessageError(f"rank {self.topology.job_ranks[sender]} sent the number {number}, which stands for no "
                               f"request on rank {self.topology.job_rank}.")
        return request
