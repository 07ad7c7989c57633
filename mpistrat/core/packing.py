"""Packs arrays of one dtype into a flat buffer, and unpacks it. The arrays are C-contiguous. Pure functions."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .arithmetic import scaled_copy


class FlatLayout:
    """The positions of arrays in a flat buffer that holds one array after the other. `sizes` are in elements.

    `length`: The number of elements of all arrays.
    """

    def __init__(self, sizes: Sequence[int]):
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]

    def segments(self, start: int, count: int) -> list[tuple[int, slice, slice]]:
        """Return the parts of arrays that hold elements `start` to `start + count` of the flat buffer.

        Returns:
            (index of the array, its elements, the same elements counted from `start`) for each array.
        """
        index, segments, done = bisect_right(self._starts, start) - 1, [], 0
        while done < count:
            first = start + done - self._starts[index]
            size = min(self._starts[index + 1] - self._starts[index] - first, count - done)
            if size:
                segments.append((index, slice(first, first + size), slice(done, done + size)))
            done += size
            index += 1
        return segments


def segments(arrays: Sequence[np.ndarray]) -> list[tuple[slice, np.ndarray]]:
    """Return (elements in the flat buffer, 1-D view) for each array that has any elements."""
    ends = accumulate([array.size for array in arrays])
    return [(slice(end - array.size, end), array.reshape(-1)) for array, end in zip(arrays, ends) if array.size]


def pack(arrays: Sequence[np.ndarray], target: np.ndarray, scale: float = 1.0) -> None:
    """Copy `arrays`, multiplied by `scale`, one after the other to 1-D `target`, which has their number of elements."""
    if len(arrays) == 1:
        scaled_copy(arrays[0].reshape(-1), scale, target)
        return
    for elements, view in segments(arrays):
        scaled_copy(view, scale, target[elements])


def unpack(source: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy 1-D `source` to `arrays`, one after the other. All arrays together have as many elements as `source`."""
    if len(arrays) == 1:
        np.copyto(arrays[0].reshape(-1), source)
        return
    for elements, view in segments(arrays):
        view[...] = source[elements]
