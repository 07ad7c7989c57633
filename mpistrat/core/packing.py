"""A list of C-contiguous arrays of one dtype as one sequence of elements: which of them are where, and copies."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .arithmetic import scaled_copy


class FlatLayout:
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


def pieces(arrays: Sequence[np.ndarray]) -> list[tuple[slice, np.ndarray]]:
    """The elements of each of `arrays` that has any, 1-D: (which of all elements, view)."""
    ends = accumulate([array.size for array in arrays])
    return [(slice(end - array.size, end), array.reshape(-1)) for array, end in zip(arrays, ends) if array.size]


def join(arrays: Sequence[np.ndarray], target: np.ndarray, scale: float = 1.0) -> None:
    """Copy all of `arrays`, times `scale`, one after the other to 1-D `target`, which is as long as they are."""
    if len(arrays) == 1:
        scaled_copy(arrays[0].reshape(-1), scale, target)
        return
    for here, piece in pieces(arrays):
        scaled_copy(piece, scale, target[here])


def split(source: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy 1-D `source` to `arrays`, one after the other, which are as long together."""
    if len(arrays) == 1:
        np.copyto(arrays[0].reshape(-1), source)
        return
    for here, piece in pieces(arrays):
        piece[...] = source[here]
