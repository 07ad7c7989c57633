"""The last operations of each engine, in a ring, and the reader of the rings of this rank, which counts steps.

An engine appends to its ring. Any thread may read the ring.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import NamedTuple

from ..core.handle import Entry
from ..core.interfaces import Observer
from ..core.request import CollectiveType, Request


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
    """The last `capacity` operations of one engine. `tracer` exchanges messages over this engine; None: no tracer."""

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
        """The operations from `serial` on, without operations that are no longer in the ring."""
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
    """Whether a request reduces gradients. Of all reductions, only those of gradients have labels (variable names)."""
    return bool(request.labels) and request.kind is CollectiveType.ALLREDUCE


class StepCounter:
    """Counts the steps of one rank. A new step begins when the name of a gradient occurs for the second time.

    A step is a step of the distributed optimizer, of the tape or of the strategy. Two optimizers that take turns, with
    different names of gradients, make one step together.
    """

    def __init__(self) -> None:
        self.steps = 0  # How many have begun.
        self._names: set[tuple[int, str]] = set()

    def add(self, request: Request) -> int:
        """The step of the next request in the order of execution, from 0; NO_STEP before the first step."""
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
    """Reads the rings. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # The serial of the next operation of each process set.
        self.steps = StepCounter()  # Counts the steps of the script.
        self.operations = 0  # How many operations this rank has completed, with those that the rings have lost.
        self.nbytes = 0  # Bytes of the operations that were read.

    def read(self, every: Mapping[int, Traced]) -> tuple[list[Read], int]:
        """Return the new operations, and the number of operations that were lost because reading was too slow."""
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
                found.append(Read(each, traced, self.steps.add(each.request)))
        return found, lost
