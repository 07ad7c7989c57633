"""Operations in two forms: Operation, which an engine keeps in a ring, and Record, for messages and timelines.

Any thread may read the ring of an engine. Ranks send Records to rank 0 in messages, which are JSON. A message can be
read without earlier messages. Messages are small, because MPI sends a message of a few KB at once, but a larger one
only when the receiver answers. A failing rank prints Records in the same format, encoded (last.py).
"""

import json
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NamedTuple

from ..core.handle import Entry
from ..core.interfaces import Observer
from ..core.request import CollectiveType, Request

_MESSAGE_BYTES = 3000
_MOST_CHARACTERS = 200  # of a name
Span = tuple[int, int]  # (begin, end) in nanoseconds
NO_STEP = -1  # of a record before the first step; StepCounter counts from there


# -- what the engines of one rank record -------------------------------------------------------------------------------


class Operation(NamedTuple):
    """An operation that is complete. Times are nanoseconds of this host's CLOCK_MONOTONIC."""

    serial: int  # The number of operations recorded before this operation. Operations are recorded when complete.
    number: int  # The index of the operation in the process set's order of execution, the same on all its ranks.
    bucket: int  # The number of the first operation in the same reduction.
    request: Request  # What the ranks have agreed on.
    nbytes: int  # Bytes of this rank's tensors.
    submitted: int  # When this rank submitted the operation; 0: this rank waits in join(), and did not submit it.
    agreed: int  # When this rank learned that all ranks have submitted the operation.
    began: int  # When the reduction began.
    ended: int  # When the reduction ended. On a GPU, when this rank noticed the end.
    delivered: int  # When the result was handed over.


class OperationRing(Observer):
    """Keeps the last `capacity` operations of one engine, and connects `tracer` with the tracers of other ranks."""

    def __init__(self, capacity: int, tracer: Observer | None = None):
        self._tracer = tracer or Observer()
        self.outgoing, self.receive, self.fail = (  # type: ignore[method-assign]
            self._tracer.outgoing, self._tracer.receive, self._tracer.fail)
        # Appending to a deque is atomic, and so is copying it: the engine never waits for a reader.
        self._operations: deque[tuple[int, int, int, Request, int, int, int, int, int, int]] = deque(maxlen=capacity)
        self._is_on, self._serial = capacity > 0, 0

    def add(self, entry: Entry, bucket: int, began: int, ended: int) -> None:
        if self._is_on:  # A plain tuple takes a third of the time of an Operation, and `sum` takes 0.1 us.
            self._operations.append((self._serial, entry.number, bucket, entry.request,
                                     entry.nbytes, entry.submitted, entry.agreed, began, ended, monotonic_ns()))
            self._serial += 1  # One thread at a time drives the engine.

    def since(self, serial: int) -> list[Operation]:
        """Return the operations in the ring whose serial number is at least `serial`."""
        return [Operation._make(each) for each in self._operations.copy() if each[0] >= serial]


@dataclass(frozen=True)
class Traced:
    """The data that the trace reads from the engine of one process set."""

    ring: OperationRing  # The last operations of the engine.
    ranks: int  # How many ranks the set has.
    backend: str  # The name of the data plane that reduces tensors on CPUs.
    in_flight: Callable[[], Iterable[Entry]]  # Returns the entries that are submitted and not complete.
    # Returns sentences on the choices that this rank has made for all ranks by the times of collectives.
    choices: Callable[[], list[str]] = list


def is_of_gradients(request: Request) -> bool:
    """Return whether a request reduces gradients: whether it is an all-reduce with labels (names of variables)."""
    return bool(request.labels) and request.kind is CollectiveType.ALLREDUCE


class StepCounter:
    """Counts the steps of one rank. A new step begins when the name of a gradient occurs for the second time.

    A step is a step of the distributed optimizer, of the tape or of the strategy. Two optimizers that work in turn make
    one step together if the names of their gradients differ.
    """

    def __init__(self) -> None:
        self.steps = 0  # How many have begun.
        self._names: set[tuple[int, str]] = set()

    def add(self, request: Request) -> int:
        """Count the next request in the order of execution. Return its step, from 0; NO_STEP before the first step."""
        if is_of_gradients(request):
            key = request.process_set, request.name
            if self.steps == 0 or key in self._names:
                self.steps += 1
                self._names.clear()
            self._names.add(key)
        return self.steps - 1


