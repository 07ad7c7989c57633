"""FiniteWatch: names the rank that is the first with Inf or NaN in its gradients. Averages carry them to all ranks.

After one step all weights are NaN, equally on all ranks, and the origin cannot be found any more. So the results of
reductions are checked before they are delivered, while this rank still has its own gradients. It is enough to check a
few elements, because one row of a batch with Inf or NaN spoils most of the gradients of all earlier layers.

Loss scaling skips steps whose gradients are not finite. So a rank warns only if the weights are not finite either, or
if more consecutive reductions were not finite than loss scaling ever skips.

The executor calls `look` in the thread that drives. Any thread may call `conclude` while no reduction is in progress.
"""

import logging
from cmath import isfinite as _is_finite_number
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import cast

import numpy as np

from ..core.handle import Entry
from ..core.request import Request
from ..core.topology import MOST_LISTED

logger = logging.getLogger(__name__)

# The number of reductions after which a rank warns. Loss scaling starts at 2 ** 15, and each skipped step halves it.
_CERTAIN = 20
_ELEMENTS = 8  # The number of elements that are checked in a reduction, from the first tensor to the last.
_GOLDEN = 0.618  # The fractional parts of its multiples are spread evenly.
_MOST_KNOWN = 256


class FiniteWatch:
    """Checks reduced gradients for Inf and NaN. As soon as these are permanent, it warns, and checks no more."""

    def __init__(self, rank: int):
        self.is_done = False  # Whether permanent Inf or NaN were found, on this rank or on another rank.
        self._rank = rank
        self._indices: dict[Request, list[tuple[int, int]]] = {}  # (array, element) of each element to check.
        # Since the first results that were not finite: their labels, the labels of this rank's bad tensors, the count.
        self._labels: tuple[str, ...] = ()
        self._own: list[str] = []
        self._count = 0

    def look(self, entry: Entry, results: Sequence[np.ndarray]) -> None:
        """Check the results of a reduction that has labels. Only reductions of gradients have labels. Local."""
        labels = entry.request.labels
        if self.is_done or (self._count and labels != self._labels):
            return
        for array, index in self._indices_of(entry):
            if not _is_finite_number(results[array].item(index)):
                break
        else:
            self._count = 0
            return
        if not self._count:
            arrays = cast("Sequence[np.ndarray]", entry.arrays)
            self._labels = labels
            self._own = [label for label, array, first, size in _tensors(entry.request, len(arrays))
                         if not _is_finite(arrays[array].reshape(-1)[first:first + size])]
        self._count += 1
        if self._count == _CERTAIN:
            self._tell()

    def conclude(self, weights: Sequence[np.ndarray]) -> None:
        """If gradients had Inf or NaN, warn if `weights` have any too, and otherwise forget those gradients. Local."""
        if self._count and not self.is_done:
            if all(map(_is_finite, weights)):
                self._count = 0
            else:
                self._tell()

    def _tell(self) -> None:
        self.is_done = True
        self._indices.clear()
        if self._own:
            more = f" and {len(self._own) - MOST_LISTED} more" if len(self._own) > MOST_LISTED else ""
            when = f"{self._count} steps ago" if self._count > 1 else "in the latest step"
            logger.warning("mpistrat: rank %d was the first with Inf or NaN in its gradients, %s: in those of %s%s (%d "
                           "tensors were reduced together). With the average the NaN reached the weights of all ranks. "
                           "Look at this rank's rows and loss. MPISTRAT_NAN_WARNING=0 turns this check off.",
                           self._rank, when, ", ".join(self._own[:MOST_LISTED]), more, len(self._labels))

    def _indices_of(self, entry: Entry) -> list[tuple[int, int]]:
        indices = self._indices.get(entry.request)
        if indices is None:
            if len(self._indices) == _MOST_KNOWN:  # Eager programs may have new requests in each step.
                self._indices.clear()
            tensors = [each for each in _tensors(entry.request, len(entry.arrays)) if each[3]]
            chosen = [(tensors[number * (len(tensors) - 1) // (_ELEMENTS - 1)], number * _GOLDEN % 1.0)
                      for number in range(_ELEMENTS if tensors else 0)]
            indices = self._indices[entry.request] = [
                (array, first + int(share * size)) for (_, array, first, size), share in chosen]
        return indices


def _tensors(request: Request, arrays: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (label, array index, first element in the array, size) of each tensor. An array may hold several."""
    tensors = iter(zip(request.labels, request.tensors, strict=True))
    for array in range(arrays):
        first = 0
        for label, (_, shape) in islice(tensors, len(request.layout[array]) if request.layout else 1):
            yield label, array, first, prod(shape)
            first += prod(shape)


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(array)))
