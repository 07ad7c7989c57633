"""The rounding errors of `Compression.int8` (core/quantised.py), which are added to the gradients of the next step."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from .errors import EngineError
from .interfaces import DataPlane
from .quantised import Quantised
from .topology import Topology


class Errors:
    """The rounding errors of the `count` values of a bucket, in float32; zeros at first.

    A rank writes only the errors of values that it sends to other hosts. Errors that were never written take no memory.
    """

    def __init__(self, count: int):
        self.values = np.zeros(count, np.float32)
        self._own: set[tuple[int, int]] = set()  # The parts that this rank sends, as (first, end).

    def part(self, first: int, count: int) -> np.ndarray:
        """Return a view of the errors of the `count` values from index `first` on. This rank sends these values."""
        self._own.add((first, first + count))
        return self.values[first:first + count]

    def own(self) -> np.ndarray:
        """Return a copy of the errors, with zeros for values that this rank does not send."""
        result = np.zeros_like(self.values)
        for first, last in self._own:
            result[first:last] = self.values[first:last]
        return result


class ErrorFeedback:
    """The rounding errors of all buckets, by bucket name."""

    def __init__(self, plane: DataPlane, topology: Topology):
        self._plane, self._topology = plane, topology
        self._kept: dict[str, tuple[Quantised, Errors]] = {}
        self._restored: dict[str, np.ndarray] = {}

    def own(self) -> dict[str, np.ndarray]:
        """Return this rank's part of the errors, by the name of the bucket. Local; no collective may be in flight.

        The errors of a bucket are the sum of what all ranks return. After `restore`, rank 0 alone returns the restored
        errors of a bucket, and the other ranks return zeros, until the bucket is reduced again.
        """
        waiting = {name: errors if self._topology.rank == 0 else np.zeros_like(errors)
                   for name, errors in self._restored.items()}
        return dict(sorted((waiting | {name: errors.own() for name, (_, errors) in self._kept.items()}).items()))

    def restore(self, errors: Mapping[str, np.ndarray]) -> None:
        """Replace all errors. `errors`: The sums over ranks of what `own` returned. Local; no collective in flight."""
        self._kept, self._restored = {}, dict(errors)

    def of(self, quantised: Quantised, count: int) -> Errors | None:
        """Return the errors of the `count` values of bucket `quantised.name`; None: no error feedback. Collective.

        Raises EngineError: A rank has no memory for the errors. All ranks raise it.
        """
        if not quantised.name:
            return None
        before, errors = self._kept.get(quantised.name, (quantised, None))
        if errors is None or before.request != quantised.request or errors.values.size != count:
            errors = self._allocated(quantised, count)
        elif before.labels != quantised.labels:
            errors.values[:] = 0.0
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
                              f"no memory for the error feedback of Compression.int8, which needs "
                              f"{4 * count} bytes. Use Compression.bf16, which needs no error feedback.")
        restored = self._restored.pop(quantised.name, None)
        if restored is not None and restored.size == count and self._topology.host == self._topology.hosts[0]:
            errors.values[:] = restored  # Only on one host: of its ranks, just one sends each value.
        return errors
