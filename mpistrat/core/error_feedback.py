"""What `Compression.int8` rounds off, kept by the names of buckets. See core/quantised.py.

Used by the engine's thread.
"""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from .errors import EngineError
from .interfaces import DataPlane
from .quantised import Quantised
from .topology import Topology


class Errors:
    """What was rounded off the values of a bucket, in float32; zeros at first. `count`: The number of values.

    Memory that is not written to is not taken, and a rank writes only where it sends.
    """

    def __init__(self, count: int):
        self.count, self._values = count, np.zeros(count, np.float32)
        self._own: set[tuple[int, int]] = set()  # Where this rank sends.

    def part(self, first: int, count: int) -> np.ndarray:
        """Those of values that this rank sends."""
        self._own.add((first, first + count))
        return self._values[first:first + count]

    def set(self, values: np.ndarray | None) -> None:
        """Go on with these; None: with zeros."""
        self._values[:] = 0.0 if values is None else values

    def own(self) -> np.ndarray:
        """Those of the values that this rank sends, and zeros."""
        result = np.zeros_like(self._values)
        for first, last in self._own:
            result[first:last] = self._values[first:last]
        return result


class ErrorFeedback:
    """What was rounded off, by the names of buckets, as long as the plane exists.

    Args:
        plane: Tells the ranks whether all have the memory.
        topology: Its ranks.
    """

    def __init__(self, plane: DataPlane, topology: Topology):
        self._plane, self._topology = plane, topology
        self._kept: dict[str, tuple[Quantised, Errors]] = {}
        self._restored: dict[str, np.ndarray] = {}

    def own(self) -> dict[str, np.ndarray]:
        """This rank's errors by the names of buckets, whose sum is that of the tensors. Local; nothing is in flight.

        Those that were restored are rank 0's until their bucket comes.
        """
        waiting = {name: errors if self._topology.rank == 0 else np.zeros_like(errors)
                   for name, errors in self._restored.items()}
        return dict(sorted((waiting | {name: errors.own() for name, (_, errors) in self._kept.items()}).items()))

    def restore(self, errors: Mapping[str, np.ndarray]) -> None:
        """Begin with sums that ranks have made of `own`, the same on all ranks. Local; nothing is in flight."""
        self._kept, self._restored = {}, dict(errors)

    def of(self, quantised: Quantised, count: int) -> Errors | None:
        """The errors of a bucket of `count` values, zeros at first; None: none are kept. Collective.

        Raises EngineError: Some ranks have no memory for them; on all ranks.
        """
        if not quantised.name:
            return None
        before, errors = self._kept.get(quantised.name, (quantised, None))
        if errors is None or before.request != quantised.request or errors.count != count:
            errors = self._allocated(quantised, count)
        elif before.labels != quantised.labels:
            errors.set(None)
        self._kept[quantised.name] = quantised, errors
        return errors

    def _allocated(self, quantised: Quantised, count: int) -> Errors:
        self._kept.pop(quantised.name, None)
        errors, size = None, self._topology.size
        with suppress(MemoryError):
            errors = Errors(count)
        missing = np.empty(size, np.uint8)
        self._plane.allgather(np.array([errors is None], np.uint8), missing, [1] * size)
        if errors is None or missing.any():
            raise EngineError(f"{quantised.name}: ranks {self._topology.listed(np.flatnonzero(missing).tolist())} have "
                              f"no memory for the error feedback of Compression.int8, "
                              f"{4 * count} bytes. Take Compression.bf16, which keeps none.")
        restored = self._restored.pop(quantised.name, None)
        if restored is not None and restored.size == count and self._topology.host == self._topology.hosts[0]:
            errors.set(restored)  # Of each value, one rank of a host sends it.
        return errors
