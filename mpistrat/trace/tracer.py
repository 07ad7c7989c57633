"""The tracer of one rank: a thread that reads what the engines have recorded, and tells rank 0 about it.

Once a second each rank sends rank 0 a report, for the status file. While a timeline is written, it sends its operations
too. Rank 0 sends a message in each second to all ranks: their answers show how far their clocks are from its own. The
messages travel with those of the negotiation, and a rank that waits in a collective sends none. The tracer never waits
for another rank, and what it cannot do is a warning or a line of the log: training goes on.
"""

import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..core.interfaces import TraceLink
from ..core.topology import Topology
from .clocks import Offset
from .ring import Operation, Traced
from .status import StatusFile, outstanding, rss_bytes, shares
from .steps import StepCounter
from .stragglers import ProcessorUse, StragglerWatch

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_CLOCK, _REPORT = b"C", b"S"
_SENT = struct.Struct("<q")
_ANSWER = struct.Struct("<Qqqq")  # the rank, and the times of Offset.add but the last one


class Tracer(TraceLink):
    """See above. `start` begins, `stop` ends.

    Args:
        topology: The ranks of the job.
        offsets: On rank 0, the offset of each rank's clock in init(), in nanoseconds.
        writes_status: Whether rank 0 writes the status file.
        environ: See StatusFile.
        place: Returns where in the script this rank is, for sentences on a rank that is slow.

    Attributes:
        rows: Returns the rows that this rank has trained on; None: nobody counts them.
    """

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], writes_status: bool,
                 environ: Mapping[str, str], place: Callable[[], str] = str):
        super().__init__()
        self._topology, self._offsets = topology, offsets
        self._writes_status, self._environ, self._place = writes_status, environ, place
        self.rows: Callable[[], int] | None = None
        self._traced: Callable[[], Mapping[int, Traced]] = dict
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._next: dict[int, int] = {}  # The number of the next operation of each process set.
        self._steps, self._use = StepCounter(), ProcessorUse()
        self._operations = self._bytes = 0
        self._asked = (0, 0)  # When rank 0 has sent the latest message about clocks, and when it arrived.
        self._reports: dict[int, dict[str, Any]] = {}

    def start(self, traced: Callable[[], Mapping[int, Traced]], wake: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            traced: Returns what there is to read of each process set of this rank, by its id.
            wake: Lets the engine of all ranks look at `outgoing`.
        """
        self._traced, self._wake = traced, wake
        self._thread = threading.Thread(target=self._run, name="mpistrat-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Local. May be called twice."""
        self._ends.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    # -- in the thread that drives the engine -------------------------------------------------------------------------

    def receive(self, message: bytes) -> None:
        kind, body, now = message[:1], message[1:], time.monotonic_ns()
        if kind == _CLOCK and self._topology.rank:
            self._asked = _SENT.unpack(body)[0], now
        elif kind == _CLOCK:
            rank, sent, received, answered = _ANSWER.unpack(body)
            self._offsets[rank].add(sent, received, answered, now)
        elif kind == _REPORT:
            report = json.loads(body)
            self._reports[report["rank"]] = report

    # -- in the tracer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        status, stragglers = self._open_status(), StragglerWatch()
        began = time.monotonic_ns()
        while not self._ends.wait(_INTERVAL_S):
            now = time.monotonic_ns()
            report = self._report(self._recent(), (began, now))
            began = now
            if self._topology.rank:
                if self._asked[0]:
                    self._send(_CLOCK + _ANSWER.pack(self._topology.rank, *self._asked, time.monotonic_ns()))
                self._send(_REPORT + json.dumps(report).encode())
                continue
            self._reports[0] = report
            if self._topology.size > 1:
                self._send(_CLOCK + _SENT.pack(now))
            straggler = stragglers.add(self._reports)
            if straggler is not None:
                logger.warning("mpistrat: %s", straggler)
            if status is not None:
                try:
                    status.write([self._reports[rank] for rank in sorted(self._reports)])
                except OSError as error:
                    logger.warning("mpistrat: the status file cannot be written any more: %s", error)
                    status = None
        if status is not None:
            status.remove()

    def _open_status(self) -> StatusFile | None:
        if self._topology.rank or not self._writes_status:
            return None
        try:
            return StatusFile(self._topology.size, self._environ)
        except OSError as error:
            logger.info("rank 0: there is no status file for mpistrat top: %s", error)
            return None

    def _send(self, message: bytes) -> None:
        self.outgoing.append(message)
        self._wake()

    def _recent(self) -> list[Operation]:
        """The operations that are complete since the last call, of all process sets."""
        recent: list[Operation] = []
        for number, traced in self._traced().items():
            operations = traced.ring.since(self._next.get(number, 0))
            if operations:
                self._operations += operations[-1].number + 1 - self._next.get(number, 0)
                self._next[number] = operations[-1].number + 1
                recent += operations
        for each in recent:
            self._steps.add(each.request)
            self._bytes += each.nbytes  # Of those that are kept: the ring may be too small for a second.
        return recent

    def _report(self, recent: list[Operation], interval: tuple[int, int]) -> dict[str, Any]:
        in_flight = [entry for traced in self._traced().values() for entry in traced.in_flight()]
        computing, waiting, moving = shares(recent, in_flight, interval)
        cores, delayed = self._use.since_last()
        return {"rank": self._topology.rank, "host": self._topology.host, "pid": os.getpid(),
                "steps": self._steps.steps, "rows": self.rows and self.rows(), "operations": self._operations,
                "bytes": self._bytes, "computing": round(computing, 4), "waiting": round(waiting, 4),
                "moving": round(moving, 4), "cores": round(cores, 3), "delayed": round(delayed, 3),
                "place": self._place(), "rss_bytes": rss_bytes(),
                "outstanding": outstanding(in_flight, interval[1]), "written": time.time()}
