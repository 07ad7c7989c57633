"""The tracer of one rank: a thread that reads the operations recorded by the engines, and reports to rank 0.

Once a second each rank sends rank 0 a report, for the status file (reports.py). While a timeline is written, each rank
also sends its operations, ten times a second, so the timeline of a killed job lacks only the last moment. Once a second
rank 0 sends a message to all ranks. Their answers give the offsets of their clocks (clocks.py). When a rank fails, all
ranks report their last operations to `mpistrat run` (last.py).

The engines send these messages with those of the negotiation, so a rank in a collective sends none. Only
`stop_timeline` waits for other ranks, for a limited time. Errors of the tracer are logged, and training continues.
"""

import contextlib
import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

from ..core.interfaces import Observer
from ..core.topology import Topology
from .clocks import Offset
from .last import LastReport
from .records import NO_STEP, Operation, Read, Reader, Record, Traced, from_message, record_of, to_messages
from .reports import Reports
from .timeline import Timeline, Window

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_TIMELINE_INTERVAL_S = 0.1
_LAST_RECORDS_S = 5.0  # How long rank 0 waits for the last records of other ranks when a timeline ends.
_LAST_RECORDS_POLL_S = 0.01
_MOST_WAITING = 1000  # messages that the engine has not sent. Operations after the limit are lost.
_EVERYTHING: Window = (NO_STEP, 2**62)

# The first byte of a message is its kind.
_FAILURE = b"F"  # From any rank: a rank fails.
_CLOCK = b"C"  # From rank 0: its time. From another rank: the answer, for the offset of the rank's clock.
_BEGIN, _END = b"B", b"E"  # From rank 0: the ranks begin to send operations (with the window), or end to send them.
_REPORT, _TOTALS = b"S", b"T"  # From another rank: its report; at its end, its totals.
_RECORDS, _LAST = b"R", b"L"  # From another rank: operations; the notice that it has sent its last operation.
_SENT = struct.Struct("<q")
_ANSWER = struct.Struct("<Qqqq")  # the rank, and the times of Offset.add but the last one
_COUNTS = struct.Struct("<QQ")  # the rank, and how many operations it has lost


class Tracer(Observer):
    """Reads the operations of this rank's engines, and reports to rank 0. Call `start`, then `stop`, then `close`.

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
        self.reports = Reports(topology, place, environ)  # On rank 0, of all ranks.
        self._recording = Recording(topology, offsets, self._send, self.outgoing, self.reader)
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
        """Start the thread. `traced` returns the data of each process set of this rank, by the id of the set.

        `wake` wakes the engine of the set of all ranks, which then sends the messages of the tracer.
        """
        self._traced, self._wake = traced, wake
        self._thread = threading.Thread(target=self._run, name="mpistrat-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, after it has given the engine this rank's last messages. Local. May be called twice."""
        self._ends = True
        self._called.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
            self._traced, self._wake = dict, lambda: None  # They refer to objects that hold the shared memory.

    def close(self) -> None:
        """Complete the timeline, if any. Call this after the engines have ended. Local. May be called twice."""
        with self._lock:
            self._recording.end(None)

    # -- when a rank fails --------------------------------------------------------------------------------------------

    def fail(self) -> None:
        if self._last_report is not None:
            self._last_report.fail(self._traced().values(), self.reader.counter.steps - 1)
            self._called.set()

    def fail_all(self, limit_s: float) -> bool:
        """Make all ranks report their last operations, because this rank fails. Any thread may call it.

        Waits until this rank has reported, for `limit_s` seconds at most. Returns False if reports are switched off.
        """
        if self._last_report is None or self._thread is None:
            return False
        self._send(_FAILURE)
        self.fail()
        self._last_report.is_reported.wait(limit_s)
        return True

    def tell_last(self) -> None:
        """Report the last operations if a rank has failed, but only once. For the tracer's thread, or after `stop`."""
        if self._last_report is not None:
            self._last_report.tell()

    @property
    def line(self) -> str:
        """On rank 0: a sentence on the speed of the job; "" if there is none. Read it after the engines have ended."""
        return self.reports.line if self.is_line_due else ""

    # -- timelines, on rank 0 -----------------------------------------------------------------------------------------

    def start_timeline(self, path: str, mark_cycles: bool, window: Window | None = None) -> None:
        """On rank 0: begin a timeline of all ranks, see Recording.begin. Does nothing on other ranks. Local."""
        if self._topology.rank == 0:
            with self._lock:
                self._read()  # Operations before this point do not belong to the timeline.
                self._recording.begin(path, mark_cycles, window, is_first=self.reader.operations == 0)
                self._called.set()

    def stop_timeline(self) -> None:
        """On rank 0: complete the timeline, if there is one. Does nothing on other ranks. Local.

        Waits some seconds at most for the last operations of the other ranks.
        """
        if not self._recording.has_file:
            return
        self._send(_END)
        deadline = time.monotonic() + _LAST_RECORDS_S
        while time.monotonic() < deadline:
            with self._lock:
                self._read()
                self._recording.write()
                if not self._recording.is_awaited:
                    break
            time.sleep(_LAST_RECORDS_POLL_S)
        with self._lock:
            self._recording.end(_LAST_RECORDS_S)

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
            logger.warning("mpistrat: the recorder of rank %d has failed. Training goes on, but mpistrat top and the "
                           "timeline get nothing more from this rank.", self._topology.rank, exc_info=True)

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
                if self._recording.has_file and self._recording.is_over and not self._recording.is_awaited:
                    self._recording.end(_LAST_RECORDS_S)
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
        """Send the report of this rank to rank 0. On rank 0: publish all reports, and ask the ranks for their time."""
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
        """Read the operations that the engines have recorded, for the report, the timeline and the last operations."""
        new, lost = self.reader.read(self._traced())
        self._recent += [each.operation for each in new]
        if self._last_report is not None:
            for each in new:
                self._last_report.keep(*each)
        self._recording.take(new, lost)

    def _send(self, message: bytes) -> None:
        if self._topology.size > 1:
            self.outgoing.append(message)
            self._wake()


