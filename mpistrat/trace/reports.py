"""The report that each rank makes once a second, and the use of all reports on rank 0: warnings and the status file.

Starts no threads: the tracer calls the methods.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from ..core.handle import Entry
from ..core.slowest import Waits
from ..core.topology import Topology
from .reader import Reader
from .record_ring import Operation
from .spans import Span
from .status import StatusFile, outstanding, rss_bytes, waits
from .stragglers import ProcessorUse, StragglerWatch
from .totals import Totals, line_of

logger = logging.getLogger(__name__)


class Reports:
    """The reports of this rank, and on rank 0 those of all ranks.

    Args:
        place: Returns where in the script this rank is, for the warning on a slow rank.
        status: The file to which rank 0 writes the reports; None: no file.
    """

    def __init__(self, topology: Topology, place: Callable[[], str], status: StatusFile | None):
        self._topology, self._place, self._status = topology, place, status
        # stragglers: On rank 0, the watch for slow ranks, which names each rank once.
        self._use, self.stragglers = ProcessorUse(), StragglerWatch()
        self._newest: dict[int, dict[str, Any]] = {}  # the report of each rank
        self._totals: dict[int, Totals] = {topology.rank: Totals()}

    def add_own(self, interval: Span, reader: Reader, recent: Sequence[Operation], in_flight: Iterable[Entry],
                rows: int | None) -> bytes:
        """Return the report of this rank on an interval, for rank 0.

        Args:
            interval: The time since the last report.
            reader: The reader, which has counted the operations and steps.
            recent: The operations that were read since the last report.
            in_flight: The entries that are submitted and not complete.
            rows: How many rows this rank has trained on; None: the rows are not counted.
        """
        in_flight = list(in_flight)
        found = waits(recent, in_flight, interval)
        _, waiting, moving, hidden = (round(seconds / found.seconds, 4) for seconds in found)
        cores, delayed = self._use.since_last()
        rank, steps = self._topology.rank, reader.steps.steps
        self._totals[rank].add(found, steps, reader.operations)
        self._newest[rank] = {
            "rank": rank, "host": self._topology.host, "pid": os.getpid(), "steps": steps or None, "rows": rows,
            "operations": reader.operations, "bytes": reader.nbytes,
            "computing": round(1 - waiting - moving, 4), "waiting": waiting, "moving": moving, "hidden": hidden,
            "cores": round(cores, 3), "delayed": round(delayed, 3), "place": self._place(), "rss_bytes": rss_bytes(),
            "outstanding": outstanding(in_flight, interval[1]), "written": time.time()}
        return json.dumps(self._newest[rank]).encode()

    def add(self, report: bytes) -> None:
        """On rank 0: take the report of another rank."""
        found = json.loads(report)
        self._newest[found["rank"]] = found

    def publish(self) -> None:
        """On rank 0: log a warning on a rank for which the others wait, if any, and write the status file."""
        straggler = self.stragglers.add(self._newest)
        if straggler is not None:
            logger.warning("mpistrat: %s", straggler)
        if self._status is not None:
            try:
                self._status.write([self._newest[rank] for rank in sorted(self._newest)])
            except OSError as error:
                logger.warning("mpistrat: the status file cannot be written any more: %s", error)
                self._status = None

    @property
    def places(self) -> dict[int, str]:
        """On rank 0: where in the script each rank is. Ranks whose place is unknown are left out."""
        return {rank: report["place"] for rank, report in self._newest.items() if report["place"]}

    @property
    def own_totals(self) -> bytes:
        """The totals of this rank over the whole job, as a message for rank 0."""
        return json.dumps([self._topology.rank, astuple(self._totals[self._topology.rank])]).encode()

    def add_totals(self, totals: bytes) -> None:
        """On rank 0: take the totals of another rank, which are its last message."""
        rank, (waits, *counts) = json.loads(totals)
        self._totals[rank] = Totals(Waits(*waits), *counts)

    @property
    def line(self) -> str:
        """On rank 0, a sentence on the speed of the job, after the engines have ended; "" if there is none."""
        if len(self._totals) < self._topology.size:
            return ""
        return line_of(self._totals, {rank: f"rank {rank} on {host}"
                                      for rank, host in enumerate(self._topology.host_of)})

    def close(self) -> None:
        """Remove the status file. May be called twice."""
        if self._status is not None:
            self._status.remove()


def status_file(topology: Topology, environ: Mapping[str, str]) -> StatusFile | None:
    """Return the status file of the job on rank 0; None on other ranks, and if the file cannot be made (logged)."""
    if topology.rank:
        return None
    try:
        return StatusFile(topology.size, environ)
    except OSError as error:
        logger.info("rank 0: there is no status file for mpistrat top: %s", error)
        return None
