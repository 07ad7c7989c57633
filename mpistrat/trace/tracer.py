"""The tracer of one rank: a thread that reads the operations recorded by the engines, and reports to rank 0.

Once a second each rank sends rank 0 a report, for the status file (reports.py). While a timeline is written, each rank
also sends its operations, ten times a second. So a killed job lacks only the last moment (recording.py). Once a second
rank 0 sends a message to all ranks, whose answers give the offsets of their clocks (clocks.py). When a rank fails, all
ranks report their last operations to `mpistrat run` (last.py).

The messages travel with those of the negotiation, and a rank that is in a collective sends none. Only `stop_timeline`
waits for other ranks, for a limited time. Problems of the tracer are logged as warnings: training goes on.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping

from ..core.interfaces import Observer
from ..core.topology import Topology
from . import recording
from .clocks import Offset
from .last import LastReport
from .reader import Reader
from .record_ring import Operation, Traced
from .recording import Recording
from .reports import Reports, status_file
from .timeline import Window

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_TIMELINE_INTERVAL_S = 0.1
_LAST_RECORDS_S = 5.0  # How long rank 0 waits for the last records of other ranks when a timeline ends.
_LAST_RECORDS_POLL_S = 0.01

# The first byte of a message, besides those in recording.py. From rank 0: the time, for the clocks. From another rank:
# its answer on clocks, its report, or (at its end) its totals. From any rank: the notice that a rank fails.
_CLOCK, _FAILURE = b"C", b"F"
_REPORT, _TOTALS = b"S", b"T"
_SENT = struct.Struct("<q")
_ANSWER = struct.Struct("<Qqqq")  # the rank, and the times of Offset.add but the last one


class Tracer(Observer):
    """Reads the rings of this rank's engines. To be used with `start`, then `stop`, then `close`.

    Args:
        offsets: The offset of each rank's clock. Used on rank 0.
        environ: See StatusFile.
        place: Returns where in the script this rank is, for the warning on a slow rank.
        tell: Called with the lines of LastOperations when a rank fails; None: last operations are not reported.
    """

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], environ: Mapping[str, str],
                 place: Callable[[], str] = str, tell: Callable[[list[str]], None] | None = None):
        super().__init__()
        self._topology, self._offsets = topology, offsets
        # Returns the number of rows that this rank has trained on; None: the rows are not counted.
        self.rows: Callable[[], int] | None = None
        self.is_line_due = True  # Whether to print `line`, since nothing else reports the speed of the job.
        self.reader = Reader()  # Counts the operations and steps that it has read.
        self.reports = Reports(topology, place, status_file(topology, environ))  # On rank 0, of all ranks.
        self._recording = Recording(topology, offsets, self._send, self.outgoing)
        self._last_report = None if tell is None else LastReport(topology, offsets, tell)
        self._recent: list[Operation] = []  # since the last report
        self._asked = (0, 0)  # When rank 0 sent its latest message on clocks, and when this rank received it.

        # The thread, and those who call it.
        self._traced: Callable[[], Mapping[int, Traced]] = dict
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._called = threading.Event()  # The thread has something to do at once.
        self._ends = False
        self._lock = threading.RLock()  # The thread, and callers that begin and end a timeline. Not the engine.

    def start(self, traced: Callable[[], Mapping[int, Traced]], wake: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            traced: Returns the readable data of each process set of this rank, by the id of the set.
            wake: Makes the engine of the set of all ranks check `outgoing`.
        """
        self._traced, self._wake = traced, wake
        self._thread = threading.Thread(target=self._run, name="mpistrat-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and hand the last operations to the engine. Local. May be called twice."""
        self._ends = True
        self._called.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
            self._traced, self._wake = dict, lambda: None  # They refer to objects that hold the shared memory.

    def close(self) -> None:
        """Complete the timeline, after the engines have ended. Local. May be called twice."""
        with self._lock:
            self._recording.end(self.reader.steps.steps, None)

    # -- when a rank fails --------------------------------------------------------------------------------------------

    def fail(self) -> None:
        if self._last_report is not None:
            self._last_report.fail(self._traced().values(), self.reader.steps.steps - 1)
            self._called.set()

    def fail_all(self, limit_s: float) -> bool:
        """Make all ranks report their last operations, since this rank fails. Any thread may call it.

        Waits until this rank has reported, for at most `limit_s`. Returns False if last operations are not reported.
        """
        if self._last_report is None or self._thread is None:
            return False
        self._send(_FAILURE)
        self.fail()
        self._last_report.is_reported.wait(limit_s)
        return True

    def tell_last(self) -> None:
        """Report the last operations once if a rank has failed. In the thread of this object, or after `stop`."""
        if self._last_report is not None:
            self._last_report.tell()

    @property
    def line(self) -> str:
        """On rank 0, a sentence on the speed of the job, after the engines have ended; "" if there is none."""
        return self.reports.line if self.is_line_due else ""

    # -- timelines, on rank 0 -----------------------------------------------------------------------------------------

    def start_timeline(self, path: str, mark_cycles: bool, window: Window | None = None) -> None:
        """Start the timeline of all ranks (Recording.begin). Local: rank 0 writes, and the other ranks do nothing."""
        if self._topology.rank == 0:
            with self._lock:
                self._read()  # Operations before this point do not belong to the timeline.
                self._recording.begin(path, mark_cycles, window, is_first=self.reader.operations == 0)
                self._called.set()

    def stop_timeline(self) -> None:
        """Complete the timeline. Local. Does nothing on ranks other than 0, and without a timeline.

        Waits a moment for the last operations of the other ranks.
        """
        if not self._recording.has_file:
            return
        self._send(recording.END)
        deadline = time.monotonic() + _LAST_RECORDS_S
        while time.monotonic() < deadline:
            with self._lock:
                self._read()
                self._recording.write()
                if not self._recording.is_awaited:
                    break
            time.sleep(_LAST_RECORDS_POLL_S)
        with self._lock:
            self._recording.end(self.reader.steps.steps, _LAST_RECORDS_S)

    # -- in the thread that drives the engine -------------------------------------------------------------------------

    def receive(self, message: bytes) -> None:
        kind, body, now = message[:1], message[1:], time.monotonic_ns()
        if kind == _FAILURE:
            if self._topology.rank == 0 and self._last_report is not None and not self._last_report.has_failed:
                self._send(_FAILURE)
            self.fail()
        elif kind == _CLOCK and self._topology.rank:
            self._asked = _SENT.unpack(body)[0], now
        elif kind == _CLOCK:
            rank, sent, received, answered = _ANSWER.unpack(body)
            self._offsets[rank].add(sent, received, answered, now)
        elif kind == _REPORT:
            self.reports.add(body)
        elif kind == _TOTALS:
            self.reports.add_totals(body)
        else:
            self._recording.receive(message)
            if self._topology.rank:
                self._called.set()

    # -- in the tracer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._report_and_write()
        except Exception:  # Of any kind: a defect of the trace is no reason to end the training.
            logger.warning("mpistrat: rank %d reports nothing any more, and sends nothing for a timeline",
                           self._topology.rank, exc_info=True)

    def _report_and_write(self) -> None:
        began = time.monotonic_ns()
        while True:
            self._called.wait(_TIMELINE_INTERVAL_S if self._recording.is_on else _INTERVAL_S)
            self._called.clear()
            if self._ends:
                break
            with self._lock:
                self._read()
                self._recording.write()
                steps = self.reader.steps.steps
                if self._recording.has_file and self._recording.is_over(steps) and not self._recording.is_awaited:
                    self._recording.end(steps, _LAST_RECORDS_S)
            self.tell_last()
            now = time.monotonic_ns()
            if now - began >= _INTERVAL_S * 1e9:
                self._report(began, now)
                began = now
        with self._lock:
            self._read()
            self._recording.send_last()
        self._own_report(began, time.monotonic_ns())
        if self._topology.rank:
            self._send(_TOTALS + self.reports.own_totals)
        self.tell_last()
        self.reports.close()

    def _report(self, began: int, now: int) -> None:
        """Send the report of this rank to rank 0. On rank 0, publish the reports of all ranks so far."""
        report, rank = self._own_report(began, now), self._topology.rank
        if rank == 0:
            self._send(_CLOCK + _SENT.pack(now))
            self.reports.publish()
            with self._lock:
                self._recording.mark_places(self.reports.places, now)
            return
        self._send(_REPORT + report)
        if self._asked[0]:
            self._send(_CLOCK + _ANSWER.pack(rank, *self._asked, time.monotonic_ns()))

    def _own_report(self, began: int, now: int) -> bytes:
        in_flight = (entry for traced in self._traced().values() for entry in traced.in_flight())
        recent, self._recent = self._recent, []
        return self.reports.add_own((began, now), self.reader, recent, in_flight, self.rows and self.rows())

    def _read(self) -> None:
        """Read the operations that the engines have recorded, for report, timeline and last operations."""
        new, lost = self.reader.read(self._traced())
        self._recent += [each.operation for each in new]
        if self._last_report is not None:
            for each in new:
                self._last_report.keep(*each)
        self._recording.take(new, lost, self.reader.steps.steps)

    def _send(self, message: bytes) -> None:
        if self._topology.size > 1:
            self.outgoing.append(message)
            self._wake()
