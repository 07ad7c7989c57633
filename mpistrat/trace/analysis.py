"""Analysis of a timeline: where each rank's time went, late and missing ranks, unfused operations. Pure functions."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.quantised import INT8
from .records import NO_STEP, Record, Span, arrival_of, by_operation, hidden, length, union
from .timeline import label

_FUSED = ("allreduce", "broadcast")
# The names of mpistrat's own operations: of the checks of first steps, of commits, and at the end of fit's epochs.
_OWN = re.compile(r"check/|elastic\.|(?:.*/)?optimizer\d+/(?:fit|callbacks|weights)\b")


@dataclass(frozen=True)
class RankTime:
    """The shares of the timeline that one rank spent computing, waiting, agreeing and moving data; their sum is 1."""

    rank: int
    computing: float  # No operation was outstanding.
    waiting: float  # An operation was outstanding, which some rank had not submitted.
    agreeing: float  # All ranks had submitted the outstanding operations, and none ran: negotiation and queue.
    moving: float  # A reduction ran, or a gather or another operation.
    # The share of the time of a step's operations in which the step still made gradients; None without steps.
    hidden: float | None


@dataclass(frozen=True)
class Straggler:
    """A rank that was the last one to submit some operations."""

    rank: int
    operations: int  # In how many operations it was the last.
    late_s: float  # The median delay after the first rank in these operations.
    cost_s: float  # The seconds in which some rank has waited for this rank.


@dataclass(frozen=True)
class Unfused:
    """Operations that were not fused, all for the same reason. mpistrat's own operations are left out."""

    reason: str  # The reason, as a clause.
    operations: int  # The number of these operations, counted on one rank of each process set.
    names: tuple[str, ...]  # The names of the operations, the most frequent names first.


@dataclass(frozen=True)
class Unfinished:
    """An operation on which the ranks had not agreed when the job failed."""

    name: str
    waiting: tuple[int, ...]  # The ranks that had submitted the operation.
    missing: tuple[int, ...]  # The ranks that had not submitted the operation.
    absent: int  # The number of further ranks in the process set, of which the timeline has no records.
    seconds: float  # The seconds that the first rank had waited.


@dataclass(frozen=True)
class Rate:
    """The bytes per second of all operations of one kind, measured on one rank of each process set."""

    what: str  # The kind of operation, such as "SHM_ALLREDUCE".
    operations: int  # The number of operations of this kind.
    nbytes: int  # Their bytes.
    bytes_per_s: float  # While such an operation ran.


@dataclass(frozen=True)
class Analysis:
    """The results of `analyse`."""

    seconds: float  # From the first submission to the last result.
    steps: int  # How many steps of training the timeline has.
    operations: int  # How many operations were carried out. An operation of several ranks counts once.
    ranks: tuple[RankTime, ...]  # In the order of the ranks.
    stragglers: tuple[Straggler, ...]  # The rank with the greatest `cost_s` comes first.
    unfinished: tuple[Unfinished, ...]  # The operation with the longest wait comes first.
    unfused: tuple[Unfused, ...]  # The most frequent reason comes first.
    rates: tuple[Rate, ...]  # In the order of their names; of the lowest rank of each process set.


def analyse(records: Sequence[Record]) -> Analysis:
    """Return the analysis of `records`, of which there must be at least one."""
    by_rank: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_rank[record.rank].append(record)
    together = by_operation(each for each in records if each.is_complete)
    whole = min(each.submitted or each.agreed for each in records), max(each.delivered for each in records)
    last_submitted = last_submissions(records)
    first_of_sets = [min(some, key=lambda each: each.rank) for some in together.values()]
    return Analysis((whole[1] - whole[0]) / 1e9, len({each.step for each in records} - {NO_STEP}), len(together),
                    tuple(_rank_time(rank, some, last_submitted, whole) for rank, some in sorted(by_rank.items())),
                    _stragglers(list(together.values())), _unfinished(records), _unfused(first_of_sets),
                    _rates(first_of_sets))


def last_submissions(records: Sequence[Record]) -> dict[tuple[int, int], int]:
    """Return, by (process set, number), when an operation's last rank submitted it, or the job failed before that."""
    last: dict[tuple[int, int], int] = {}
    for record in records:
        key = record.process_set, record.number
        last[key] = max(record.submitted if record.is_complete else record.delivered, last.get(key, 0))
    return last


