"""The timeline of a job, which rank 0 writes: the operations of all ranks in one file, on the clock of rank 0.

Each rank is a group. Its first track has the reductions. Other tracks have the operations, from submission to result,
with Horovod's phases: NEGOTIATE_ALLREDUCE until all ranks have submitted the operation, QUEUE until its reduction
begins, and the reduction itself, such as SHM_ALLREDUCE. Copies into and out of the fusion buffer are not shown, since
they are parts of the reduction, chunk by chunk. One more group shows, for each operation, which rank came last.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .chrome_trace import OPERATION, PLACE, Part, TraceFile, Values
from .records import NO_STEP, Record, arrival_of

Window = tuple[int, int]

_LABELS = {"shared_memory": "SHM", "local": "LOCAL", "mpi": "MPI", "hierarchical": "HIERARCHICAL"}
_REDUCTIONS, _OPERATIONS = "reductions", "operations"  # the names of tracks
_KEPT = 10_000  # operations of which some ranks have sent nothing yet


class Timeline:
    """Writes the records of all ranks to a file.

    Args:
        hosts: The host of each rank.
        mark_cycles: Whether to mark when each rank begins to execute the operations agreed on at the same time.
    """

    def __init__(self, file: TraceFile, hosts: Sequence[str], mark_cycles: bool):
        self._file, self._mark_cycles = file, mark_cycles
        self._names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)] + ["the rank that came last"]
        # For the tracks of each group: the name of the track, and the time from which on the track is free.
        self._tracks: dict[int, list[tuple[str, int]]] = {}
        self._submitted: dict[tuple[int, int], list[Record]] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._steps: dict[int, int] = {}
        self._cycles: dict[int, int] = {}
        self._choices: set[str] = set()
        self._now = 0  # the end of the last operation of rank 0
        # operations: How many operations were written.
        # lost: How many operations were lost, because they came faster than they could be read.
        self.operations = self.lost = 0

    def add(self, records: Iterable[Record]) -> None:
        """Write records with times of rank 0's clock. Raises OSError: The file cannot be written."""
        for record in records:
            self.operations += 1
            self._write(record)
            self._compare(record)
        self._file.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def add_choices(self, sentences: Iterable[str]) -> None:
        """Mark new sentences on choices that rank 0 has made by the times of collectives. Raises: See `add`."""
        for sentence in sentences:
            if sentence not in self._choices:
                self._choices.add(sentence)
                self._file.mark(0, 0, sentence, self._now)
                self._file.flush()

    def add_places(self, places: Mapping[int, str], now: int) -> None:
        """Mark where in the script each rank is. Raises: See `add`."""
        for rank, place in places.items():
            self._file.mark(rank, 0, place, now, PLACE)

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
        self._file.span(rank, self._track(rank, _OPERATIONS, begin, record.delivered), OPERATION,
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
        """Write which rank came last, when all ranks have sent their records of an operation."""
        key = record.process_set, record.number
        together = self._submitted.get(key)
        if together is None:
            together = self._submitted[key] = []
            self._order.append(key)
            if len(self._order) > _KEPT:
                self._submitted.pop(self._order.popleft(), None)
        together.append(record)
        if len(together) < record.ranks:
            return
        del self._submitted[key]
        arrival = arrival_of(together)
        if arrival is not None:
            first, last, rank = arrival
            group = len(self._names) - 1
            self._file.span(group, self._track(group, _OPERATIONS, first, last), "last", (f"rank {rank}", first, last),
                            {"operation": record.name, "late_us": (last - first) // 1000})


def label(record: Record) -> str:
    """The name of the backend that executes an operation, as in Horovod's timeline."""
    return "GPU" if record.device == "gpu" else _LABELS.get(record.backend, record.backend.upper())


def records_in(spans: Iterable[tuple[str, int, Values]]) -> list[Record]:
    """Return the records of a file, given the result of chrome_trace.spans_in.

    Raises ValueError: A field is missing or has another type, since another version of mpistrat wrote the file.
    """
    records = []
    for name, begin, values in spans:
        try:
            fields: dict[str, Any] = {**values, "name": name, "submitted": begin if values["submitted"] else 0}
            for key in ("agreed", "began", "ended", "delivered"):
                fields[key] += begin
            record = Record(**fields)
            for (field, kind), value in zip(Record.__annotations__.items(), record, strict=True):
                if type(value) is not kind:
                    raise TypeError(f"the field {field} must be {kind.__name__}. Received: {value!r}")
            records.append(record)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the timeline was written by another version of mpistrat: {error}.") from error
    return records
