"""Fusion: decides which tensors share one reduction. Pure: all ranks derive the same plan from the same requests."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

from .arithmetic import Reduction, Scale
from .quantised import INT8, Quantised
from .request import Array, CollectiveType, ReduceOp, Request, is_half
from .tuning import KEPT_FUSION_PLANS, QUANTISED_LEAST_BYTES


def plan_buckets(members: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Group members into buckets, each of which is one reduction.

    A bucket starts with the first remaining member, and takes later members with the same key. Members with other keys
    are skipped, as in Horovod's look-ahead, while the bytes taken and skipped together stay within `limit`. So
    interleaved dtypes still fuse.

    Args:
        members: (key, bytes) of each tensor. Only members with equal keys (dtype, operation, scale) share a bucket.
        limit: The most bytes of a bucket. A larger member gets a separate bucket. 0: each bucket has one member.

    Returns the buckets as lists of indices into `members`, ordered by their first index.
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


def buckets_from_last(nbytes: Sequence[int], limit: int, first_limit: int | None = None) -> list[list[int]]:
    """Group gradients into buckets from the last to the first, the order in which the backward pass computes them.

    `nbytes[i]`: The bytes of gradient i. `limit`: The most bytes of a bucket; a larger gradient gets a separate bucket.
    `first_limit`: Replaces `limit` for the first bucket, if given. Returns the indices of the gradients of each bucket.
    """
    buckets: list[list[int]] = []
    used = 0
    for index in reversed(range(len(nbytes))):
        most = limit if first_limit is None or len(buckets) > 1 else first_limit
        if not buckets or (used and used + nbytes[index] > most):
            buckets.append([])
            used = 0
        buckets[-1].append(index)
        used += nbytes[index]
    return buckets


_REQUEST, _WIRE_DTYPE, _LABELS = map(attrgetter, ("request", "request.wire_dtype", "request.labels"))
_FUSED = (CollectiveType.ALLREDUCE, CollectiveType.BROADCAST)


def is_fused(request: Request) -> bool:
    """Return whether `request` may be fused with others: it is a broadcast, or an all-reduce other than Adasum."""
    return request.kind in _FUSED and request.scaled.op is not ReduceOp.ADASUM


class Submitted(Protocol):
    """What fusion reads of a handle.Entry: the request, which is equal on all ranks, and this rank's arrays."""

    request: Request
    arrays: Sequence[Array]  # In the order of `request.tensors`.


@dataclass(frozen=True, eq=False)
class FusionBucket:
    """Arrays that one all-reduce or broadcast handles together. Hashed by identity, so it may be a key of a dict."""

    request: Request  # The request of the first member. All members agree in the fields that fusion compares.
    members: tuple[tuple[int, int], ...]  # (index of the entry, index of the array in the entry) of each array.
    whole: int | None  # The index of the entry, if the bucket has exactly the arrays of one entry; else None.
    reduction: Reduction  # The arithmetic, the same for all members.


class BucketPlans:
    """Plans which arrays of a list of entries share a bucket. Caches the plans by the list of requests."""

    def __init__(self, size: int):
        self._size = size
        self._plans: dict[tuple[object, ...], list[FusionBucket]] = {}
        self._limit = 0

    def plan(self, entries: Sequence[Submitted], limit: int, divisor: int | None = None) -> list[FusionBucket]:
        """Return the buckets for all entries that may be fused (`is_fused`). The requests are equal on all ranks.

        `limit`: See plan_buckets. An average divides by `divisor`; None: by the number of ranks.
        """
        if limit != self._limit:
            self._plans.clear()
            self._limit = limit
        # Equal requests have equal arrays. With hundreds of arrays, making a plan takes longer than a small reduction.
        key = (divisor, *map(_REQUEST, entries))
        if any(map(_WIRE_DTYPE, entries)):
            # Tensors with the same name but other labels are other tensors, with a separate error feedback.
            key += tuple(map(_LABELS, entries))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_FUSION_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(entries, divisor)
        return plan

    def _make_plan(self, entries: Sequence[Submitted], divisor: int | None) -> list[FusionBucket]:
        arrays_at: list[tuple[int, int]] = []
        members: list[tuple[Hashable, int]] = []
        for index, entry in enumerate(entries):
            request = entry.request
            if is_fused(request):
                key = (request.kind, request.scaled, request.root_rank, request.device, request.wire_dtype,
                       # Error feedback is kept by index in a bucket, so buckets must be the same in each step.
                       request.name if request.wire_dtype == INT8 else "")
                arrays_at += [(index, i) for i in range(len(entry.arrays))]
                members += [((key, array.dtype), array.nbytes) for array in entry.arrays]
        buckets = []
        for indices in plan_buckets(members, self._limit):
            together = tuple(arrays_at[i] for i in indices)
            first, first_array = together[0]
            request, arrays = entries[first].request, entries[first].arrays
            whole = first if together == tuple((first, i) for i in range(len(arrays))) else None
            reduction = self.reduction(request, divisor)
            if request.wire_dtype == INT8 and reduction.op is ReduceOp.SUM:
                quantised = _quantised(request, [arrays[i] for _, i in together], first_array)
                reduction = replace(reduction, quantised=quantised)
            buckets.append(FusionBucket(request, together, whole, reduction))
        return buckets

    def reduction(self, request: Request, divisor: int | None = None) -> Reduction:
        """Return the arithmetic of a request. An average divides by `divisor`; None: by the number of ranks."""
        op, prescale, postscale = request.scaled
        average = op is ReduceOp.AVERAGE
        return Reduction(ReduceOp.SUM if average else op, prescale,
                         Scale(postscale, (divisor or self._size) if average else 1))


def _quantised(request: Request, arrays: Sequence[Array], first: int) -> Quantised | None:
    """Return how a bucket of `arrays` is quantised; None: not at all. `first`: Index of `arrays[0]` in the request."""
    dtype = arrays[0].dtype
    if not (is_half(dtype) or dtype.kind == "f") or sum(array.nbytes for array in arrays) < QUANTISED_LEAST_BYTES:
        return None
    # Only gradients have labels and repeat each step. Errors of other tensors would be added to unrelated tensors.
    if not request.labels:
        return Quantised()
    return Quantised(f"{request.name}[{first}]", request, request.labels)