class Read(NamedTuple):
    """An operation that was read, the engine that executed the operation, and the step of the operation."""

    operation: Operation
    traced: Traced
    step: int


class Reader:
    """Reads the OperationRings of this rank's engines. Only one thread at a time may use the Reader."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # The serial of the next operation of each process set.
        self.counter = StepCounter()
        self.operations = 0  # How many operations this rank has completed, with those that the rings have lost.
        self.nbytes = 0  # Bytes of the operations that were read.

    def read(self, every: Mapping[int, Traced]) -> tuple[list[Read], int]:
        """Return the new operations, and the number of operations that the rings have lost since the last call."""
        found: list[Read] = []
        lost = 0
        for number, traced in every.items():
            expected = self._next.get(number, 0)
            operations = traced.ring.since(expected)
            if not operations:
                continue
            self._next[number] = operations[-1].serial + 1
            self.operations += operations[-1].serial + 1 - expected
            lost += operations[0].serial - expected
            # Without a timeline, the many operations of a whole second are read here, in a few milliseconds.
            for each in operations:
                self.nbytes += each.nbytes
                found.append(Read(each, traced, self.counter.add(each.request)))
        return found, lost


# -- records of all ranks ----------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """An operation of one rank. Times are in ns: by the rank's clock in messages, by rank 0's clock in a timeline."""

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
        """Whether the operation was executed."""
        return self.number >= 0

    def shifted(self, offset: int) -> "Record":
        """Return this record with all times reduced by `offset` nanoseconds."""
        return self._replace(submitted=self.submitted and self.submitted - offset, agreed=self.agreed - offset,
                             began=self.began - offset, ended=self.ended - offset, delivered=self.delivered - offset)


_HEAD = Record._fields.index("number")  # The fields from here on differ among operations of one name.


class Arrival(NamedTuple):
    """When the first rank and the last rank submitted an operation."""

    first: int  # When the first rank submitted the operation.
    last: int  # When the last rank submitted the operation.
    rank: int  # The last rank.


def arrival_of(records: Iterable[Record]) -> Arrival | None:
    """Return the Arrival of the operation with these records; None if fewer than two ranks submitted and ran it."""
    came = [(each.submitted, each.rank) for each in records if each.submitted and each.is_complete]
    return Arrival(min(came)[0], *max(came)) if len(came) > 1 else None


def by_operation(records: Iterable[Record]) -> dict[tuple[int, int], list[Record]]:
    """Group the records by operation. The key is the process set and the number of the operation."""
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
    """Return an Operation that ends `now`, for a submitted entry on which the ranks have not agreed."""
    number = -1 - zlib.crc32(entry.request.name.encode())  # The same on all ranks.
    return Operation(0, number, number, entry.request, entry.nbytes, entry.submitted, now, now, now, now)


def to_messages(records: Sequence[Record], encode: Callable[[bytes], bytes] = bytes,
                most_bytes: int = _MESSAGE_BYTES) -> list[bytes]:
    """Return the records in order, as encoded messages of at most `most_bytes`. A single record may be longer."""
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
    """Return the records in a message of `to_messages`, after `encode` was undone."""
    heads, rows = json.loads(message)
    return [Record(*heads[head], *row) for head, *row in rows]


# -- spans -------------------------------------------------------------------------------------------------------------


def union(spans: Iterable[Span], within: Span | None = None) -> list[Span]:
    """Return the union of `spans` as disjoint spans in order, clipped to the span `within` if it is given."""
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
    """Return disjoint spans of time in which an operation was outstanding and its step still computed gradients.

    `steps`: The spans of each step's operations, from submission to result. A step computes until the last submission.
    """
    return union((begin, min(end, max(some)[0])) for some in steps for begin, end in some)


def length(disjoint: Sequence[Span]) -> int:
    """Return the total length of disjoint spans in nanoseconds."""
    return sum(end - begin for begin, end in disjoint)
