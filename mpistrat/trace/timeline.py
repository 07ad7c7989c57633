"""The timeline of a job, which rank 0 writes: the operations of all ranks in one file, on the clock of rank 0.

Each rank is a group. Its first track has the reductions, and other tracks have the operations, each from its submission
to its result, with Horovod's phases: NEGOTIATE_ALLREDUCE until all ranks have submitted it, QUEUE until its reduction
begins, and the reduction itself, as SHM_ALLREDUCE. Copies into and out of the fusion buffer are not shown: they are
parts of the reduction, chunk by chunk. One more group shows, for each operation, which rank came last.
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
        mark_cycles: Whether to mark when each rank begins to execute what was agreed on together.
    """

    def __init__(self, file: TraceFile, hosts: Sequence[str], mark_cycles: bool):
        self._file, self._mark_cycles = file, mark_cycles
        self._names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)] + ["the rank that came last"]
        # Of the tracks of each group: the name of each, and from when on it is free.
        self._tracks: dict[int, list[tuple[str, int]]] = {}
        self._submitted: dict[tuple[int, int], list[Record]] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._steps: dict[int, int] = {}
        self._cycles: dict[int, int] = {}
        self._choices: set[str] = set()
        self._now = 0  # the end of the last operation of rank 0
        # operations: How many were written.
        # lost: How many were not, because they came faster than they could be read.
        self.operations = self.lost = 0

    def add(self, records: Iterable[Record]) -> None:
        """Write records, whose times are of rank 0's clock. Raises OSError: The file cannot be written."""
        for record in records:
            self.operations += 1
            self._write(record)
            self._compare(record)
        self._file.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def add_choices(self, sentences: Iterable[str]) -> None:
        """Mark what rank 0 has chosen by the times of collectives, where it is new. Raises as `add`."""
        for sentence in sentences:
            if sentence not in self._choices:
                self._choices.add(sentence)
                self._file.mark(0, 0, sentence, self._now)
                self._file.flush()

    def add_places(self, places: Mapping[int, str], now: int) -> None:
        """Mark where in the script each rank is. Raises as `add`."""
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
        """The first track of the group with this name that is free from `begin` on. It is taken until `end`."""
        tracks = self._tracks.setdefault(group, [])
        for track, (its_name, free) in enumerate(tracks):
            if its_name == name and free <= begin:
                tracks[track] = name, end
                return track
        self._file.track(group, self._names[group], len(tracks), name)
        tracks.append((name, end))
        return len(tracks) - 1

    def _compare(self, record: Record) -> None:
        """Write which rank came last, once all ranks have sent their record of an operation."""
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
    """What carries out an operation, as Horovod's timeline names it."""
    return "GPU" if record.device == "gpu" else _LABELS.get(record.backend, record.backend.upper())


def records_in(spans: Iterable[tuple[str, int, Values]]) -> list[Record]:
    """The records that a file has, from files.spans_in.

    Raises ValueError: A field is missing, or is of another type: another version of mpistrat has written the file.
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
                    raise TypeError(f"{field} is {value!r}")
            records.append(record)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it was written by another version of mpistrat: {error}.") from error
    return records
