"""The tree in which ranks negotiate: rank 0 at the root, sixteen children each. Pure arithmetic on rank numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.tuning import FAN_OUT


def parent_of(rank: int) -> int | None:
    """The rank that `rank` reports to; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def depth_of(rank: int) -> int:
    """The number of tree edges from `rank` to rank 0."""
    parent = parent_of(rank)
    return 0 if parent is None else 1 + depth_of(parent)


def edges_among(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs (rank, parent) of the tree of which both are in `ranks`."""
    return [(rank, parent) for rank in ranks if (parent := parent_of(rank)) is not None and parent in ranks]


def subtree(root: int, size: int) -> Iterator[int]:
    """`root` and all ranks under it, in order."""
    first = last = root  # of a level of the subtree, which is a contiguous run
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
        """The rank that this one reports to; None for rank 0."""
        return parent_of(self.rank)

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The ranks that report to this one."""
        return tuple(range(self.rank * FAN_OUT + 1, min(self.rank * FAN_OUT + FAN_OUT, self.size - 1) + 1))

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that send messages to this rank: its parent and its children."""
        return self.children if self.parent is None else (self.parent, *self.children)

    @cached_property
    def ranks_under(self) -> dict[int, int]:
        """The number of ranks in the subtree of each child, which includes the child, and 1 for this rank."""
        return {child: len(list(subtree(child, self.size))) for child in self.children} | {self.rank: 1}
