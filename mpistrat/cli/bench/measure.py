"""The measurements of `mpistrat bench`: mpistrat's all-reduce, MPI_Allreduce and memcpy of the same bytes."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpistrat

from .cases import Shapes, bytes_of

_TOTAL_BYTES = 1.5e9  # of all repetitions of a case together
_LEAST, _MOST = 5, 200
_WARM_UP = 3


@dataclass(frozen=True)
class Point:
    """The measurement of one case. Times are medians over the repetitions, each the time of the slowest rank.

    Attributes:
        case: Its name.
        tensors: Number of arrays in the group.
        nbytes: Bytes on each rank.
        ranks: Number of ranks.
        seconds: Of mpistrat's grouped all-reduce.
        mpi_s: Of one MPI_Allreduce of the same number of bytes; None with one rank.
        copy_s: Of one memcpy of the same number of bytes, on all ranks at the same time.
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
        """Bytes per second that each rank must send and receive: 2 (n-1)/n of its bytes over the time.

        This is the definition of NVIDIA's nccl-tests (doc/PERFORMANCE.md). It makes results for any number of ranks
        comparable with the bandwidth of the hardware.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / self.seconds


def repeats_for(nbytes: int) -> int:
    """Return the number of repetitions: fewer for larger arrays, within fixed limits."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measure(case: str, shapes: Shapes, comm: Any, repeats: int | None = None) -> Point:
    """Measure one case. Collective.

    Args:
        case: Its name.
        shapes: Shapes of the float32 arrays of the group.
        comm: An mpi4py communicator of all ranks, for MPI_Allreduce only; None with one rank.
        repeats: Number of repetitions; the default depends on the bytes.
    """
    nbytes, size = bytes_of(shapes), mpistrat.size()
    count = repeats or repeats_for(nbytes)
    arrays = [np.full(shape, mpistrat.rank(), np.float32) for shape in shapes]
    flat, result = np.zeros(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    own_s = _median(lambda: mpistrat.grouped_allreduce(arrays, name=f"bench.{case}", op=mpistrat.Sum), count)
    mpi_s = None if comm is None else _median(lambda: comm.Allreduce(flat, result), count)
    copy_s = _median(lambda: np.copyto(result, flat), count)
    return Point(case, len(shapes), nbytes, size, own_s, mpi_s, copy_s)


def _median(action: Callable[[], object], count: int) -> float:
    """Return the median seconds of `count` calls, each the time of the slowest rank. Collective."""
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
    """Format the points as a table with aligned columns."""
    rows = [("case", "tensors", "bytes", "ms", "bus GB/s", "x MPI_Allreduce", "x memcpy")]
    for p in points:
        mpi = "-" if p.mpi_s is None else f"{p.seconds / p.mpi_s:.2f}"
        rows.append((p.case, str(p.tensors), f"{p.nbytes:,}", f"{1e3 * p.seconds:.3f}", f"{p.bus_bandwidth / 1e9:.2f}",
                     mpi, f"{p.seconds / p.copy_s:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                          zip(row[1:], widths[1:], strict=True))]) for row in rows)
