"""What one rank has learned about itself and the ranks under it in the tree. Pure: time is an argument.

The coordinator of each rank has one Subtree. It writes down there what this rank does and what the children send. On a
rank other than 0 it makes announcements of it. On rank 0, whose subtree is the whole job, root.py decides by it.
"""

from dataclasses import dataclass, field

from ..core.errors import MessageError
from ..core.request import Request
from ..core.topology import Topology
from .joined import JOIN, JoinedRanks
from .numbers import RequestNumbers
from .pending import Pending
from .tree import Node


@dataclass
class EndedRanks:
    """Ranks that have called shutdown(), and an engine that has failed.

    Attributes:
        news: Each rank that has shut down since the last message, with the number of operations that it had completed.
        completed: On rank 0, these numbers of all ranks that have shut down.
        are_any: Whether some rank of the job has shut down.
        failure: What went wrong in the engine of some rank, in words; None: nothing, or it has been passed on.
        is_stall: Whether that was a stall.
    """

    news: list[tuple[int, int]] = field(default_factory=list)
    completed: dict[int, int] = field(default_factory=dict)
    are_any: bool = False
    failure: str | None = None
    is_stall: bool = False

    def note(self, ended: tuple[tuple[int, int], ...]) -> None:
        """These ranks have shut down: (rank, completed operations)."""
        self.news += ended
        self.are_any = self.are_any or bool(ended)

    def fail(self, text: str, is_stall: bool) -> None:
        """The engine of some rank has failed. Only the first failure is kept."""
        if self.failure is None:
            self.failure, self.is_stall = text, is_stall

    def take_news(self) -> tuple[tuple[int, int], ...]:
        """The ranks that have shut down since the last call."""
        news, self.news = tuple(self.news), []
        return news


class Subtree:
    """The requests in flight in a rank's subtree, and which of its ranks have joined or have ended.

    A *source* is this rank itself, or a child with all ranks under it.

    Args:
        node: This rank's place in the tree.
        topology: Where the ranks are, for messages.
        cache_capacity: How many requests get a number.

    Attributes:
        node, topology: As given.
        numbers: The numbers that stand for requests.
        pending: The incomplete requests, by name.
        joined, ended: The ranks in these states.
        must_end_vote: Some rank has asked for a decision, which ends an open vote.
    """

    def __init__(self, node: Node, topology: Topology, cache_capacity: int):
        self.node, self.topology = node, topology
        self.numbers = RequestNumbers(cache_capacity)
        self.pending: dict[str, Pending] = {}
        self.joined, self.ended = JoinedRanks(node), EndedRanks()
        self.must_end_vote = False
        self._ready: list[Pending] = []  # complete since the last take_ready, in order

    def note(self, source: int, request: Request, ranks: set[int] | None, now: float) -> None:
        """`ranks` under `source` have submitted `request`; None: all of them."""
        pending = self.pending.get(request.name)
        if pending is None:
            pending = self.pending[request.name] = Pending(self.node, now)
        pending.add(source, request, ranks)
        if pending.is_complete:
            del self.pending[request.name]
            self._ready.append(pending)

    def take_ready(self) -> list[Pending]:
        """What all ranks of the subtree have submitted since the last call, in the order in which it was complete."""
        ready, self._ready = self._ready, []
        return ready

    def take_vote_end(self) -> bool:
        """Whether some rank has asked for the end of the vote since the last call."""
        asked, self.must_end_vote = self.must_end_vote, False
        return asked

    def incomplete(self) -> dict[str, Pending]:
        """What some ranks miss, by name, with the join if some ranks have joined."""
        return self.pending if self.joined.pending is None else {**self.pending, JOIN.name: self.joined.pending}

    def request_of(self, number: int, sender: int) -> Request:
        """The request for which `sender` has sent `number`.

        Raises:
            MessageError: The number stands for no request.
        """
        request = self.numbers.request_of(number)
        if request is None:
            raise MessageError(f"rank {self.topology.job_ranks[sender]} sent the number {number}, which stands for no "
                               f"request on rank {self.topology.job_rank}.")
        return request
