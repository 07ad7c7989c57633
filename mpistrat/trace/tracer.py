"""The tracer of one rank: a thread that reads what the engines have recorded, and tells rank 0 about it.

Once a second each rank sends rank 0 a report, for the status file. While a timeline is written, it sends its operations
too, ten times a second: a timeline has all but the last moment of a job that is killed. Rank 0 sends a message in each
second to all ranks: their answers show how far their clocks are from its own. When a rank fails, all ranks tell
`mpistrat run` their last operations.

The messages travel with those of the negotiation, and a rank that is in a collective sends none. The tracer never waits
for another rank, but in `stop_timeline` for a while. What it cannot do is a warning: training goes on.
"""

import contextlib
import json
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..core.errors import MissingDependencyError
from ..core.interfaces import TraceLink
from ..core.topology import Topology
from . import files
from .clocks import Offset
from .last import Teller
from .records import NO_STEP, Record, from_message, record_of, to_messages
from .ring import Operation, Traced
from .spans import Span
from .status import StatusFile, outstanding, rss_bytes, shares
from .stragglers import ProcessorUse, StragglerWatch
from .timeline import Timeline, Window
from .totals import StepCounter, Totals, line_of

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_TIMELINE_INTERVAL_S = 0.1
_LAST_RECORDS_S = 5.0  # How long rank 0 waits for those of other ranks when a timeline ends.
_LAST_RECORDS_POLL_S = 0.01
_MOST_WAITING = 1000  # messages that the engine has not sent. Operations that come then are lost.
_EVERYTHING: Window = (NO_STEP, 2**62)

# The first byte of a message. From rank 0: the time, for the clocks; begin to send operations, with the window, or end.
# From another rank: its answer about clocks, its report, operations, that it has sent its last one, and its totals when
# it ends. From any rank: that a rank fails.
_CLOCK, _BEGIN, _END, _FAILURE = b"C", b"B", b"E", b"F"
_REPORT, _RECORDS, _LAST, _TOTALS = b"S", b"R", b"L", b"T"
_SENT = struct.Struct("<q")
_ANSWER = struct.Struct("<Qqqq")  # the rank, and the times of Offset.add but the last one
_COUNTS = struct.Struct("<QQ")  # the rank, and how many operations it has lost


