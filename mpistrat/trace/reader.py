"""Reads the new operations from the rings of this rank's engines, with the step of each operation, and counts them."""

from collections.abc import Mapping
from typing import NamedTuple

from .record_ring import Operation, Traced
from .totals import StepCounter


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
        # operations: How many operations this rank has completed, including operations that the rings have lost.
        # nbytes: Bytes of the operations that were read.
        self.operations = self.nbytes = 0

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
