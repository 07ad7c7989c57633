"""What is new in the rings of this rank's engines: each operation once, with its step, and how many there were."""

from collections.abc import Mapping
from typing import NamedTuple

from .record_ring import Operation, Traced
from .totals import StepCounter


class Read(NamedTuple):
    """An operation that was read, the engine that has executed it, and the step that it is part of."""

    operation: Operation
    traced: Traced
    step: int


class Reader:
    """Reads the rings. One thread at a time."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # The serial of the next operation of each process set.
        self.steps = StepCounter()  # Counts the steps of the script.
        # operations: How many operations this rank has completed, with those that the rings have lost.
        # nbytes: Bytes of those that were read.
        self.operations = self.nbytes = 0

    def read(self, every: Mapping[int, Traced]) -> tuple[list[Read], int]:
        """Return the operations that are new, and how many others came faster than they were read."""
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
            # Without a timeline so many are read in a second that this takes a few milliseconds.
            for each in operations:
                self.nbytes += each.nbytes
                found.append(Read(each, traced, self.steps.add(each.request)))
        return found, lost
