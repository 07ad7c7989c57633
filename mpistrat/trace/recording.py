"""The recording of a timeline: rank 0 writes the operations of all ranks, and the other ranks send their operations.

Starts no threads: the tracer calls the methods, with its lock held (except for `receive`).
"""

import contextlib
import json
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

from ..core.topology import Topology
from .chrome_trace import TraceFile
from .clocks import Offset
from .reader import Read
from .records import NO_STEP, Record, from_message, record_of, to_messages
from .timeline import Timeline, Window

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000  # messages that the engine has not sent. Operations after the limit are lost.
_EVERYTHING: Window = (NO_STEP, 2**62)
_COUNTS = struct.Struct("<QQ")  # the rank, and how many operations it has lost

# The first byte of a message. From rank 0: begin to send operations (with the window), or end. From another rank:
# operations, or the notice that it has sent its last operation.
BEGIN, END = b"B", b"E"
RECORDS, LAST = b"R", b"L"


class Recording:
    """The timeline that is being recorded, if any.

    Args:
        offsets: The offset of each rank's clock. Used on rank 0.
        send: Sends a message to rank 0, or, on rank 0, to all ranks.
        waiting: The messages that have not been sent yet.
    """

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], send: Callable[[bytes], None],
                 waiting: Sized):
        self._topology, self._offsets, self._send, self._waiting = topology, offsets, send, waiting
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
        """Whether a timeline is being recorded, so that operations must be read often."""
        return self._window is not None

    @property
    def has_file(self) -> bool:
        """Whether this rank writes a timeline."""
        return self._timeline is not None

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks may send more operations for the file."""
        return self.has_file and bool(self._awaited)

    # -- on rank 0 ----------------------------------------------------------------------------------------------------

    def begin(self, path: str, mark_cycles: bool, window: Window | None, is_first: bool) -> None:
        """Begin to write a timeline of all ranks. Logs a warning if this is not possible.

        Args:
            path: The file, which is replaced.
            mark_cycles: See Timeline.
            window: The first step, from 0, and the step after the last one; None: everything from now on.
            is_first: Whether no operation has been executed yet.
        """
        if self._timeline is not None:
            logger.warning("mpistrat: start_timeline(%r) does nothing: %s is being written. Call stop_timeline() "
                           "first.", path, self._path)
            return
        try:
            file = TraceFile(path)
        except OSError as error:
            logger.warning("mpistrat: there is no timeline: %s", error)
            return
        self._lost = 0
        self._incoming.clear()
        self._timeline, self._path = Timeline(file, self._topology.host_of, mark_cycles), path
        self._window = window or _EVERYTHING
        self._awaited = set(range(1, self._topology.size))
        self._since = 0 if window or is_first else time.monotonic_ns()
        self._send(BEGIN + json.dumps(self._window).encode())

    def write(self) -> None:
        """Write the operations that other ranks have sent."""
        while self._incoming:
            message = self._incoming.popleft()
            if message.startswith(RECORDS):
                self._add(list(from_message(message[1:])))
            elif self._timeline is not None:
                rank, lost = _COUNTS.unpack(message[1:])
                self._awaited.discard(rank)
                self._timeline.lost += lost

    def mark_places(self, places: Mapping[int, str], now: int) -> None:
        """Add to the file, if any, where in the script each rank is. Written with the next operations."""
        if self._timeline is not None:
            self._timeline.add_places(places, now)

    def end(self, steps: int, limit_s: float | None) -> None:
        """Close the file, if any, and log a warning on missing operations.

        Args:
            steps: The number of steps so far.
            limit_s: How long rank 0 has waited for other ranks; None: the job has ended, and rank 0 did not wait.
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
            lacks.append(f"ranks {self._topology.listed(sorted(self._awaited))} have not sent their last "
                         f"operations in {limit_s:g} s")
        lost = timeline.lost + self._lost
        if lost:
            lacks.append(f"{lost} operations came faster than they could be read")
        if window not in (None, _EVERYTHING) and not timeline.operations:
            lacks.append(f"it is empty, because steps {window[0]} to {window[1] - 1} were not executed: the job had "
                         f"{steps} steps")
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
            self._send(END)

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def is_over(self, steps: int) -> bool:
        """Whether this rank has passed the end of the window after `steps` steps."""
        return self._window is not None and steps > self._window[1]

    def take(self, new: Sequence[Read], lost: int, steps: int) -> None:
        """Send or write the operations that belong to the timeline.

        Args:
            new: The operations that have just been read.
            lost: The number of operations that were lost because reading was too slow.
            steps: The number of steps so far.
        """
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
                self._send(RECORDS + message)
        if self._must_end or self.is_over(steps):
            self.send_last()

    def send_last(self) -> None:
        """On ranks other than 0: tell rank 0 that no more operations follow, if a timeline is being recorded."""
        if self._window is not None and self._topology.rank:
            self._window = None
            self._send(LAST + _COUNTS.pack(self._topology.rank, self._lost))
            self._lost = 0

    def receive(self, message: bytes) -> None:
        """Take a message of one of the four kinds. Any thread may call it."""
        kind = message[:1]
        if kind == BEGIN:
            first, end = json.loads(message[1:])
            self._window, self._must_end = (first, end), False
        elif kind == END:
            self._must_end = True
        else:
            self._incoming.append(message)
