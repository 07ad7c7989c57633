"""The plan of which rank updates which part of each variable. It is the same on all ranks, balanced by bytes. Pure.

As in ZeRO-1 (Rajbhandari et al., arXiv 1910.02054) each rank has the optimizer's state for its parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...core.fusion import buckets_from_last
from ...core.rows import rows_of_ranks
from ...core.tuning import BUCKET_BYTES, JOINED_TENSOR_BYTES

# A matrix is divided between rows if each rank gets at least so many: the gradient of an embedding has only some rows.
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
    """Variables of one dtype, concatenated to one array of a collective."""

    members: tuple[int, ...]  # The indices of the variables
    sizes: tuple[int, ...]  # The number of elements of each variable
    width: int  # The number of elements of a row of the array
    rows: tuple[int, ...]  # The number of rows of each rank, in rank order

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.rows),) if self.width == 1 else (sum(self.rows), self.width)

    def parts(self, rank: int) -> list[Part]:
        """Return a rank's part of each member. A part may be empty."""
        stop = sum(self.rows[:rank + 1]) * self.width
        start = stop - self.rows[rank] * self.width
        found = []
        for end, size in zip(accumulate(self.sizes), self.sizes, strict=True):
            first = min(max(start - end + size, 0), size)
            found.append(Part(first, max(min(stop - end + size, size), first), self.width))
        return found


@dataclass(frozen=True)
class Plan:
    """The division of the variables among the ranks."""

    # The blocks of each collective, in the order in which the backward pass computes gradients.
    buckets: tuple[tuple[Block, ...], ...]
    is_split: bool  # Whether a rank may have a part of a variable; False: whole variables only
    size: int  # The number of ranks

    def parts(self, rank: int) -> dict[int, Part]:
        """Return a rank's part of each variable, by the index of the variable."""
        return {member: part for bucket in self.buckets for block in bucket
                for member, part in zip(block.members, block.parts(rank), strict=True)}


def plan_of(tensors: Sequence[Planned], size: int, is_split: bool, indices: Sequence[int] | None = None,
            bucket_bytes: int = BUCKET_BYTES, first_bytes: int | None = None,
            small_bytes: int = JOINED_TENSOR_BYTES, owner: int | None = None) -> Plan:
    """Divide variables among `size` ranks, from the last variable to the first.

    Args:
        tensors: All variables.
        size: The number of ranks.
        is_split: True: each rank gets an equal part of each large variable, and of the small variables together. False:
            variables stay whole. Each, from the largest on, goes to the rank that has the fewest bytes so far.
        indices: The indices of the variables to divide, in rising order; None: all.
        bucket_bytes, first_bytes, small_bytes: As in tensorflow/graph/buckets.py.
        owner: The rank that gets all variables as a whole; None: all ranks get some.
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
    """Return the rank that owns each whole variable."""
    loads, owners = [0] * size, {}
    for index in sorted(indices, key=lambda index: (-tensors[index].nbytes, index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += tensors[index].nbytes
    return owners
