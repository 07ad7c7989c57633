"""Numbers that stand for requests seen before, so that a repeated request travels as eight bytes.

Rank 0 gives the numbers, and its decisions carry them to all ranks. A number stands for one request for ever. Called by
the coordinator and by root.py.

Requests that are equal have different numbers if one is in a graph and the other is not. The other ranks have to know
that of each request, since a mismatch in a graph ends the engines.
"""

from collections import OrderedDict

from ..core.request import Request


class RequestNumbers:
    """The numbers that one rank knows.

    Args:
        capacity: How many requests get a number.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._number_of: dict[tuple[Request, bool], int] = {}
        self._request_of: dict[int, Request] = {}
        self._seen_once: OrderedDict[tuple[Request, bool], None] = OrderedDict()  # on rank 0

    def number_of(self, request: Request) -> int | None:
        """The number that stands for `request`, if there is one."""
        return self._number_of.get((request, request.in_graph))

    def request_of(self, number: int) -> Request | None:
        """The request that `number` stands for, if there is one."""
        return self._request_of.get(number)

    def add(self, request: Request, number: int) -> None:
        """Let `number` stand for `request`, as rank 0 has decided."""
        self._number_of[request, request.in_graph] = number
        self._request_of[number] = request

    def give(self, request: Request) -> int | None:
        """On rank 0: a new number for a request that has none; None the first time it is seen, or without room.

        A name that is used once (with a step counter in it, say) would only fill the table.
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
