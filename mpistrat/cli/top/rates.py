"""Summarise a job, given its status now and a moment ago. Pure.

Called by top_command.py.
"""

from dataclasses import asdict, dataclass
from statistics import fmean

from ...core.slowest import LEAST_COST, slowest
from ...trace.stragglers import cause_of
from .status_files import SILENT_S, JobStatus, RankStatus

STALLED_S = 5.0


@dataclass(frozen=True)
class RankLine:
    """The state of a rank. `steps_per_s` and `rows_per_s` are None if nothing counts them, or no time has passed."""

    rank: int
    host: str
    pid: int
    steps: int | None
    steps_per_s: float | None
    rows_per_s: float | None
    computing: float
    waiting: float
    moving: float
    hidden: float
    rss_bytes: int
    silent_s: float


@dataclass(frozen=True)
class Stall:
    """An operation that some ranks wait for. `waiting`: ranks that have submitted it. `missing`: the other ranks."""

    name: str
    since_s: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """The state of a job."""

    # job, script, size, hosts: The name of the job, its script, its number of ranks, and its hosts.
    job: str
    script: str
    size: int
    hosts: tuple[str, ...]
    age_s: float  # Seconds since the start of the job.
    silent_s: float  # Seconds since the status file was written; 0 if less than SILENT_S.
    steps_per_s: float | None  # Steps of the job; all ranks together make one step.
    rows_per_s: float | None  # Rows of all ranks together.
    communication: float  # The share of the last interval in which ranks waited for collectives, on average.
    hidden: float  # The share in which they waited during the backward pass, on average.
    slowest: int | None  # The rank that the others wait for; None if there is none.
    why: str  # The cause of the slowness, or why there is no slowest rank.
    ranks: tuple[RankLine, ...]  # The state of each rank.
    stalls: tuple[Stall, ...]  # The operations that ranks have waited for long.


def summarize(now: JobStatus, before: JobStatus | None, time_s: float) -> Summary:
    """Summarize a job.

    Args:
        now: The newest status of the job.
        before: An older status; None if there is none.
        time_s: The current time, in seconds since 1970.
    """
    earlier = {rank.rank: rank for rank in before.ranks} if before is not None and before.started == now.started else {}
    lines = tuple(_line(rank, earlier.get(rank.rank), now.written) for rank in now.ranks)
    slowest, why = _slowest(now.ranks)
    steps = [line.steps_per_s for line in lines if line.steps_per_s is not None]
    rows = [line.rows_per_s for line in lines]
    return Summary(
        now.job, now.script, now.size, tuple(dict.fromkeys(rank.host for rank in now.ranks)), time_s - now.started,
        _silence(time_s - now.written), max(steps, default=None),
        sum(each for each in rows if each is not None) if rows and None not in rows else None,
        fmean(rank.waiting + rank.moving for rank in now.ranks) if now.ranks else 0.0,
        fmean(rank.hidden for rank in now.ranks) if now.ranks else 0.0, slowest, why, lines,
        _stalls(now.ranks))


def _line(now: RankStatus, before: RankStatus | None, written: float) -> RankLine:
    def rate(new: int | None, old: int | None) -> float | None:
        seconds = now.written - before.written if before is not None else 0.0
        return (new - old) / seconds if new is not None and old is not None and seconds > 0 else None

    return RankLine(
        now.rank, now.host, now.pid, now.steps, rate(now.steps, before.steps if before else None),
        rate(now.rows, before.rows if before else None), now.computing, now.waiting, now.moving, now.hidden,
        now.rss_bytes, _silence(written - now.written))


def _silence(seconds: float) -> float:
    return seconds if seconds >= SILENT_S else 0.0


def _slowest(ranks: tuple[RankStatus, ...]) -> tuple[int | None, str]:
    """Return the rank that waits least, if the others clearly wait for it, else None; and the cause or the reason."""
    if len(ranks) < 2:
        return None, "the job has only one rank"
    found = slowest([rank.waiting for rank in ranks])
    if found is None:
        share = fmean(rank.waiting for rank in ranks)
        return None, f"each rank waits {share:.0%} of the time" if share >= LEAST_COST else "no rank waits for another"
    place, cost = found
    last, others = ranks[place], [asdict(rank) for rank in ranks if rank is not ranks[place]]
    return last.rank, (f"the others wait {last.waiting + cost:.0%} of the time, and it {last.waiting:.0%}. "
                       f"{cause_of([asdict(last)], others, cost)}")


def _stalls(ranks: tuple[RankStatus, ...]) -> tuple[Stall, ...]:
    """Return the operations for which a rank has waited at least STALLED_S, the oldest first."""
    since: dict[str, dict[int, float]] = {}
    for rank in ranks:
        for each in rank.outstanding:
            since.setdefault(each.name, {})[rank.rank] = each.since_s
    found = [Stall(name, max(waits.values()), tuple(waits), tuple(r.rank for r in ranks if r.rank not in waits))
             for name, waits in since.items() if max(waits.values()) >= STALLED_S]
    return tuple(sorted(found, key=lambda stall: -stall.since_s))
