"""Ranks that can do nothing before the next decision: whether all ranks wait for each other. Pure.

A rank is *blocked* when it waits for what it has submitted, has executed all decisions that it has received, and
nothing can happen in its process before another decision (engine/standstill.py detects that). A rank sends its parent
the number of decisions that it has executed, once its whole subtree is blocked after the same number. So a message has
no list of ranks.

If all ranks are blocked after the last decision of rank 0, none submits anything before the next decision. Messages of
a rank arrive in order, so rank 0 has every request by then. If none of them is complete, there is nothing to decide,
and no rank can ever go on: a deadlock. Ranks that submit in the same order never get there, since the rank that has
submitted least waits for nothing.
"""

from .tree import Node


class BlockedRanks:
    """Which parts of a node's subtree are blocked. A source is this rank itself, or a child with all ranks under it.

    Attributes:
        decisions: How many decisions this rank has received or, on rank 0, made.
    """

    def __init__(self, node: Node):
        self._node = node
        self.decisions = 0
        self._after: dict[int, int] = {}  # by source: the number of decisions after which it is blocked
        self._sent: int | None = None

    def note(self, source: int, decisions: int | None) -> None:
        """All ranks of the source are blocked after so many decisions; None: some are not."""
        if decisions is None:
            self._after.pop(source, None)
        else:
            self._after[source] = decisions

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks of the subtree are blocked, and no decision is on its way to any of them."""
        return (len(self._after) == len(self._node.ranks_under)
                and all(number == self.decisions for number in self._after.values()))

    def to_send(self) -> tuple[int | None, bool]:
        """The field `blocked` of the next message to the parent, and whether a message must be sent only for it."""
        number = self.decisions if self.has_all_ranks else None
        # A subtree that is no longer blocked must say so only if it has sent the latest number. An older number has no
        # effect: `has_all_ranks` compares with the latest.
        return number, number != self._sent and (number is not None or self._sent == self.decisions)

    def sent(self, number: int | None) -> None:
        """A message with this number has been sent."""
        self._sent = number
