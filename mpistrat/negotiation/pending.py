"""A request that some ranks of a subtree have submitted, and other ranks have not. Pure.

The coordinator has one Pending for the name of each incomplete request. Once all ranks have submitted the request, the
coordinator passes the request on to its parent, or (on rank 0) decides on the request.
"""

from ..core.request import Request
from .tree import Node, subtree


class Pending:
    """What the ranks of a node's subtree have submitted under one name.

    A *source* is this rank itself, or a child with all ranks under it. `_whole[source]` is the request that all ranks
    of a source have submitted alike. `_parts[source]` has the requests of single ranks under a child, which travel when
    they differ, or when rank 0 has to report which ranks miss.
    """

    __slots__ = ("_complete", "_node", "_parts", "_whole", "passed_on", "since")

    def __init__(self, node: Node, since: float):
        # since: When the first rank submitted it.
        self._node, self.since = node, since
        self._whole: dict[int, Request] = {}
        self._parts: dict[int, dict[Request, set[int]]] = {}
        self._complete = 0  # how many sources
        self.passed_on = 0  # How many ranks the latest message to the parent listed for this request.

    def add(self, source: int, request: Request, ranks: set[int] | None) -> None:
        """Note that `ranks` under `source` have submitted `request`; None: all ranks of `source`."""
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
        """Whether all ranks of the subtree have submitted a request of this name."""
        return self._complete == len(self._node.ranks_under)

    def agreed(self) -> Request | None:
        """The request of all sources, which must be complete; None if the requests of the sources differ."""
        if self._parts:
            return None
        first, *others = self._whole.values()
        return first if all(request is first or request == first for request in others) else None

    def agreed_by_present(self) -> Request | None:
        """The request of all ranks that have submitted a request; None if these requests differ."""
        requests = self.by_request()
        return next(iter(requests)) if len(requests) == 1 else None

    def by_request(self) -> dict[Request, set[int]]:
        """The different requests, each with the ranks that have submitted it."""
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
        """The ranks that have submitted something, in order."""
        return sorted(set().union(*self.by_request().values()))

    def missing(self) -> list[int]:
        """The other ranks of the subtree, in order."""
        return sorted(set(subtree(self._node.rank, self._node.size)) - set(self.present()))
