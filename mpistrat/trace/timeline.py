"""The timeline of a job: a file with the operations of all ranks, in times of rank 0's clock. Rank 0 writes the file.

The file is in Chrome's trace format. Perfetto (https://ui.perfetto.dev) reads it, also while it is being written. A
timeline has groups of tracks. The spans of a track do not overlap. A span may have parts.

Each rank is a group. Its first track has the reductions. Other tracks have the operations, from submission to result,
with Horovod's phases: NEGOTIATE_ALLREDUCE until all ranks have submitted the operation, QUEUE until its reduction
begins, and the reduction itself, such as SHM_ALLREDUCE. Copies into and out of the fusion buffer are not shown, since
they are parts of the reduction, chunk by chunk. One more group shows, for each operation, which rank came last.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import NO_STEP, Record, arrival_of

Window = tuple[int, int]
Values = Mapping[str, int | str]
Part = tuple[str, int, int]  # name, begin, end

_LABELS = {"shared_memory": "SHM", "local": "LOCAL", "mpi": "MPI", "hierarchical": "HIERARCHICAL"}
_REDUCTIONS, _OPERATIONS = "reductions", "operations"  # the names of tracks
_KEPT = 10_000  # operations of which some ranks have sent nothing yet
_OPERATION = "operation"  # the category of the spans that `records_in` reads
_PLACE = "place"  # the category of the marks that `places_in` returns
_PAGE_BYTES = 4096
_CLOSE = b"\n]"


class Timeline:
    """Writes the records of all ranks to the file `path`, and replaces an old file. `hosts`: The host of each rank.

    `mark_cycles`: Whether to mark on each rank, like Horovod, the starts of cycles. A cycle starts when the ranks have
    agreed on operations. The constructor and each method raise OSError: The file cannot be created or written.
    """

    def __init__(self, path: str, hosts: Sequence[str], mark_cycles: bool):
        self._file, self._mark_cycles = _TraceFile(path), mark_cycles
        self._names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)] + ["the rank that came last"]
        # For the tracks of each group: the name of the track, and the time from which on the track is free.
        self._tracks: dict[int, list[tuple[str, int]]] = {}
        self._submitted: dict[tuple[int, int], list[Record]] = {}
        self._steps: dict[int, int] = {}
        self._cycles: dict[int, int] = {}
        self._choices: set[str] = set()
        self._now = 0  # the end of the last operation of rank 0
        # operations: How many operations were written.
        # lost: How many operations were lost, because they came faster than they could be read.
        self.operations = self.lost = 0

    def add(self, records: Iterable[Record]) -> None:
        """Write records. Their times must be those of rank 0's clock."""
        for record in records:
            self.operations += 1
            self._write(record)
            self._compare(record)
        self._file.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def add_choices(self, sentences: Iterable[str]) -> None:
        """Add a mark for each sentence that is new. `sentences` say which chunk sizes rank 0 chose by measurement."""
        for sentence in sentences:
            if sentence not in self._choices:
                self._choices.add(sentence)
                self._file.mark(0, 0, sentence, self._now)
                self._file.flush()

    def add_places(self, places: Mapping[int, str], now: int) -> None:
        """Add a mark for each rank with its place in the script at the time `now`. The next `add` writes the marks."""
        for rank, place in places.items():
            self._file.mark(rank, 0, place, now, _PLACE)

    def _write(self, record: Record) -> None:
        rank, begin = record.rank, record.submitted or record.agreed
        if not rank:
            self._now = record.delivered
        reduction = f"{label(record)}_{record.kind.upper()}"
        if record.number == record.bucket and record.is_complete:
            track = self._track(rank, _REDUCTIONS, record.began, record.ended)
            self._file.span(rank, track, "reduction", (reduction, record.began, record.ended),
                            {"bucket": record.bucket})
        if record.step not in (NO_STEP, self._steps.get(rank)):
            self._steps[rank] = record.step
            self._file.mark(rank, 0, f"STEP {record.step}", begin)
        if self._mark_cycles and record.agreed != self._cycles.get(rank):
            self._cycles[rank] = record.agreed
            self._file.mark(rank, 0, "CYCLE_START", record.agreed)
        parts: list[Part] = [(f"NEGOTIATE_{record.kind.upper()}", begin, record.agreed),
                             ("QUEUE", record.agreed, record.began), (reduction, record.began, record.ended)]
        values = {**record._asdict(), "submitted": int(record.submitted > 0), "agreed": record.agreed - begin,
                  "began": record.began - begin, "ended": record.ended - begin, "delivered": record.delivered - begin}
        del values["name"]
        self._file.span(rank, self._track(rank, _OPERATIONS, begin, record.delivered), _OPERATION,
                        (record.name, begin, record.delivered), values, [part for part in parts if part[2] > part[1]])

    def _track(self, group: int, name: str, begin: int, end: int) -> int:
        """Occupy a track with this name from `begin` to `end`, and return its index. Adds a track if none is free."""
        tracks = self._tracks.setdefault(group, [])
        for track, (its_name, free) in enumerate(tracks):
            if its_name == name and free <= begin:
                tracks[track] = name, end
                return track
        self._file.track(group, self._names[group], len(tracks), name)
        tracks.append((name, end))
        return len(tracks) - 1

    def _compare(self, record: Record) -> None:
        """Keep the record. When the records of all ranks are there, write which rank was the last to submit."""
        key = record.process_set, record.number
        together = self._submitted.setdefault(key, [])
        together.append(record)
        if len(together) < record.ranks:
            if len(self._submitted) > _KEPT:
                del self._submitted[next(iter(self._submitted))]
            return
        del self._submitted[key]
        arrival = arrival_of(together)
        if arrival is not None:
            first, last, rank = arrival
            group = len(self._names) - 1
            self._file.span(group, self._track(group, _OPERATIONS, first, last), "last", (f"rank {rank}", first, last),
                            {"operation": record.name, "late_us": (last - first) // 1000})


def label(record: Record) -> str:
    """Return the backend of an operation as in the names of Horovod's timeline, such as SHM in SHM_ALLREDUCE."""
    return "GPU" if record.device == "gpu" else _LABELS.get(record.backend, record.backend.upper())


# -- the file ----------------------------------------------------------------------------------------------------------


class _TraceFile:
    """A trace file that is being written. Added events are in the file after `flush`. Times are nanoseconds.

    The file is a JSON array of events, one per line. Each write replaces the closing bracket and adds a new bracket.
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = 0
        self._events: list[bytes] = []
        try:
            self._put(b"[" + _CLOSE)
        except OSError as error:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise OSError(error.errno, error.strerror, path) from None

    def track(self, group: int, group_name: str, track: int, name: str) -> None:
        """Add a track and its name. Call this before the first span of the track."""
        for kind, values in (("process_name", {"name": group_name}), ("process_sort_index", {"sort_index": group}),
                             ("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
            self._add({"name": kind, "ph": "M", "pid": group, "tid": track, "args": values})

    def span(self, group: int, track: int, category: str, part: Part, values: Values,
             parts: Iterable[Part] = ()) -> None:
        """Add a span and its parts. The parts must be in the order of time."""
        for name, begin, end in (part, *parts):
            self._add({"name": name, "cat": category, "ph": "X", "pid": group, "tid": track, "ts": begin / 1000,
                       "dur": (end - begin) / 1000, "args": values})
            category, values = "phase", {}

    def mark(self, group: int, track: int, name: str, at: int, category: str = "") -> None:
        self._add({"name": name, "cat": category, "ph": "i", "s": "t", "pid": group, "tid": track, "ts": at / 1000})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(json.dumps(event, separators=(",", ":")).encode())

    def flush(self) -> None:
        events, self._events = self._events, []
        block: list[bytes] = []
        size = 0
        for event in events:
            # A signal that ends the process can cut a write between two pages.
            if block and size + len(event) > _PAGE_BYTES:
                self._put(b",\n".join(block) + _CLOSE)
                block, size = [], 0
            block.append(event)
            size += len(event) + 2
        if block:
            self._put(b",\n".join(block) + _CLOSE)

    def _put(self, data: bytes) -> None:
        data = (b"" if self._end == 0 else b"\n" if self._end == 1 else b",\n") + data
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._end + done)
        except OSError:
            # The disk is full. The bracket overwrites part of the written data, which needs no further space.
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _CLOSE, self._end)
            raise
        self._end += len(data) - len(_CLOSE)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def records_in(path: str) -> tuple[list[Record], bool]:
    """Return the records in a timeline, and whether the end of its file is missing.

    Raises OSError: The file cannot be read. ValueError: It is no timeline, or a different version of mpistrat wrote it.
    """
    events, is_cut = _events_in(path)
    try:
        operations = [(event["name"], round(event["ts"] * 1000), event["args"]) for event in events
                      if event.get("cat") == _OPERATION]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the file was not written by mpistrat: {error!r}.") from error
    if not operations:
        raise ValueError("it has no operation of mpistrat. The file is empty, or was not written by mpistrat.")
    try:
        return [_record_of(*each) for each in operations], is_cut
    except (KeyError, TypeError) as error:
        raise ValueError(f"the timeline was written by another version of mpistrat: {error}.") from error


def _record_of(name: str, begin: int, values: Mapping[str, Any]) -> Record:
    """Undo Timeline._write for one operation. Raises KeyError or TypeError: A field is missing, or has a wrong type."""
    fields: dict[str, Any] = {**values, "name": name, "submitted": begin if values["submitted"] else 0}
    for key in ("agreed", "began", "ended", "delivered"):
        fields[key] += begin
    record = Record(**fields)
    for (field, kind), value in zip(Record.__annotations__.items(), record, strict=True):
        if type(value) is not kind:
            raise TypeError(f"the field {field} must be {kind.__name__}. Received: {value!r}")
    return record


def places_in(path: str) -> list[tuple[int, int, str]]:
    """Return from a timeline where in the script each rank was in each second, as (rank, nanoseconds, place)."""
    return [(event["pid"], round(event["ts"] * 1000), event["name"]) for event in _events_in(path)[0]
            if event.get("cat") == _PLACE]


def _events_in(path: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the events in a file, and whether the end of the file is missing."""
    data, is_cut = Path(path).read_bytes(), False
    try:
        found = json.loads(data)
        events = found.get("traceEvents") if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        is_cut, events = True, []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                events.append(json.loads(line.strip().rstrip(b",")))
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else [], is_cut
