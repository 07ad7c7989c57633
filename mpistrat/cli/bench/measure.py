"""The measurements of `mpistrat bench`: an all-reduce, MPI's own of the same bytes, and a copy of them, in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpistrat

from .cases import Shapes, bytes_of

_TOTAL_BYTES = 1.5e9  # of all repetitions of a case
_LEAST, _MOST = 5, 200
_WARM_UP = 3


@dataclass(frozen=True)
class Point:
    """A case measured: medians over the repetitions of the slowest rank's seconds.

    Attributes:
        nbytes: On each rank.
        mpi_s: For MPI_Allreduce of one array of as many bytes; None with one rank.
        copy_s: For one memcpy of them, on all ranks at once.
    """

    case: str
    tensors: int
    nbytes: int
    ranks: int
    seconds: float
    mpi_s: float | None
    copy_s: float

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank must send and receive at least: 2 (n-1)/n of its bytes, over the time.

        The definition of NVIDIA's nccl-tests, doc/PERFORMANCE.md, which makes figures for any number of ranks
        comparable with the hardware's bandwidth.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / self.seconds


def repeats_for(nbytes: int) -> int:
    """How often a case is repeated: about as long for each, but large ones a few times and small ones not for ever."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measure(case: str, shapes: Shapes, comm: Any, repeats: int | None = None) -> Point:
    """Measure one case. Collective.

    Args:
        case: Its name.
        shapes: Of the float32 arrays that are reduced together.
        comm: An mpi4py communicator of all ranks that nobody else uses; None with one rank.
        repeats: The default depends on the bytes.
    """
    nbytes, size = bytes_of(shapes), mpistrat.size()
    count = repeats or repeats_for(nbytes)
    arrays = [np.full(shape, mpistrat.rank(), np.float32) for shape in shapes]
    flat, result = np.zeros(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    ours = _median(lambda: mpistrat.grouped_allreduce(arrays, name=f"bench.{case}", op=mpistrat.Sum), count)
    mpi = None if comm is None else _median(lambda: comm.Allreduce(flat, result), count)
    copy = _median(lambda: np.copyto(result, flat), count)
    return Point(case, len(shapes), nbytes, size, ours, mpi, copy)


def _median(action: Callable[[], Any], count: int) -> float:
    seconds = []
    for _ in range(_WARM_UP + count):
        mpistrat.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    slowest = mpistrat.allreduce(np.array(seconds[_WARM_UP:]), name="bench.seconds",
                                 op=mpistrat.Max)
    return statistics.median(slowest.tolist())


def table(points: Sequence[Point]) -> str:
    """The points as aligned text."""
    rows = [("case", "tensors", "bytes", "ms", "bus GB/s", "x MPI_Allreduce", "x memcpy")]
    for p in points:
        mpi = "-" if p.mpi_s is None else f"{p.seconds / p.mpi_s:.2f}"
        rows.append((p.case, str(p.tensors), f"{p.nbytes:,}", f"{1e3 * p.seconds:.3f}", f"{p.bus_bandwidth / 1e9:.2f}",
                     mpi, f"{p.seconds / p.copy_s:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                          zip(row[1:], widths[1:], strict=True))]) for row in rows)
