"""The measurements of `mpistrat bench`: mpistrat's all-reduce, MPI_Allreduce and memcpy of the same bytes."""

import statistics
import time
from collections.abc import Callable
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
        allreduce_s: Of mpistrat's grouped all-reduce.
        mpi_allreduce_s: Of one MPI_Allreduce of the same number of bytes; None with one rank.
        memcpy_s: Of one memcpy of the same number of bytes, on all ranks at the same time.
    """

    case: str
    tensors: int
    nbytes: int
    ranks: int
    allreduce_s: float
    mpi_allreduce_s: float | None
    memcpy_s: float

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes per second that each rank must send and receive: 2 (n-1)/n of its bytes over the time.

        This is the definition of NVIDIA's nccl-tests (doc/PERFORMANCE.md). It makes results for any number of ranks
        comparable with the bandwidth of the hardware.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / self.allreduce_s

    @property
    def times_as_long_as_mpi_allreduce(self) -> float | None:
        """The time over that of one MPI_Allreduce: below 1 mpistrat is faster. None with one rank."""
        return None if self.mpi_allreduce_s is None else self.allreduce_s / self.mpi_allreduce_s

    @property
    def times_as_long_as_memcpy(self) -> float:
        """The time over that of one memcpy."""
        return self.allreduce_s / self.memcpy_s


def repeats_for(nbytes: int) -> int:
    """Return the number of repetitions: fewer for larger arrays, within fixed limits."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measurements(comm: Any) -> tuple[str, ...]:
    """Return what `measure` measures of each case, in this order."""
    return ("mpistrat", "memcpy") if comm is None else ("mpistrat", "MPI_Allreduce", "memcpy")


def measure(case: str, shapes: Shapes, comm: Any, repeats: int | None = None,
            begin: Callable[[str], None] = lambda what: None) -> Point:
    """Measure one case. Collective.

    Args:
        case: Its name.
        shapes: Shapes of the float32 arrays of the group.
        comm: An mpi4py communicator of all ranks, for MPI_Allreduce only; None with one rank.
        repeats: Number of repetitions; the default depends on the bytes.
        begin: Called before each of `measurements`, with its name and that of the case. Nothing is measured meanwhile.
    """
    nbytes, size = bytes_of(shapes), mpistrat.size()
    arrays = [np.full(shape, mpistrat.rank(), np.float32) for shape in shapes]
    # Not zeros: the kernel maps all pages of those to one page, which stays in the cache.
    flat, result = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    actions: dict[str, Callable[[], object]] = {
        "mpistrat": lambda: mpistrat.grouped_allreduce(arrays, name=f"bench.{case}", op=mpistrat.Sum),
        "MPI_Allreduce": lambda: comm.Allreduce(flat, result),
        "memcpy": lambda: np.copyto(result, flat)}
    seconds = {}
    for what in measurements(comm):
        begin(f"{case}: {what}")
        seconds[what] = _median(actions[what], repeats or repeats_for(nbytes))
    return Point(case, len(shapes), nbytes, size, seconds["mpistrat"], seconds.get("MPI_Allreduce"), seconds["memcpy"])


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