# -- timelines ---------------------------------------------------------------------------------------------------------


class Recording:
    """Records a timeline, if one is begun: rank 0 writes the file, and the other ranks send their operations to rank 0.

    The tracer holds its lock when it calls the methods, except for `receive`. `send` sends a message to rank 0, or, on
    rank 0, to all ranks. `waiting`: The messages that are not sent yet. `reader`: Counts the steps of this rank.
    """

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], send: Callable[[bytes], None],
                 waiting: Sized, reader: Reader):
        self._topology, self._offsets, self._send = topology, offsets, send
        self._waiting, self._reader = waiting, reader
        # The steps whose operations this rank sends or writes; None: none. Rank 0 sets the window, and may end it.
        self._window: Window | None = None
        self._must_end = False
        self._lost = 0
        # On rank 0:
        self._timeline: Timeline | None = None
        self._path = ""
        self._since = 0  # when the timeline began
        self._incoming: deque[bytes] = deque()
        self._awaited: set[int] = set()  # the ranks that may send more operations

    @property
    def is_on(self) -> bool:
        """Whether this rank currently records operations for a timeline. If so, the tracer reads the rings often."""
        return self._window is not None

    @property
    def has_file(self) -> bool:
        """Whether this rank writes a timeline."""
        return self._timeline is not None

    @property
    def is_awaited(self) -> bool:
        """On rank 0: whether other ranks may send more operations for the file. False on other ranks."""
        return self.has_file and bool(self._awaited)

    # -- on rank 0 ----------------------------------------------------------------------------------------------------

    def begin(self, path: str, mark_cycles: bool, window: Window | None, is_first: bool) -> None:
        """On rank 0: begin a timeline of all ranks. If the file cannot be made or one is open already, log a warning.

        `window`: The first step, from 0, and the step after the last one; None: everything from now on. `is_first`:
        Whether no operation has been executed yet.
        """
        if self._timeline is not None:
            logger.warning("mpistrat: start_timeline(%r) has no effect: the timeline %s is still being written. "
                           "Call stop_timeline() first.", path, self._path)
            return
        try:
            self._timeline, self._path = Timeline(path, self._topology.host_of, mark_cycles), path
        except OSError as error:
            logger.warning("mpistrat: the timeline cannot be created: %s", error)
            return
        self._lost = 0
        self._incoming.clear()
        self._window = window or _EVERYTHING
        self._awaited = set(range(1, self._topology.size))
        self._since = 0 if window or is_first else time.monotonic_ns()
        self._send(_BEGIN + json.dumps(self._window).encode())

    def write(self) -> None:
        """On rank 0: write the operations that other ranks have sent."""
        while self._incoming:
            message = self._incoming.popleft()
            if message.startswith(_RECORDS):
                self._add(list(from_message(message[1:])))
            elif self._timeline is not None:
                rank, lost = _COUNTS.unpack(message[1:])
                self._awaited.discard(rank)
                self._timeline.lost += lost

    def mark_places(self, places: Mapping[int, str], now: int) -> None:
        """Call Timeline.add_places if there is a file."""
        if self._timeline is not None:
            self._timeline.add_places(places, now)

    def end(self, limit_s: float | None) -> None:
        """Close the file, if any, and log a warning if operations are missing in it.

        `limit_s`: How long rank 0 has waited for other ranks; None: the job has ended, and rank 0 did not wait.
        """
        self.write()
        timeline, self._timeline, window, self._window = self._timeline, None, self._window, None
        if timeline is None:
            return
        lacks = []
        try:
            timeline.close()
        except OSError as error:
            lacks.append(f"its end cannot be written: {error}")
        if self._awaited and limit_s is not None:
            lacks.append(f"ranks {self._topology.listed(sorted(self._awaited))} did not send their last "
                         f"operations within {limit_s:g} s")
        lost = timeline.lost + self._lost
        if lost:
            lacks.append(f"{lost} operations are missing, because they came faster than they could be recorded")
        if window not in (None, _EVERYTHING) and not timeline.operations:
            lacks.append(f"it is empty, because steps {window[0]} to {window[1] - 1} were not executed: the job had "
                         f"{self._reader.counter.steps} steps")
        if lacks:
            logger.warning("mpistrat: the timeline %s is not complete: %s.", self._path, "; ".join(lacks))

    def _add(self, records: list[Record], choices: Iterable[str] = ()) -> None:
        if self._timeline is None or not records:
            return
        rank = records[0].rank
        offset = self._offsets[rank].at(time.monotonic_ns()) if rank else 0
        shifted = (record.shifted(offset) for record in records)
        try:
            self._timeline.add(record for record in shifted if record.delivered >= self._since)
            self._timeline.add_choices(choices)
        except OSError as error:
            logger.warning("mpistrat: the timeline %s ends here, because it cannot be written: %s. It can be read up "
                           "to here.", self._path, error)
            with contextlib.suppress(OSError):
                self._timeline.close()
            self._timeline = self._window = None
            self._send(_END)

    # -- on all ranks -------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether this rank has begun a step after the timeline's window."""
        return self._window is not None and self._reader.counter.steps > self._window[1]

    def take(self, new: Sequence[Read], lost: int) -> None:
        """On rank 0: write the timeline's operations. On other ranks: send them. For the arguments see Reader.read."""
        window = self._window
        if window is None:
            return
        self._lost += lost
        chosen = [record_of(self._topology.rank, operation, traced.ranks, traced.backend, step)
                  for operation, traced, step in new if window[0] <= step < window[1]]
        if not self._topology.rank:
            read = {id(each.traced): each.traced for each in new}.values()
            self._add(chosen, [sentence for traced in read for sentence in traced.choices()])
            return
        if len(self._waiting) > _MOST_WAITING:
            self._lost += len(chosen)
        else:
            for message in to_messages(chosen):
                self._send(_RECORDS + message)
        if self._must_end or self.is_over:
            self.send_last()

    def send_last(self) -> None:
        """On ranks other than 0: announce to rank 0 that no more operations follow. Does nothing without a timeline."""
        if self._window is not None and self._topology.rank:
            self._window = None
            self._send(_LAST + _COUNTS.pack(self._topology.rank, self._lost))
            self._lost = 0

    def receive(self, message: bytes) -> None:
        """Handle a message for timelines: begin, end, operations, or no more operations. Any thread may call it."""
        kind = message[:1]
        if kind == _BEGIN:
            first, end = json.loads(message[1:])
            self._window, self._must_end = (first, end), False
        elif kind == _END:
            self._must_end = True
        else:
            self._incoming.append(message)
