"""Which of the arrays that are ready share one reduction, worked out once for each list of requests."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .fusion import plan_buckets
from .messages import Kind, ReduceOp, Request
from .scale import Scale
from .tensor_queue import Entry

FUSED = (Kind.ALLREDUCE, Kind.BROADCAST)
_KEPT_PLANS = 1024


@dataclass(frozen=True)
class Bucket:
    """What is reduced, or broadcast, as one: `members[i]` is (place of the entry, place of the array in it).

    Attributes:
        whole: The place of an entry that is all there is in it, or None.
    """

    request: Request
    members: tuple[tuple[int, int], ...]
    whole: int | None
    op: ReduceOp
    scale: Scale


class BucketPlans:
    """Plans for lists of entries, which are the same on all ranks; the plans of lists seen before are kept.

    Args:
        size: How many ranks there are.
    """

    def __init__(self, size: int):
        self._size = size
        self._plans: dict[tuple[Request, ...], list[Bucket]] = {}
        self._limit = 0

    def plan(self, entries: Sequence[Entry], limit: int) -> list[Bucket]:
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

    def _make_plan(self, entries: Sequence[Entry]) -> list[Bucket]:
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
            buckets.append(Bucket(request, chosen, whole, ReduceOp.SUM if average else request.reduce_op,
                                  Scale(request.postscale, self._size if average else 1)))
        return buckets
