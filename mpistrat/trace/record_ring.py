"""The last operations of one engine. The engine appends to it; any thread may read it."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic_ns
from typing import NamedTuple

from ..core.handle import Entry
from ..core.interfaces import Observer
from ..core.request import Request


class Operation(NamedTuple):
    """An operation that is complete. Times are nanoseconds of this host's CLOCK_MONOTONIC."""

    serial: int  # Its place in the ring, from 0. Operations are recorded when they are complete.
    number: int  # Its place in the order in which its process set executes, the same on all ranks of the set.
    bucket: int  # The number of the first operation in the same reduction.
    request: Request  # What the ranks have agreed on.
    nbytes: int  # Bytes of this rank's tensors.
    submitted: int  # When this rank has submitted it; 0: it waits in join(), and has not.
    agreed: int  # When this rank learned that all ranks have.
    began: int  # When the reduction began.
    ended: int  # When the reduction ended. On a GPU, when this rank saw that.
    delivered: int  # When the result was handed over.


class OperationRing(Observer):
    """The last operations of one engine.

    Args:
        capacity: How many; 0: none.
        tracer: Exchanges messages over this engine; None: nothing does.
    """

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
        """The operations from this one on, as far as they are kept: the first one may be a later one."""
        operations = self._operations.copy()
        if not operations or operations[-1][0] < serial:
            return []
        return [Operation._make(each) for each in operations if each[0] >= serial]


@dataclass(frozen=True)
class Traced:
    """What the trace reads of the engine of one process set."""

    ring: OperationRing  # Its last operations.
    ranks: int  # How many ranks the set has.
    backend: str  # What reduces tensors on CPUs.
    in_flight: Callable[[], Iterable[Entry]]  # Returns what is submitted and not complete.
    # Returns what this rank has chosen for all ranks by the times of collectives, in sentences.
    choices: Callable[[], list[str]] = list