class Tracer(TraceLink):
    """Reads the rings of this rank's engines. `start` begins, `stop` and then `close` end.

    Args:
        topology: The ranks of the job.
        offsets: The offset of each rank's clock. Rank 0 uses it.
        writes_status: Whether rank 0 writes the status file.
        environ: See StatusFile.
        place: Returns where in the script this rank is, for sentences on a rank that is slow.
        tell: Takes the lines of LastOperations when a rank fails; None: nobody reads them.

    Attributes:
        rows: Returns the rows that this rank has trained on; None: nobody counts them.
        stragglers: On rank 0, knows which ranks it has named.
        is_line_due: Whether nothing else tells the user how fast the job was.
    """

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], writes_status: bool,
                 environ: Mapping[str, str], place: Callable[[], str] = str,
                 tell: Callable[[list[str]], None] | None = None):
        super().__init__()
        self._topology, self._offsets = topology, offsets
        self._writes_status, self._environ, self._place = writes_status, environ, place
        self._teller = None if tell is None else Teller(topology, offsets, tell)
        self.rows: Callable[[], int] | None = None
        self._traced: Callable[[], Mapping[int, Traced]] = dict
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._called = threading.Event()  # The thread has something to do at once.
        self._ends = False
        self._lock = threading.RLock()  # The thread, and callers that begin and end a timeline. Not the engine.
        self._next: dict[int, int] = {}  # The serial of the next operation of each process set.
        self._steps, self._use = StepCounter(), ProcessorUse()
        self.stragglers = StragglerWatch()
        self.is_line_due = True
        self._totals: dict[int, Totals] = {topology.rank: Totals()}
        self._operations = self._bytes = self._lost = 0
        self._recent: list[Operation] = []  # since the last report
        self._asked = (0, 0)  # When rank 0 has sent the latest message about clocks, and when it arrived.
        self._reports: dict[int, dict[str, Any]] = {}
        # Which steps this rank sends, or writes; None: nothing. Rank 0 decides, and may end it.
        self._window: Window | None = None
        self._must_end = False
        self._since = 0  # On rank 0, when the timeline began.
        self._incoming: deque[bytes] = deque()  # For the timeline, on rank 0.
        self._timeline: Timeline | None = None
        self._path = ""
        self._awaited: set[int] = set()  # The ranks that may send more operations.

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
        """Stop the thread, and hand the last operations to the engine. Local. May be called twice."""
        self._ends = True
        self._called.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
            self._traced, self._wake = dict, lambda: None  # They refer to what has the memory that ranks share.

    def close(self) -> None:
        """Complete the timeline, after the engines have ended. Local. May be called twice."""
        self._end_timeline(has_job_ended=True)

    # -- when a rank fails --------------------------------------------------------------------------------------------

    def fail(self) -> None:
        if self._teller is not None:
            self._teller.fail(self._traced().values(), self._steps.steps - 1)
            self._called.set()

    def fail_all(self, limit_s: float) -> bool:
        """This rank fails: let all ranks tell their last operations. Any thread may call it.

        Returns when this rank has told its own, or after `limit_s`: whether anybody reads them.
        """
        if self._teller is None or self._thread is None:
            return False
        self._send(_FAILURE)
        self.fail()
        self._teller.has_told.wait(limit_s)
        return True

    def tell_last(self) -> None:
        """Tell the last operations if a rank has failed, once. In the thread of this object, or after `stop`."""
        if self._teller is not None:
            self._teller.tell()

    @property
    def line(self) -> str:
        """On rank 0, a sentence on the speed of the job, after the engines have ended; "" if there is none."""
        topology = self._topology
        if not self.is_line_due or len(self._totals) < topology.size:
            return ""
        return line_of(self._totals, {rank: f"rank {rank} on {host}" for rank, host in enumerate(topology.host_of)})

    # -- timelines, on rank 0 -----------------------------------------------------------------------------------------

    def start_timeline(self, path: str, mark_cycles: bool, window: Window | None = None) -> None:
        """Begin to write a timeline of all ranks. Local; on other ranks than 0 it does nothing.

        Args:
            path: The file, which is replaced; its ending selects the format.
            mark_cycles: See Timeline.
            window: The first step, from 0, and the one after the last; None: everything from now on.
        """
        if self._topology.rank:
            return
        with self._lock:
            if self._timeline is not None:
                logger.warning("mpistrat: start_timeline(%r) does nothing: %s is being written. Call stop_timeline() "
                               "first.", path, self._path)
                return
            try:
                file = files.create(path)
            except (OSError, ValueError, MissingDependencyError) as error:
                logger.warning("mpistrat: there is no timeline: %s", error)
                return
            self._read()  # What came before is not in it.
            self._lost = 0
            self._incoming.clear()
            self._timeline, self._path = Timeline(file, self._topology.host_of, mark_cycles), path
            self._window = window or _EVERYTHING
            self._awaited = set(range(1, self._topology.size))
            self._since = 0 if window or self._operations == 0 else time.monotonic_ns()
            self._send(_BEGIN + json.dumps(self._window).encode())
            self._called.set()

    def stop_timeline(self) -> None:
        """Complete the timeline. Local; on other ranks than 0, and without a timeline, it does nothing.

        It waits a moment for the last operations of the other ranks.
        """
        if self._timeline is None:
            return
        self._send(_END)
        deadline = time.monotonic() + _LAST_RECORDS_S
        while time.monotonic() < deadline:
            with self._lock:
                self._read()
                self._write_records()
                if self._timeline is None or not self._awaited:
                    break
            time.sleep(_LAST_RECORDS_POLL_S)
        self._end_timeline()

    def _end_timeline(self, has_job_ended: bool = False) -> None:
        """Close the file, if there is one, and say what is not in it."""
        with self._lock:
            self._write_records()
            timeline, self._timeline, window, self._window = self._timeline, None, self._window, None
            if timeline is None:
                return
            lacks = []
            try:
                timeline.close()
            except OSError as error:
                lacks.append(f"its end cannot be written: {error}")
            if self._awaited and not has_job_ended:
                lacks.append(f"ranks {self._topology.listed(sorted(self._awaited))} have not sent their last "
                             f"operations in {_LAST_RECORDS_S:g} s")
            lost = timeline.lost + self._lost
            if lost:
                lacks.append(f"{lost} operations came faster than they could be read")
            if window not in (None, _EVERYTHING) and not timeline.operations:
                lacks.append(f"it is empty, because steps {window[0]} to {window[1] - 1} have not come: there were "
                             f"{self._steps.steps} steps")
            if lacks:
                logger.warning("mpistrat: the timeline %s is not complete: %s.", self._path, "; ".join(lacks))

    # -- in the thread that drives the engine -------------------------------------------------------------------------

    def receive(self, message: bytes) -> None:
        kind, body, now = message[:1], message[1:], time.monotonic_ns()
        if kind == _FAILURE:
            if self._topology.rank == 0 and self._teller is not None and not self._teller.has_failed:
                self._send(_FAILURE)
            self.fail()
        elif self._topology.rank:
            if kind == _CLOCK:
                self._asked = _SENT.unpack(body)[0], now
            elif kind == _BEGIN:
                first, end = json.loads(body)
                self._window, self._must_end = (first, end), False
                self._called.set()
            elif kind == _END:
                self._must_end = True
                self._called.set()
        elif kind == _CLOCK:
            rank, sent, received, answered = _ANSWER.unpack(body)
            self._offsets[rank].add(sent, received, answered, now)
        elif kind == _REPORT:
            report = json.loads(body)
            self._reports[report["rank"]] = report
        elif kind == _TOTALS:
            rank, totals = json.loads(body)
            self._totals[rank] = Totals(**totals)
        else:
            self._incoming.append(message)

    # -- in the tracer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._report_and_write()
        except Exception:  # Of any kind: a defect of the trace is no reason to end the training.
            logger.warning("mpistrat: rank %d reports nothing any more, and sends nothing for a timeline",
                           self._topology.rank, exc_info=True)

    def _report_and_write(self) -> None:
        status = self._open_status()
        began = time.monotonic_ns()
        while True:
            self._called.wait(_INTERVAL_S if self._window is None else _TIMELINE_INTERVAL_S)
            self._called.clear()
            if self._ends:
                break
            with self._lock:
                self._read()
                self._write_records()
                is_over = self._window is not None and self._steps.steps > self._window[1]
                if self._timeline is not None and is_over and not self._awaited:
                    self._end_timeline()
            self.tell_last()
            now = time.monotonic_ns()
            if now - began < _INTERVAL_S * 1e9:
                continue
            self._reports[self._topology.rank] = report = self._report((began, now))
            began = now
            if self._topology.rank:
                self._send(_REPORT + json.dumps(report).encode())
                if self._asked[0]:
                    self._send(_CLOCK + _ANSWER.pack(self._topology.rank, *self._asked, time.monotonic_ns()))
                continue
            self._send(_CLOCK + _SENT.pack(now))
            straggler = self.stragglers.add(self._reports)
            if straggler is not None:
                logger.warning("mpistrat: %s", straggler)
            if status is not None:
                try:
                    status.write([self._reports[rank] for rank in sorted(self._reports)])
                except OSError as error:
                    logger.warning("mpistrat: the status file cannot be written any more: %s", error)
                    status = None
        with self._lock:
            self._read()
            if self._window is not None and self._topology.rank:
                self._send_last()
        self._report((began, time.monotonic_ns()))
        if self._topology.rank:
            self._send(_TOTALS + json.dumps([self._topology.rank, asdict(self._totals[self._topology.rank])]).encode())
        self.tell_last()
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
        if self._topology.size > 1:
            self.outgoing.append(message)
            self._wake()

    def _read(self) -> None:
        """Read what the engines have recorded, and send or write what belongs to the timeline."""
        window = self._window
        chosen: list[Record] = []
        for number, traced in self._traced().items():
            expected = self._next.get(number, 0)
            operations = traced.ring.since(expected)
            if not operations:
                continue
            self._next[number] = operations[-1].serial + 1
            self._operations += operations[-1].serial + 1 - expected
            if window is not None:
                self._lost += operations[0].serial - expected
            # Bytes and steps are those of the operations that are kept. Without a timeline so many are read in a second
            # that this takes a few milliseconds.
            self._recent += operations
            for each in operations:
                self._bytes += each.nbytes
                step = self._steps.add(each.request)
                if self._teller is not None:
                    self._teller.keep(each, traced, step)
                if window is not None and window[0] <= step < window[1]:
                    chosen.append(record_of(self._topology.rank, each, traced.ranks, traced.backend, step))
        if window is None:
            return
        if not self._topology.rank:
            self._add(chosen)
            return
        if len(self.outgoing) > _MOST_WAITING:
            self._lost += len(chosen)
        else:
            for message in to_messages(chosen):
                self._send(_RECORDS + message)
        if self._must_end or self._steps.steps > window[1]:
            self._send_last()

    def _send_last(self) -> None:
        self._window = None
        self._send(_LAST + _COUNTS.pack(self._topology.rank, self._lost))
        self._lost = 0

    def _write_records(self) -> None:
        """On rank 0, write what other ranks have sent."""
        while self._incoming:
            message = self._incoming.popleft()
            if message.startswith(_RECORDS):
                self._add(list(from_message(message[1:])))
            elif self._timeline is not None:
                rank, lost = _COUNTS.unpack(message[1:])
                self._awaited.discard(rank)
                self._timeline.lost += lost

    def _add(self, records: list[Record]) -> None:
        if self._timeline is None or not records:
            return
        rank = records[0].rank
        offset = self._offsets[rank].at(time.monotonic_ns()) if rank else 0
        shifted = (record.shifted(offset) for record in records)
        try:
            self._timeline.add(record for record in shifted if record.delivered >= self._since)
        except OSError as error:
            logger.warning("mpistrat: the timeline %s ends here, because it cannot be written: %s. It can be read up "
                           "to here.", self._path, error)
            with contextlib.suppress(OSError):
                self._timeline.close()
            self._timeline = self._window = None
            self._send(_END)

    def _report(self, interval: Span) -> dict[str, Any]:
        in_flight = [entry for traced in self._traced().values() for entry in traced.in_flight()]
        recent, self._recent = self._recent, []
        computing, waiting, moving = shares(recent, in_flight, interval)
        cores, delayed = self._use.since_last()
        self._totals[self._topology.rank].add((interval[1] - interval[0]) / 1e9, waiting, moving,
                                              self._steps.steps, self._operations)
        return {"rank": self._topology.rank, "host": self._topology.host, "pid": os.getpid(),
                "steps": self._steps.steps or None, "rows": self.rows and self.rows(), "operations": self._operations,
                "bytes": self._bytes, "computing": round(computing, 4), "waiting": round(waiting, 4),
                "moving": round(moving, 4), "cores": round(cores, 3), "delayed": round(delayed, 3),
                "place": self._place(), "rss_bytes": rss_bytes(),
                "outstanding": outstanding(in_flight, interval[1]), "written": time.time()}
