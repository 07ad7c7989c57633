"""A list of arrays as one sequence of elements: to copy any part of it in or out, without joining the arrays first."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .scale import scaled_copy


class Stream:
    """C-contiguous arrays of one dtype, as if they were one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [array.reshape(-1) for array in arrays]
        self._starts = list(accumulate((array.size for array in self._arrays), initial=0))

    def copy_to(self, target: np.ndarray, scale: float = 1.0, start: int = 0) -> None:
        """Fill 1-D `target` with the elements from `start` on, times `scale`."""
        if scale == 1.0:
            for place, piece in self.pieces(start, target.size):
                target[place:place + piece.size] = piece
        else:
            for place, piece in self.pieces(start, target.size):
                scaled_copy(piece, scale, target[place:place + piece.size])

    def copy_from(self, source: np.ndarray, start: int = 0) -> None:
        """Overwrite the elements from `start` on with 1-D `source`."""
        for place, piece in self.pieces(start, source.size):
            piece[...] = source[place:place + piece.size]

    def pieces(self, start: int, count: int) -> list[tuple[int, np.ndarray]]:
        """`count` elements from `start` on, as (place among them, view) for each array that they lie in."""
        index, pieces, place = bisect_right(self._starts, start) - 1, [], 0
        while place < count:
            first = start + place - self._starts[index]
            piece = self._arrays[index][first:first + count - place]
            if piece.size:
                pieces.append((place, piece))
            place += piece.size
            index += 1
        return pieces
