"""The tree in which ranks negotiate: rank 0 at the root, sixteen children each. Pure arithmetic on rank numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.tuning import FAN_OUT


def parent_of(rank: int) -> int | None:
    """The rank that `rank` reports to; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def depth_of(rank: int) -> int:
    """How many steps it is from `rank` to rank 0."""
    parent = parent_of(rank)
    return 0 if parent is None else 1 + depth_of(parent)


def children_of(rank: int, size: int) -> tuple[int, ...]:
    """The ranks that report to `rank`."""
    return tuple(range(rank * FAN_OUT + 1, min(rank * FAN_OUT + FAN_OUT, size - 1) + 1))


def neighbours_of(rank: int, size: int) -> tuple[int, ...]:
    """The ranks that send to `rank`: its parent and its children."""
    parent = parent_of(rank)
    return children_of(rank, size) if parent is None else (parent, *children_of(rank, size))


def edges_among(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Those of `ranks` whose parent is among them too, each with its parent."""
    return [(rank, parent) for rank in ranks if (parent := parent_of(rank)) is not None and parent in ranks]


def subtree(root: int, size: int) -> Iterator[int]:
    """The ranks under `root`, and itself, in order."""
    for first, last in _levels(root, size):
        yield from range(first, last + 1)


def subtree_size(root: int, size: int) -> int:
    """How many ranks subtree(root, size) has."""
    return sum(last - first + 1 for first, last in _levels(root, size))


def _levels(root: int, size: int) -> Iterator[tuple[int, int]]:
    """First and last rank of each level of the subtree: a contiguous run."""
    first = last = root
    while first < size:
        yield first, min(last, size - 1)
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
        return children_of(self.rank, self.size)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that send to this one."""
        return neighbours_of(self.rank, self.size)

    @cached_property
    def ranks_under(self) -> dict[int, int]:
        """How many ranks each child stands for, itself included, and 1 for this rank."""
        return {child: subtree_size(child, self.size) for child in self.children} | {self.rank: 1}
