"""A list of arrays as one sequence of elements: to copy any part of it in or out, without joining the arrays first."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .scale import scaled_copy


class Line:
    """Arrays one after the other, as far as sizes tell.

    Args:
        sizes: In elements.
    """

    def __init__(self, sizes: Sequence[int]):
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]

    def pieces(self, start: int, count: int) -> list[tuple[int, slice, slice]]:
        """Where `count` elements from `start` on are: the array's number, its elements, and which of the `count`."""
        index, pieces, place = bisect_right(self._starts, start) - 1, [], 0
        while place < count:
            first = start + place - self._starts[index]
            size = min(self._starts[index + 1] - self._starts[index] - first, count - place)
            if size:
                pieces.append((index, slice(first, first + size), slice(place, place + size)))
            place += size
            index += 1
        return pieces


class Stream:
    """C-contiguous arrays of one dtype, as if they were one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [array.reshape(-1) for array in arrays]
        self._line = Line([array.size for array in self._arrays])

    def copy_to(self, target: np.ndarray, scale: float = 1.0) -> None:
        """Fill 1-D `target` with the first elements, times `scale`."""
        for here, piece in self.pieces(target.size):
            scaled_copy(piece, scale, target[here])

    def copy_from(self, source: np.ndarray) -> None:
        """Overwrite the first elements with 1-D `source`."""
        for here, piece in self.pieces(source.size):
            piece[...] = source[here]

    def pieces(self, count: int) -> list[tuple[slice, np.ndarray]]:
        """The first `count` elements, as (which of them, view) for each array that they lie in."""
        return [(here, self._arrays[array][part]) for array, part, here in self._line.pieces(0, count)]


def join(arrays: Sequence[np.ndarray], target: np.ndarray, scale: float = 1.0) -> None:
    """Copy all of `arrays`, times `scale`, one after the other to 1-D `target`, which is as long as they are."""
    if len(arrays) == 1:
        scaled_copy(arrays[0].reshape(-1), scale, target)
    else:
        Stream(arrays).copy_to(target, scale)


def split(source: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy 1-D `source` to `arrays`, one after the other, which are as long together."""
    if len(arrays) == 1:
        np.copyto(arrays[0].reshape(-1), source)
    else:
        Stream(arrays).copy_from(source)