def _rank_time(rank: int, records: Sequence[Record], last_submitted: dict[tuple[int, int], int],
               whole: Span) -> RankTime:
    moving = union((each.began, each.ended) for each in records)
    waiting = union([*moving, *((each.submitted, last_submitted[each.process_set, each.number]) for each in records
                                if each.submitted)])
    outstanding = union([*waiting, *((each.submitted or each.agreed, each.delivered) for each in records)])
    total = max(whole[1] - whole[0], 1)
    by_step: defaultdict[int, list[Span]] = defaultdict(list)
    for record in records:
        if record.step != NO_STEP and record.submitted:
            by_step[record.step].append((record.submitted, record.delivered))
    of_steps = length(union(span for some in by_step.values() for span in some))
    return RankTime(rank, 1 - length(outstanding) / total, (length(waiting) - length(moving)) / total,
                    (length(outstanding) - length(waiting)) / total, length(moving) / total,
                    length(hidden(by_step.values())) / of_steps if of_steps else None)


def _stragglers(operations: Sequence[Sequence[Record]]) -> tuple[Straggler, ...]:
    waits: defaultdict[int, list[Span]] = defaultdict(list)
    for some in operations:
        arrival = arrival_of(some)
        if arrival is not None:
            waits[arrival.rank].append((arrival.first, arrival.last))
    found = [Straggler(rank, len(spans), statistics.median(end - begin for begin, end in spans) / 1e9,
                       length(union(spans)) / 1e9) for rank, spans in waits.items()]
    return tuple(sorted(found, key=lambda each: -each.cost_s))


def _unfinished(records: Sequence[Record]) -> tuple[Unfinished, ...]:
    known: defaultdict[int, set[int]] = defaultdict(set)  # the ranks of each process set, as far as the file has any
    for record in records:
        known[record.process_set].add(record.rank)
        known[0].add(record.rank)  # the set of all ranks
    found = []
    for (process_set, _), some in by_operation(each for each in records if not each.is_complete).items():
        waiting = {each.rank for each in some}
        missing = known[process_set] - waiting
        found.append(Unfinished(some[0].name, tuple(sorted(waiting)), tuple(sorted(missing)),
                                some[0].ranks - len(waiting | missing),
                                max(each.delivered - each.submitted for each in some) / 1e9))
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _unfused(records: Sequence[Record]) -> tuple[Unfused, ...]:
    buckets = Counter((each.process_set, each.bucket) for each in records)
    rounds: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)  # What was agreed on at the same time.
    for record in records:
        rounds[record.process_set, record.agreed].append(record)
    names: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for some in rounds.values():
        for record in some:
            if buckets[record.process_set, record.bucket] == 1 and record.nbytes and not _OWN.match(record.name):
                names[_reason(record, [other for other in some if other is not record])][record.name] += 1
    found = [Unfused(reason, counter.total(), tuple(name for name, _ in counter.most_common()))
             for reason, counter in names.items()]
    return tuple(sorted(found, key=lambda each: -each.operations))


def _reason(record: Record, others: Sequence[Record]) -> str:
    if record.kind not in _FUSED or record.op == "adasum":
        return f"{'an adasum' if record.op == 'adasum' else record.kind} is never fused"
    if record.dtype.endswith(f" as {INT8}"):
        return f"{record.dtype} is never fused"
    fused = [other for other in others if other.kind in _FUSED and other.op != "adasum"]
    if not fused:
        return "nothing else was ready"
    alike = [other for other in fused if (other.kind, other.op, other.device) == (record.kind, record.op,
                                                                                  record.device)]
    if not alike:
        return "only collectives of another kind, op or device were ready"
    if all(other.dtype != record.dtype for other in alike):
        return f"only collectives of another dtype than {record.dtype} were ready"
    return "the fusion buffer was full (MPISTRAT_FUSION_THRESHOLD), or a scale factor differed"


def _rates(records: Sequence[Record]) -> tuple[Rate, ...]:
    by_kind: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.nbytes:
            by_kind[f"{label(record)}_{record.kind.upper()}"].append(record)
    rates = []
    for what, some in sorted(by_kind.items()):
        seconds = length(union((each.began, each.ended) for each in some)) / 1e9
        nbytes = sum(each.nbytes for each in some)
        rates.append(Rate(what, len(some), nbytes, nbytes / seconds if seconds else 0.0))
    return tuple(rates)
