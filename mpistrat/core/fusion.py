"""Fusion: which tensors share one reduction. Pure: all ranks make the same plan of the same requests."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .arithmetic import Reduction, Scale
from .request import CollectiveType, ReduceOp, Request


def plan_buckets(members: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Group members into buckets that are reduced as one. Pure: all ranks get the same plan from the same members.

    Starts with the first member and adds later ones of the same key. On one of another key it looks ahead, as Horovod
    does, as long as what is taken and what is skipped together stay within `limit`; so interleaved dtypes still fuse.

    Args:
        members: (key, bytes) of each tensor; only equal keys (dtype, operation, scale) may share a bucket.
        limit: Bytes in a bucket. A larger member gets a bucket of its own; 0: every member does.

    Returns:
        Buckets as lists of indices into `members`, in order of their first index.
    """
    buckets = []
    waiting = list(range(len(members)))
    while waiting:
        key, used = members[waiting[0]]
        bucket, skipped, seen_bytes = [waiting[0]], [], 0
        for position in range(1, len(waiting)):
            index = waiting[position]
            other_key, nbytes = members[index]
            if other_key == key and used + nbytes <= limit:
                bucket.append(index)
                used += nbytes
                continue
            seen_bytes += nbytes
            skipped.append(index)
            if used + seen_bytes > limit:
                skipped += waiting[position + 1:]
                break
        buckets.append(bucket)
        waiting = skipped
    return buckets


FUSED = (CollectiveType.ALLREDUCE, CollectiveType.BROADCAST)
_KEPT_PLANS = 1024


class Submitted(Protocol):
    """A request and its tensors, of which dtype and nbytes matter here."""

    @property
    def request(self) -> Request:
        """The request, as on all ranks."""

    @property
    def arrays(self) -> Sequence[Any]:
        """The tensors in the order of `request.tensors`."""


@dataclass(frozen=True)
class Bucket:
    """What is reduced, or broadcast, as one: `members[i]` is (place of the entry, place of the array in it).

    Attributes:
        whole: The place of an entry that is all there is in it, or None.
    """

    request: Request
    members: tuple[tuple[int, int], ...]
    whole: int | None
    reduction: Reduction


class BucketPlans:
    """Plans for lists of entries, which are the same on all ranks; the plans of lists seen before are kept.

    Args:
        size: How many ranks there are.
    """

    def __init__(self, size: int):
        self._size = size
        self._plans: dict[tuple[Request, ...], list[Bucket]] = {}
        self._limit = 0

    def plan(self, entries: Sequence[Submitted], limit: int) -> list[Bucket]:
        """The buckets of the entries' arrays, of at most `limit` bytes each; only what is of a kind in FUSED."""
        if limit != self._limit:
            self._plans.clear()
            self._limit = limit
        # The arrays follow from the requests, and with hundreds of them a plan takes longer than a small reduction.
        key = tuple([entry.request for entry in entries])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(entries)
        return plan

    def _make_plan(self, entries: Sequence[Submitted]) -> list[Bucket]:
        places: list[tuple[int, int]] = []
        members: list[tuple[Hashable, int]] = []
        for place, entry in enumerate(entries):
            request = entry.request
            if request.kind in FUSED:
                alike = (request.kind, request.reduce_op, request.root_rank, request.prescale, request.postscale,
                         request.device, request.wire)
                places += [(place, i) for i in range(len(entry.arrays))]
                members += [((alike, array.dtype), array.nbytes) for array in entry.arrays]
        buckets = []
        for indices in plan_buckets(members, self._limit):
            place = places[indices[0]][0]
            request, arrays = entries[place].request, entries[place].arrays
            chosen = tuple(places[i] for i in indices)
            whole = place if chosen == tuple((place, i) for i in range(len(arrays))) else None
            average = request.reduce_op is ReduceOp.AVERAGE
            reduction = Reduction(ReduceOp.SUM if average else request.reduce_op, request.prescale,
                                  Scale(request.postscale, self._size if average else 1))
            buckets.append(Bucket(request, chosen, whole, reduction))
        return buckets
