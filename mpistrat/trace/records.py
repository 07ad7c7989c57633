"""Records of operations, in messages to rank 0 and in a timeline, and spans of time. Pure functions.

A message is JSON, and can be read without earlier messages. Messages are small: MPI sends a message of a few KB at once
and a larger message only when the receiver answers. A failing rank prints the same messages, encoded (last.py).
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..core.handle import Entry
from ..core.request import CollectiveType
from .record_ring import Operation

_MESSAGE_BYTES = 3000
_MOST_CHARACTERS = 200  # of a name
Span = tuple[int, int]  # (begin, end) in nanoseconds
NO_STEP = -1  # of a record before the first step; StepCounter counts from there


class Record(NamedTuple):
    """An operation of one rank. Times are nanoseconds: of that rank's clock in messages, of rank 0's in a timeline."""

    rank: int  # The rank in the job.
    process_set: int
    ranks: int  # How many ranks the set has.
    backend: str  # See Traced.
    name: str
    kind: str  # "allreduce" and so on, a value of CollectiveType.
    op: str  # The reduction; "" for an operation that does not reduce.
    dtype: str  # The dtypes of the tensors, joined by "+". " as DTYPE" follows if they are sent in another dtype.
    device: str  # "cpu" or "gpu".
    # number, bucket, nbytes, submitted, agreed, began, ended, delivered: See Operation. `number` is negative if the
    # ranks had not agreed on the operation when this rank failed. The later times are then the time of the failure.
    number: int
    bucket: int
    nbytes: int
    step: int  # The step of training, from 0; NO_STEP before the first one.
    submitted: int
    agreed: int
    began: int
    ended: int
    delivered: int

    @property
    def is_complete(self) -> bool:
        """Whether the operation was carried out."""
        return self.number >= 0

    def shifted(self, offset: int) -> "Record":
        """Return this record with the times of a clock that is `offset` nanoseconds behind."""
        return self._replace(submitted=self.submitted and self.submitted - offset, agreed=self.agreed - offset,
                             began=self.began - offset, ended=self.ended - offset, delivered=self.delivered - offset)


_HEAD = Record._fields.index("number")  # The fields from here on differ among operations of one name.


class Arrival(NamedTuple):
    """When the ranks submitted an operation."""

    first: int  # When the first rank submitted the operation.
    last: int  # When the last rank submitted the operation.
    rank: int  # The last rank.


def arrival_of(records: Iterable[Record]) -> Arrival | None:
    """The Arrival of one operation, from its records; None if fewer than two ranks submitted and completed it."""
    came = [(each.submitted, each.rank) for each in records if each.submitted and each.is_complete]
    return Arrival(min(came)[0], *max(came)) if len(came) > 1 else None


def by_operation(records: Iterable[Record]) -> dict[tuple[int, int], list[Record]]:
    """The records of all ranks of each operation, by process set and number."""
    together: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        together[record.process_set, record.number].append(record)
    return together


def record_of(rank: int, operation: Operation, ranks: int, backend: str, step: int) -> Record:
    """Return the record of an operation of a rank. For `ranks` and `backend` see Traced."""
    request = operation.request
    is_reduced = request.kind in (CollectiveType.ALLREDUCE, CollectiveType.REDUCESCATTER)
    dtype = "+".join(sorted({tensor.dtype for tensor in request.tensors}))
    return Record(rank, request.process_set, ranks, backend, request.name[:_MOST_CHARACTERS],
                  request.kind.value, request.scaled.op.name.lower() if is_reduced else "",
                  f"{dtype} as {request.wire_dtype}" if request.wire_dtype else dtype, request.device, operation.number,
                  operation.bucket, operation.nbytes, step, *operation[5:])


def unfinished(entry: Entry, now: int) -> Operation:
    """An entry that a rank has submitted, and the ranks have not agreed on, as an Operation that ends `now`."""
    number = -1 - zlib.crc32(entry.request.name.encode())  # The same on all ranks.
    return Operation(0, number, number, entry.request, entry.nbytes, entry.submitted, now, now, now, now)


def to_messages(records: Sequence[Record], encode: Callable[[bytes], bytes] = bytes,
                most_bytes: int = _MESSAGE_BYTES) -> list[bytes]:
    """The records in order, as encoded messages of at most `most_bytes`. A single record may make a longer message."""
    if not records:
        return []
    heads: dict[tuple[Any, ...], int] = {}
    rows = [[heads.setdefault(record[:_HEAD], len(heads)), *record[_HEAD:]] for record in records]
    message = encode(json.dumps([list(heads), rows], separators=(",", ":")).encode())
    if len(message) <= most_bytes or len(records) == 1:
        return [message]
    half = len(records) // 2
    return to_messages(records[:half], encode, most_bytes) + to_messages(records[half:], encode, most_bytes)


def from_message(message: bytes) -> Iterable[Record]:
    """The inverse of `to_messages`: the records of one message, which is not encoded."""
    heads, rows = json.loads(message)
    return [Record(*heads[head], *row) for head, *row in rows]


# -- spans -------------------------------------------------------------------------------------------------------------


def union(spans: Iterable[Span], within: Span | None = None) -> list[Span]:
    """The union of `spans` as disjoint spans in order, clipped to the span `within` if it is given."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if within is not None:
            begin, end = max(begin, within[0]), min(end, within[1])
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def hidden(steps: Iterable[Sequence[Span]]) -> list[Span]:
    """The union of the times in which operations were outstanding while their step still computed gradients.

    `steps`: For each step the spans of its operations, from submission to result. The last submission ends computing.
    """
    return union((begin, min(end, max(some)[0])) for some in steps for begin, end in some)


def length(disjoint: Sequence[Span]) -> int:
    """The nanoseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in disjoint)
