"""Ranks that have called join(): the other ranks' collectives go on without tensors of these ranks. Pure.

A rank that has no more batches joins, and waits until all ranks have joined. Until then, a collective of the others is
complete without that rank. The decision of rank 0 names the absent ranks. These ranks still take part, since the
collectives of MPI and of shared memory are among all ranks. They contribute values that do not change the result
(engine/executor.py). An average divides by the number of ranks that have submitted a tensor.

Once a rank has joined, no subtree with that rank is complete. So the ranks above it pass on incomplete requests.
"""

from collections.abc import Sequence

from ..core.request import CollectiveType, ReduceOp, Request, join_request
from ..core.topology import Topology
from .pending import Pending
from .tree import Node

JOIN = join_request()


class JoinedRanks:
    """The ranks of a node's subtree that wait in join(). When all ranks have joined, `clear` forgets them."""

    def __init__(self, node: Node):
        self._node = node
        self._news: list[int] = []
        self.ranks: list[int] = []  # In the order in which they have joined.
        # The join as a request that these ranks have submitted, for reports; None if no rank has joined.
        self.pending: Pending | None = None

    def note(self, source: int, ranks: Sequence[int], now: float) -> None:
        """Note that `ranks` under `source` have joined. `source` is this rank or a child."""
        if self.pending is None:
            self.pending = Pending(self._node, now)
        self.pending.add(source, JOIN, set(ranks))
        self.ranks += ranks
        self._news += ranks

    def take_news(self) -> tuple[int, ...]:
        """The ranks that have joined since the last call."""
        news, self._news = tuple(self._news), []
        return news

    def clear(self) -> None:
        """Forget the joined ranks, since all ranks have joined."""
        self._news, self.ranks, self.pending = [], [], None


def problem_without(absent: Sequence[int], request: Request, topology: Topology) -> str:
    """Return why a collective cannot run without the ranks that have joined, as a sentence; "" if it can."""
    ranks = f"ranks {topology.listed(absent)}"
    if request.kind in (CollectiveType.ALLTOALL, CollectiveType.REDUCESCATTER):
        reason = f"rows for {ranks} would be lost"
    elif request.kind is CollectiveType.BROADCAST and request.root_rank in absent:
        reason = "its root is one of them"
    elif request.scaled.prescale != 1.0 and request.scaled.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        reason = f"{request.scaled.op.name.capitalize()} with a prescale factor has no neutral element"
    else:
        return ""
    return (f"{request.name}: {request.kind.value} is not supported with join() at this time: {ranks} have joined, and "
            f"{reason}. Call {request.kind.value} before the first rank joins, or after all ranks have joined.")
