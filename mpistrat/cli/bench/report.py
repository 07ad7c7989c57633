"""The results of `mpistrat bench` as text: a table with a row for each case, and the points of a file of --json.

Called by command.py, on rank 0.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .cases import Case
from .measure import Point

# Wide enough for any case and the times of slow machines, because a row is printed before the next is measured.
_TITLES = {"ms": 10, "bus GB/s": 8, "MPI": 8, "memcpy": 8}
_GROUP = "times as long as"  # above the last two columns


class Table:
    """A table with aligned columns, of which each row can be printed as soon as its case is measured.

    Args:
        cases: The cases that will have a row.
    """

    def __init__(self, cases: Mapping[str, Case]):
        names = ["case", *cases]
        counts = ["tensors", *(str(len(case.shapes)) for case in cases.values())]
        sizes = ["bytes", *(f"{case.nbytes:,}" for case in cases.values())]
        self._widths = [*(max(map(len, column)) for column in (names, counts, sizes)), *_TITLES.values()]

    def header(self) -> str:
        """Return the two lines above the rows."""
        titles = self._line(["case", "tensors", "bytes", *_TITLES])
        return f"{_GROUP:>{len(titles)}}\n{titles}"

    def row(self, point: Point) -> str:
        """Return the line of one case."""
        ratio = point.times_as_long_as_mpi
        return self._line([
            point.case, str(point.tensors), f"{point.nbytes:,}", f"{1e3 * point.mpistrat_s:.3f}",
            f"{point.bus_bytes_per_s / 1e9:.2f}", "-" if ratio is None else f"{ratio:.2f}",
            f"{point.times_as_long_as_memcpy:.2f}"])

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(width) if i else cell.ljust(width)
                         for i, (cell, width) in enumerate(zip(cells, self._widths, strict=True)))


def as_json(point: Point) -> dict[str, Any]:
    """Return a point with its figures, in seconds, bytes and bytes per second, for a file of --json."""
    return {**dataclasses.asdict(point), "bus_bytes_per_s": point.bus_bytes_per_s,
            "times_as_long_as_mpi": point.times_as_long_as_mpi,
            "times_as_long_as_memcpy": point.times_as_long_as_memcpy}
