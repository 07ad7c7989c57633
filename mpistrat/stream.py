"""A list of arrays as one stream of elements: to copy the next so many in or out, without joining the arrays first."""

from collections.abc import Iterator, Sequence

import numpy as np

from .scale import scaled_copy


class Stream:
    """A position in C-contiguous arrays of one dtype, as if they were one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [array.reshape(-1) for array in arrays]
        self._current = 0
        self._start = 0

    def copy_to(self, target: np.ndarray, scale: float = 1.0) -> None:
        """Fill 1-D `target` with the next elements, times `scale`."""
        if scale == 1.0:
            for place, piece in self.pieces(target.size):
                target[place:place + piece.size] = piece
        else:
            for place, piece in self.pieces(target.size):
                scaled_copy(piece, scale, target[place:place + piece.size])

    def copy_from(self, source: np.ndarray) -> None:
        """Overwrite the next elements with 1-D `source`."""
        for place, piece in self.pieces(source.size):
            piece[...] = source[place:place + piece.size]

    def pieces(self, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """The next `count` elements, as (place among them, view) for each array that they lie in."""
        place = 0
        while place < count:
            array = self._arrays[self._current]
            stop = min(self._start + count - place, array.size)
            piece = array[self._start:stop]
            yield place, piece
            place += piece.size
            if stop == array.size:
                self._current, self._start = self._current + 1, 0
            else:
                self._start = stop
