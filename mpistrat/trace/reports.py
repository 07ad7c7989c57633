"""The report that each rank makes once a second, and what rank 0 does with the reports of all ranks.

Rank 0 writes the reports to the status file for `mpistrat top`, warns of slow ranks, and prints the speed of the job at
its end. The file is `<host>-<pid>.json` in `${XDG_RUNTIME_DIR:-/tmp}/mpistrat-<uid>/`, a directory that only the user
may read. The file exists from the first second of a job to its end.

The tracer calls the methods. This module starts no threads.
"""

import contextlib
import glob
import json
import logging
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ..core.handle import Entry
from ..core.ownership import own_directory
from ..core.slowest import Waits, figure, shares_of, total
from ..core.topology import Topology
from .records import Operation, Reader, Span, StepCounter, hidden, is_of_gradients, length, union
from .stragglers import ProcessorUse, StragglerWatch

logger = logging.getLogger(__name__)

VERSION = 1  # of the status file
_MOST_OUTSTANDING = 8  # operations that are listed for a rank
_MOST_CHARACTERS = 120  # of a name
# A job with less than either gets no line on its speed.
_LEAST_S, _LEAST_OPERATIONS = 5.0, 20


class Reports:
    """The reports of this rank, and on rank 0 those of all ranks. For the arguments see Tracer."""

    def __init__(self, topology: Topology, place: Callable[[], str], environ: Mapping[str, str]):
        self._topology, self._place = topology, place
        self._status: StatusFile | None = None
        if not topology.rank:
            try:
                self._status = StatusFile(topology.size, environ)
            except OSError as error:
                logger.info("rank 0: the status file for mpistrat top cannot be created: %s", error)
        self._use = ProcessorUse()
        self.stragglers = StragglerWatch()  # Used on rank 0.
        self._newest: dict[int, dict[str, Any]] = {}  # the report of each rank
        self._totals: dict[int, Totals] = {topology.rank: Totals()}

    def add_own(self, interval: Span, reader: Reader, recent: Sequence[Operation], in_flight: Iterable[Entry],
                rows: int | None) -> bytes:
        """Make the report of this rank on the time since its last report, and return it as a message for rank 0.

        `recent`: The operations that were read in this interval. `in_flight`: The entries that are submitted and not
        complete. `rows`: How many rows this rank has trained on; None: the rows are not counted.
        """
        in_flight = list(in_flight)
        found = waits(recent, in_flight, interval)
        _, waiting, moving, hidden = (round(seconds / found.seconds, 4) for seconds in found)
        cores, delayed = self._use.since_last()
        rank, steps = self._topology.rank, reader.counter.steps
        self._totals[rank].add(found, steps, reader.operations)
        self._newest[rank] = {
            "rank": rank, "host": self._topology.host, "pid": os.getpid(), "steps": steps or None, "rows": rows,
            "operations": reader.operations, "bytes": reader.nbytes,
            "computing": round(1 - waiting - moving, 4), "waiting": waiting, "moving": moving, "hidden": hidden,
            "cores": round(cores, 3), "delayed": round(delayed, 3), "place": self._place(), "rss_bytes": rss_bytes(),
            "outstanding": outstanding(in_flight, interval[1]), "written": time.time()}
        return json.dumps(self._newest[rank]).encode()

    def add(self, report: bytes) -> None:
        """On rank 0: store the report of another rank."""
        found = json.loads(report)
        self._newest[found["rank"]] = found

    def publish(self) -> None:
        """On rank 0: log a warning if the other ranks wait for one slow rank, and write the status file."""
        straggler = self.stragglers.add(self._newest)
        if straggler is not None:
            logger.warning("mpistrat: %s", straggler)
        if self._status is not None:
            try:
                self._status.write([self._newest[rank] for rank in sorted(self._newest)])
            except OSError as error:
                logger.warning("mpistrat: the status file for mpistrat top cannot be written any more: %s", error)
                self._status = None

    @property
    def places(self) -> dict[int, str]:
        """On rank 0: the place in the script where each rank is. Ranks whose place is unknown are left out."""
        return {rank: report["place"] for rank, report in self._newest.items() if report["place"]}

    @property
    def own_totals(self) -> bytes:
        """The totals of this rank over the whole job, as a message for rank 0."""
        return json.dumps([self._topology.rank, astuple(self._totals[self._topology.rank])]).encode()

    def add_totals(self, totals: bytes) -> None:
        """On rank 0: store the totals of another rank. They are the last message of that rank."""
        rank, (waits, *counts) = json.loads(totals)
        self._totals[rank] = Totals(Waits(*waits), *counts)

    @property
    def line(self) -> str:
        return line_of(self._totals, self._topology.host_of)

    def close(self) -> None:
        """Remove the status file. May be called twice."""
        if self._status is not None:
            self._status.remove()


# -- the parts of a report ---------------------------------------------------------------------------------------------


