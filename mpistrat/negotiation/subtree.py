"""What one rank has learned about itself and the ranks under it in the tree. Pure: time is an argument.

The coordinator of each rank has one Subtree, and notes in it what this rank does and what the children send. A rank
other than 0 makes its announcements from the Subtree. On rank 0, the subtree is the whole job, and Root decides by it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from ..core.errors import MessageError
from ..core.request import Request
from ..core.topology import Topology
from .joined import JOIN, JoinedRanks
from .pending import Pending
from .tree import Node


@dataclass
class EndedRanks:
    """Ranks that have called shutdown(), and an engine that has failed."""

    # Each rank that has shut down since the last message, with the number of operations that it had completed.
    news: list[tuple[int, int]] = field(default_factory=list)
    # On rank 0, the number of completed operations of each rank that has shut down.
    completed: dict[int, int] = field(default_factory=dict)
    are_any: bool = False  # Whether some rank of the job has shut down.
    # The error text of an engine that has failed; None: no engine has, or the text has been sent to the parent.
    failure: str | None = None
    is_stall: bool = False  # Whether the failure was a stall.

    def note(self, ended: tuple[tuple[int, int], ...]) -> None:
        """Note the ranks that have shut down, as (rank, completed operations)."""
        self.news += ended
        self.are_any = self.are_any or bool(ended)

    def fail(self, text: str, is_stall: bool) -> None:
        """Note that the engine of some rank has failed. Only the first failure is kept."""
        if self.failure is None:
            self.failure, self.is_stall = text, is_stall

    def take_news(self) -> tuple[tuple[int, int], ...]:
        """The ranks that have shut down since the last call."""
        news, self.news = tuple(self.news), []
        return news


class RequestNumbers:
    """Numbers that stand for requests seen before, so that a repeated request travels as eight bytes.

    Rank 0 gives the numbers, and its decisions carry them to all ranks. A number stands for one request for ever.
    Equal requests have different numbers if one is in a graph and the other is not. All ranks have to know whether a
    request is in a graph, since a mismatch in a graph ends the engines.

    Args:
        capacity: How many requests get a number.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._number_of: dict[tuple[Request, bool], int] = {}
        self.request_of: dict[int, Request] = {}  # The request that each number stands for.
        self._seen_once: OrderedDict[tuple[Request, bool], None] = OrderedDict()  # on rank 0

    def number_of(self, request: Request) -> int | None:
        """The number that stands for `request`, or None."""
        return self._number_of.get((request, request.in_graph))

    def add(self, request: Request, number: int) -> None:
        """Let `number` stand for `request`, as rank 0 has decided."""
        self._number_of[request, request.in_graph] = number
        self.request_of[number] = request

    def give(self, request: Request) -> int | None:
        """On rank 0: assign a number to `request`. Returns None for its first use, and when the table is full.

        A name that is used only once (such as a name with a step counter) would only fill the table.
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
    """The requests in flight in a rank's subtree, and which of its ranks have joined or have ended.

    A *source* is this rank itself, or a child with all ranks under it.

    Args:
        cache_capacity: How many requests get a number.
    """

    def __init__(self, topology: Topology, cache_capacity: int):
        # node: This rank's place in the tree.
        self.topology, self.node = topology, Node(topology.rank, topology.size)
        self.numbers = RequestNumbers(cache_capacity)  # The numbers that stand for requests.
        self.pending: dict[str, Pending] = {}  # The incomplete requests, by name.
        # joined, ended: The ranks in these states.
        self.joined, self.ended = JoinedRanks(self.node), EndedRanks()
        # The answers of ranks that were asked where they are, until the answers are sent on, or the ranks asked again.
        self.places: dict[int, str] = {}
        self.must_end_vote = False  # Some rank has asked for a decision, which ends an open vote.
        self._ready: list[Pending] = []  # complete since the last take_ready, in order

    def note(self, source: int, request: Request, ranks: set[int] | None, now: float) -> None:
        """Note that `ranks` under `source` have submitted `request`; None: all ranks of `source`."""
        pending = self.pending.get(request.name)
        if pending is None:
            pending = self.pending[request.name] = Pending(self.node, now)
        pending.add(source, request, ranks)
        if pending.is_complete:
            del self.pending[request.name]
            self._ready.append(pending)

    def take_ready(self) -> list[Pending]:
        """The requests that have become complete in the subtree since the last call, in the order of completion."""
        ready, self._ready = self._ready, []
        return ready

    def take_vote_end(self) -> bool:
        """Whether some rank has asked for the end of the vote since the last call."""
        asked, self.must_end_vote = self.must_end_vote, False
        return asked

    def incomplete(self) -> dict[str, Pending]:
        """The incomplete requests by name, including the join if some ranks have joined."""
        return self.pending if self.joined.pending is None else {**self.pending, JOIN.name: self.joined.pending}

    def request_of(self, number: int, sender: int) -> Request:
        """The request that `number`, sent by `sender`, stands for. Raises MessageError: It stands for no request."""
        request = self.numbers.request_of.get(number)
        if request is None:
            raise MessageError(f"rank {self.topology.job_ranks[sender]} sent the number {number}, which stands for no "
                               f"request on rank {self.topology.job_rank}.")
        return request
