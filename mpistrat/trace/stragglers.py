"""Finds the straggler, the rank for which the others wait, and what it does meanwhile. Pure, except `ProcessorUse`.

The last rank to submit a collective does not wait. So the slowest rank is the rank that waits least. Its cost is the
time by which the other ranks wait longer, on average.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import monotonic_ns
from typing import Any

_INTERVALS = 10  # that are kept
_LEAST_INTERVALS, _LEAST_STEPS = 2, 10  # before a rank is named
_LAST_IN = 0.9  # of the intervals
_LEAST_COST = 0.1  # of the time
_MUCH_DELAY, _LITTLE_USE = 0.2, 0.5
_MOST_OF_COST = 2 / 3


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    host: str
    cost: float  # The share of the time that the other ranks wait longer than this rank.
    cause: str  # A sentence on what this rank does during these waits.

    def __str__(self) -> str:
        return (f"rank {self.rank} on {self.host} is slower than the others, which wait for it {self.cost:.0%} of the "
                f"time. {self.cause}")


class StragglerWatch:
    """Finds the straggler of a job from the reports of all ranks. Returns each rank at most once."""

    def __init__(self) -> None:
        self._intervals: deque[Mapping[int, Mapping[str, Any]]] = deque(maxlen=_INTERVALS)
        self._named: set[int] = set()

    def add(self, reports: Mapping[int, Mapping[str, Any]]) -> Straggler | None:
        """Add the latest report of each rank. Return a straggler that no earlier call has returned, or None."""
        reports = dict(reports)  # The engine's thread adds to them.
        if len(reports) < 2 or any(report["steps"] is None for report in reports.values()):
            return None
        self._intervals.append(reports)
        # An interval without a step, such as one of a validation, says nothing.
        trained = [late for early, late in zip(self._intervals, list(self._intervals)[1:], strict=False)
                   if early.keys() == late.keys() and all(late[rank]["steps"] > early[rank]["steps"] for rank in late)]
        first, last = self._intervals[0], self._intervals[-1]
        steps = min(last[rank]["steps"] - first.get(rank, last[rank])["steps"] for rank in last)
        if len(trained) < _LEAST_INTERVALS or steps < _LEAST_STEPS:
            return None
        latest = [min(interval, key=lambda rank: interval[rank]["waiting"]) for interval in trained]
        rank = max(set(latest), key=latest.count)
        own = [interval[rank] for interval in trained]
        others = [report for interval in trained for each, report in interval.items() if each != rank]
        cost = fmean(report["waiting"] for report in others) - fmean(report["waiting"] for report in own)
        if rank in self._named or latest.count(rank) < _LAST_IN * len(latest) or cost < _LEAST_COST:
            return None
        self._named.add(rank)
        return Straggler(rank, last[rank]["host"], cost, cause_of(own, others, cost))


def cause_of(reports: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], cost: float) -> str:
    """Return a sentence on why a rank is slow, from its `reports` and those of the `others`. `cost`: See Straggler."""
    delayed, cores = (fmean(report[key] for report in reports) for key in ("delayed", "cores"))
    used_by_others = fmean(report["cores"] for report in others)
    # On a busy machine all ranks are delayed alike, for each second of a core that they use.
    delayed_alike = cores * fmean(report["delayed"] for report in others) / used_by_others if used_by_others else 0.0
    place = _place_of(reports, others)
    at = f" Its main thread was {place}" if place else ""
    # The rank has lost at most the sum of the delays of its threads. On a busy machine a sleeping rank has delays too:
    # 0.4 of its cost, whereas a rank with three processes on its core had twice its cost. The delay of the main thread
    # alone says less: 0.08 s of 0.92 on such a core, while TensorFlow's threads computed the step.
    if delayed - delayed_alike > max(_MUCH_DELAY, _MOST_OF_COST * cost):
        return (f"Other processes run on its cores: its threads were ready to run, but waited for a core for "
                f"{delayed:.1f} s of each second.{at}")
    if cores + delayed_alike < _LITTLE_USE:
        return (f"It has used {cores:.2f} cores, so it does not compute, but waits: for data of the input pipeline, a "
                f"file, a lock, or a sleep.{at}")
    if cores < _LITTLE_USE:
        return (f"It could compute little: it has used {cores:.1f} cores, and its threads waited for a core for "
                f"{delayed:.1f} s of each second. The threads of the other ranks waited as much, because other "
                f"processes run on the cores of all ranks.{at}")
    return f"It computes: it has used {cores:.1f} cores. It has more to do than the others, or slower cores.{at}"


def _place_of(reports: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """Return the place in the script that is more frequent in the reports of a rank than in `others`; "" if unknown.

    The difference counts, because the most frequent place of every rank is the training step.
    """
    places = [report["place"] for report in reports if report["place"]]
    elsewhere = [report["place"] for report in others if report["place"]]

    def excess(place: str) -> float:
        return places.count(place) / len(places) - (elsewhere.count(place) / len(elsewhere) if elsewhere else 0.0)

    return max(reversed(places), key=excess, default="")  # Of places with equal excess, the latest.


class ProcessorUse:
    """The processor time that this process uses, and the time that it waits for a core; the wait is 0 without /proc."""

    def __init__(self) -> None:
        self._before = self._now()

    def since_last(self) -> tuple[float, float]:
        """Return the mean number of cores in use, and of threads that waited for a core, since the last call."""
        before, self._before = self._before, self._now()
        elapsed, used, delayed = (now - then for now, then in zip(self._before, before, strict=True))
        return (used / elapsed, max(delayed, 0) / elapsed) if elapsed > 0 else (0.0, 0.0)

    @staticmethod
    def _now() -> tuple[int, int, int]:
        """Return in ns the present time, the processor time of all threads, and how long they waited for a core."""
        times = os.times()
        delayed = 0
        try:
            threads = os.listdir("/proc/self/task")
        except OSError:
            threads = []
        for thread in threads:
            try:
                with open(f"/proc/self/task/{thread}/schedstat") as file:
                    delayed += int(file.read().split()[1])
            except (OSError, IndexError):  # The thread has ended, or the kernel does not count.
                continue
        return monotonic_ns(), int((times.user + times.system) * 1e9), delayed