def waits(operations: Sequence[Operation], in_flight: Iterable[Entry], interval: Span) -> Waits:
    """Return how long a rank waited for other ranks and moved data in `interval`, and how much of this was hidden.

    A rank waits from the submission of an operation until the ranks agree on it. It moves data from then until the
    result is delivered. Otherwise it computes. The time in a collective is hidden while gradients are still computed.

    `operations`: In the order of execution.
    """
    moving = length(union([(each.agreed, each.delivered) for each in operations], interval))
    joined = [(each.agreed, each.delivered) for each in operations if not each.submitted]
    submitted = [*((each.request, (each.submitted, each.delivered)) for each in operations if each.submitted),
                 *((entry.request, (entry.submitted, interval[1])) for entry in in_flight if entry.submitted)]
    outstanding = length(union([*joined, *(span for _, span in submitted)], interval))
    counter, spans = StepCounter(), defaultdict[int, list[Span]](list)
    for request, span in submitted:
        step = counter.add(request)
        if is_of_gradients(request):
            spans[step].append(span)
    return Waits(*(ns / 1e9 for ns in (max(interval[1] - interval[0], 1), outstanding - moving, moving,
                                       length(union(hidden(spans.values()), interval)))))


def outstanding(in_flight: Iterable[Entry], now: int) -> list[dict[str, Any]]:
    """Return the operations that have been outstanding for the longest time, each with its name and age in seconds."""
    oldest = sorted((entry for entry in in_flight if entry.submitted), key=lambda entry: entry.submitted)
    return [{"name": entry.request.name[:_MOST_CHARACTERS], "since_s": round((now - entry.submitted) / 1e9, 3)}
            for entry in oldest[:_MOST_OUTSTANDING]]


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if /proc is not available."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


# -- the totals of a job -----------------------------------------------------------------------------------------------


@dataclass
class Totals:
    """The sum of a rank's reports. Not counted: reports without collectives, and the first report with collectives."""

    waits: Waits = field(default=Waits())  # The waits in these intervals.
    steps: int = 0  # Steps of training in these intervals; 0 if steps are not counted.
    operations: int = 0  # Collectives in these intervals.

    def __post_init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def add(self, waits: Waits, steps: int, operations: int) -> None:
        """Add a report. `steps` and `operations` count from the start of the job to the time of the report."""
        before, self._before = self._before, (steps, operations)
        if before is None:
            self._before = self._before if operations else None
        elif operations > before[1]:
            self.waits = total([self.waits, waits])
            self.steps += steps - before[0]
            self.operations += operations - before[1]


def line_of(totals: Mapping[int, Totals], hosts: Sequence[str]) -> str:
    """Return the line on a job's speed; "" for one rank, for a very short job, or if a rank's totals are missing."""
    shortest = min((each.waits.seconds for each in totals.values()), default=0.0)
    fewest = min((each.operations for each in totals.values()), default=0)
    if len(hosts) < 2 or len(totals) < len(hosts) or shortest < _LEAST_S or fewest < _LEAST_OPERATIONS:
        return ""
    longest = max(each.waits.seconds for each in totals.values())
    steps = max(each.steps for each in totals.values())
    done, unit = (steps, "steps") if steps else (max(each.operations for each in totals.values()), "collectives")
    shares = shares_of([totals[rank].waits for rank in range(len(hosts))],
                       [f"rank {rank} on {host}" for rank, host in enumerate(hosts)])
    return f"mpistrat: {len(hosts)} ranks have done {figure(done / longest)} {unit} per second{shares}."


# -- the status file ---------------------------------------------------------------------------------------------------


def status_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory for the status files of this user's jobs on this host. The directory may not exist."""
    return Path(environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"mpistrat-{os.getuid()}"


class StatusFile:
    """Writes the status file of a job of `size` ranks, on rank 0.

    `environ`: May have XDG_RUNTIME_DIR, and the id of the job from PMIx or Slurm. Raises OSError: The directory of the
    file cannot be made, or is open to other users.
    """

    def __init__(self, size: int, environ: Mapping[str, str]):
        directory = status_directory(environ)
        own_directory(directory, 0o700, 0o077)
        for path in directory.glob(f"{glob.escape(platform.node())}-*.json"):
            process = f"/proc/{path.stem.rpartition('-')[2]}"
            if os.path.exists("/proc/self") and not os.path.exists(process):  # Its job was killed.
                path.unlink(missing_ok=True)
        name = f"{platform.node()}-{os.getpid()}"
        self.path = directory / f"{name}.json"
        self._pid = os.getpid()
        self._head = {"version": VERSION, "job": environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID") or name,
                      "started": time.time(), "size": size, "script": sys.argv[0] if sys.argv else ""}

    def write(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Replace the file atomically: a reader sees the old file or the new file. Raises OSError.

        `ranks`: The latest report of each rank that has sent a report.
        """
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self._head, "written": time.time(), "ranks": ranks}))
        new.replace(self.path)

    def remove(self) -> None:
        """Remove the file if possible. May be called twice. Does nothing in a forked process."""
        if os.getpid() == self._pid:
            for path in (self.path, self.path.with_suffix(".new")):
                with contextlib.suppress(OSError):
                    path.unlink()
