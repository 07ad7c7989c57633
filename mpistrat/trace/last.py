"""The last operations of a job that fails: each rank keeps its own operations, and prints them when any rank fails.

A rank prints its own operations to its stderr, because it may no longer reach the other ranks or a common disk.
`mpistrat run` reads the stderr of all ranks, and writes a timeline of these operations.
"""

import contextlib
import json
import os
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.ownership import own_directory
from ..core.topology import Topology, rank_list
from ..core.tuning import REPORTED_OPERATIONS, REPORTED_OPERATIONS_LEAST, REPORTED_OPERATIONS_OF_ALL
from .clocks import Offset
from .records import Operation, Record, Traced, from_message, record_of, to_messages, unfinished
from .timeline import Timeline

FAILURES = Path(".mpistrat")
MOST_FILES = 10  # in FAILURES
_LINE_BYTES = 3800  # With the rank in front it is less than what a rank writes at once (process/report.py).
_Kept = tuple[Operation, int, str, int]  # what `record_of` takes after the rank


class LastReport:
    """Keeps the last operations of this rank, and reports them after a failure. For the arguments see Tracer."""

    def __init__(self, topology: Topology, offsets: Mapping[int, Offset], tell: Callable[[list[str]], None]):
        self._topology, self._offsets, self._tell = topology, offsets, tell
        most = min(REPORTED_OPERATIONS, REPORTED_OPERATIONS_OF_ALL // topology.size)
        self._last: deque[_Kept] = deque(maxlen=max(REPORTED_OPERATIONS_LEAST, most))
        self._in_flight: list[_Kept] = []
        self.has_failed = False  # A rank has failed.
        self.is_reported = threading.Event()  # Set after `tell` was called.

    def keep(self, operation: Operation, traced: Traced, step: int) -> None:
        """Keep a complete operation. Call this in the order of completion."""
        self._last.append((operation, traced.ranks, traced.backend, step))

    def fail(self, every: Iterable[Traced], step: int) -> None:
        """Note a rank's failure, and store what is in flight. To be called before the handles fail, by any thread."""
        if not self.has_failed:
            now = time.monotonic_ns()
            self._in_flight = [(unfinished(entry, now), traced.ranks, traced.backend, step)
                               for traced in every for entry in traced.in_flight() if entry.submitted]
            self.has_failed = True

    def tell(self) -> None:
        """Report the last operations if a rank has failed, but only once. Only one thread at a time may call it."""
        if not self.has_failed or self.is_reported.is_set():
            return
        topology, now = self._topology, time.monotonic_ns()
        known = range(topology.size) if topology.rank == 0 else (topology.rank,)
        offsets = {rank: offset for rank in known
                   if rank in self._offsets and (offset := self._offsets[rank].at(now))}
        records = [record_of(topology.rank, *each) for each in (*self._last, *self._in_flight)]
        self._tell(LastOperations(topology.rank, topology.size, topology.host, offsets, records).lines())
        self.is_reported.set()


@dataclass(frozen=True)
class LastOperations:
    """The last complete operations of one rank, and the submitted operations on which the ranks had not agreed."""

    rank: int  # The rank in the job.
    size: int  # How many ranks the job has.
    host: str
    # How many nanoseconds the clocks of ranks are ahead of rank 0's clock, as far as this rank knows. Clocks of other
    # ranks are equal to rank 0's clock.
    offsets: Mapping[int, int] = field(default_factory=dict)
    records: Sequence[Record] = ()  # In order, with times of this rank's clock.

    def lines(self) -> list[str]:
        """Return this object as lines of printable ASCII. `from_lines` reads them."""
        head = json.dumps([self.rank, self.size, self.host, list(self.offsets.items())]).encode()
        return [each.decode() for each in [_encode(head), *to_messages(self.records, _encode, _LINE_BYTES)]]


def from_lines(lines: Sequence[str]) -> LastOperations:
    """Parse the result of LastOperations.lines. Raises ValueError: A line is truncated, or of a different version."""
    try:
        head, *messages = (zlib.decompress(b64decode(line, validate=True)) for line in lines)
        rank, size, host, offsets = json.loads(head)
        return LastOperations(rank, size, host, dict(offsets),
                              [record for message in messages for record in from_message(message)])
    except (TypeError, IndexError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _encode(message: bytes) -> bytes:
    return b64encode(zlib.compress(message))


def save(told: Iterable[Sequence[str]]) -> str:
    """Write a timeline to a new file in the directory .mpistrat. Return a sentence about the file.

    `told`: The lines of each rank. A rank with a truncated line is left out. Returns "" if no rank has an operation.
    Makes git ignore the directory, and deletes all timelines there except the newest ones.
    """
    ranks = []
    for lines in told:
        try:
            ranks.append(from_lines(lines))
        except ValueError:  # The rank was killed while it printed the lines.
            continue
    ranks.sort(key=lambda each: each.rank)
    if not any(each.records for each in ranks):
        return ""
    path = FAILURES / f"{time.strftime('%m%d-%H%M%S')}-{os.getpid()}.json"
    what = f"the last operations of ranks {rank_list(each.rank for each in ranks)}"
    try:
        own_directory(FAILURES, 0o755, 0o022)
        (FAILURES / ".gitignore").write_text("*\n")
        with contextlib.suppress(FileNotFoundError):  # Another job has just removed the file.
            for old in sorted(FAILURES.glob("*.json"), key=os.path.getmtime)[:1 - MOST_FILES]:
                old.unlink()
        _write(str(path), ranks)
    except OSError as error:
        with contextlib.suppress(OSError):  # On a read-only file system this is an error also if there is no file.
            path.unlink()
        return f"{what} cannot be written: {error}"
    return f"{what} are shown by: mpistrat timeline {path}"


def _write(path: str, ranks: Sequence[LastOperations]) -> None:
    """Write a timeline of `ranks` to a file. `ranks` is not empty, and in the order of the ranks. Raises OSError."""
    # The offsets of rank 0, which has measured the clocks for longest, come last and override those of other ranks.
    offsets = {rank: offset for each in reversed(ranks) for rank, offset in each.offsets.items()}
    hosts = dict.fromkeys(range(max(each.size for each in ranks)), "?") | {each.rank: each.host for each in ranks}
    records = [record.shifted(offsets.get(each.rank, 0)) for each in ranks for record in each.records]
    timeline = Timeline(path, list(hosts.values()), False)
    try:
        timeline.add(sorted(records, key=lambda record: record.submitted or record.agreed))
    finally:
        timeline.close()
