"""Which part of which variable each rank updates: the same on all ranks, and balanced by bytes. Pure.

The division is that of ZeRO-1 (Rajbhandari et al., arXiv 1910.02054): each rank has the optimizer's state of its parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...core.fusion import buckets_from_last
from ...core.rows import rows_of_ranks
from ...core.tuning import BUCKET_BYTES, JOINED_TENSOR_BYTES

# A matrix is divided between its rows if each rank gets so many: an embedding's gradient has some of the rows only.
_LEAST_ROWS = 64


@dataclass(frozen=True)
class Planned:
    """A variable: its shape, its dtype and the bytes of an element."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True)
class Part:
    """The elements of a flat variable from `start` to `stop` that one rank updates, in rows of `width` elements."""

    start: int
    stop: int
    width: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,) if self.width == 1 else (self.size // self.width, self.width)


@dataclass(frozen=True)
class Block:
    """Variables of one dtype that are one array of a collective, one behind the other."""

    members: tuple[int, ...]  # The indices of the variables
    sizes: tuple[int, ...]  # How many elements each has
    width: int  # How many elements a row of the array has
    rows: tuple[int, ...]  # How many rows each rank has, in rank order

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.rows),) if self.width == 1 else (sum(self.rows), self.width)

    def parts(self, rank: int) -> list[Part]:
        """The part of each member that a rank has; empty ones, too."""
        stop = sum(self.rows[:rank + 1]) * self.width
        start = stop - self.rows[rank] * self.width
        found = []
        for end, size in zip(accumulate(self.sizes), self.sizes, strict=True):
            first = min(max(start - end + size, 0), size)
            found.append(Part(first, max(min(stop - end + size, size), first), self.width))
        return found


@dataclass(frozen=True)
class Plan:
    """The division."""

    # The blocks of each collective, in the order in which the backward pass computes gradients.
    buckets: tuple[tuple[Block, ...], ...]
    is_split: bool  # Whether a rank may have a part of a variable; False: whole ones only
    size: int  # How many ranks there are

    def parts(self, rank: int) -> dict[int, Part]:
        """The part of each variable that a rank has, by the index of the variable."""
        return {member: part for bucket in self.buckets for block in bucket
                for member, part in zip(block.members, block.parts(rank), strict=True)}


def plan_of(tensors: Sequence[Planned], size: int, is_split: bool, indices: Sequence[int] | None = None,
            bucket_bytes: int = BUCKET_BYTES, first_bytes: int | None = None,
            small_bytes: int = JOINED_TENSOR_BYTES, owner: int | None = None) -> Plan:
    """Divide variables among `size` ranks, from the last variable to the first.

    Args:
        tensors: All variables.
        size: The number of ranks.
        is_split: Whether a variable may be divided: each rank has an equal part of each large one, and of the small
            ones together. False: each is of one rank, the largest first to the rank that has the fewest bytes so far.
        indices: Those of the variables to divide, in rising order; None: all.
        bucket_bytes, first_bytes, small_bytes: As in tensorflow/graph/buckets.py.
        owner: The rank that has all of them, whole ones; None: each rank has some.
    """
    indices = range(len(tensors)) if indices is None else indices
    groups = buckets_from_last([tensors[index].nbytes for index in indices], bucket_bytes, first_bytes)
    owners = dict.fromkeys(indices, owner) if owner is not None else \
        {} if is_split else _owners(tensors, indices, size)
    return Plan(tuple(tuple(_blocks(tensors, [indices[i] for i in group], size, owners, small_bytes))
                      for group in groups), is_split, size)


def _blocks(tensors: Sequence[Planned], group: Sequence[int], size: int, owners: dict[int, int],
            small_bytes: int) -> list[Block]:
    joined: dict[str, list[int]] = {}
    blocks = []
    for index in group:
        tensor = tensors[index]
        if owners or tensor.nbytes < small_bytes:
            joined.setdefault(tensor.dtype, []).append(index)
            continue
        width = tensor.shape[-1] if len(tensor.shape) == 2 and tensor.shape[0] >= _LEAST_ROWS * size else 1
        blocks.append(Block((index,), (tensor.size,), width, tuple(rows_of_ranks(tensor.size // width, size))))
    for members in joined.values():
        if owners:
            members.sort(key=lambda index: (owners[index], index))
            rows = [sum(tensors[index].size for index in members if owners[index] == rank) for rank in range(size)]
        else:
            rows = rows_of_ranks(sum(tensors[index].size for index in members), size)
        blocks.append(Block(tuple(members), tuple(tensors[index].size for index in members), 1, tuple(rows)))
    return blocks


def _owners(tensors: Sequence[Planned], indices: Sequence[int], size: int) -> dict[int, int]:
    """The rank of each whole variable."""
    loads, owners = [0] * size, {}
    for index in sorted(indices, key=lambda index: (-tensors[index].nbytes, index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += tensors[index].nbytes
    return owners
