"""The measurements of `mpistrat bench`: a collective of mpistrat, MPI's own, and memcpy of the same bytes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...api import array_ops, common
from ...core.rows import rows_of_ranks
from .cases import OPERATIONS, Case

if TYPE_CHECKING:
    from mpi4py import MPI

_TOTAL_BYTES = 1.5e9  # of all repetitions of a case together
_LEAST, _MOST = 5, 200
LIMIT_S = 3.0  # of the repetitions, unless the least number of them takes longer
_WARM_UP = 3
_WIDTH = 64  # of the matrices that a rank multiplies: small ones, of which the BLAS makes no threads


@dataclass(frozen=True)
class Point:
    """The measurement of one case. Times are medians over the repetitions, each the time of the slowest rank."""

    case: str
    operation: str  # The collective, a key of cases.OPERATIONS.
    tensors: int  # Number of arrays: of the group in an all-reduce, else 1.
    nbytes: int  # Bytes on each rank, before the collective.
    ranks: int
    mpistrat_s: float  # Of mpistrat's collective, grouped in an all-reduce.
    mpi_s: float | None  # Of MPI's own collective on the same number of bytes; None with one rank.
    memcpy_s: float  # Of one memcpy of the same number of bytes, on all ranks at the same time.
    # The share of the collective's time that is gained where a rank computes matrix products for as long meanwhile, on
    # one core; None with one rank.
    hidden: float | None

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes per second that each rank must send and receive: (n-1)/n of its bytes over the time, or twice that.

        An all-reduce takes twice as many bytes as the others. This is the definition of NVIDIA's nccl-tests
        (doc/PERFORMANCE.md). It makes results for any number of ranks comparable with the bandwidth of the hardware.
        """
        passes = 2 if self.operation == "allreduce" else 1
        return passes * (self.ranks - 1) / self.ranks * self.nbytes / self.mpistrat_s

    @property
    def times_as_long_as_mpi(self) -> float | None:
        """The time over that of MPI's own collective: below 1 mpistrat is faster. None with one rank."""
        return None if self.mpi_s is None else self.mpistrat_s / self.mpi_s

    @property
    def times_as_long_as_memcpy(self) -> float:
        """The time over that of one memcpy."""
        return self.mpistrat_s / self.memcpy_s

    def as_json(self) -> dict[str, Any]:
        """All figures, in seconds, bytes and bytes per second, for a file of --json."""
        return {**asdict(self), "bus_bytes_per_s": self.bus_bytes_per_s,
                "times_as_long_as_mpi": self.times_as_long_as_mpi,
                "times_as_long_as_memcpy": self.times_as_long_as_memcpy}


def repeats_for(nbytes: int) -> int:
    """Return the number of repetitions: fewer for larger arrays, within fixed limits."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measurements(case: Case, comm: "MPI.Intracomm | None") -> tuple[str, ...]:
    """Return what `measure` measures of a case, in this order."""
    return ("mpistrat", "memcpy") if comm is None else (
        "mpistrat", "computing", "both", OPERATIONS[case.operation], "memcpy")


def measure(name: str, case: Case, comm: "MPI.Intracomm | None", repeats: int | None = None,
            begin: Callable[[str], None] = lambda what: None) -> Point:
    """Measure one case. Collective.

    Args:
        comm: All ranks, for MPI's own collective only; None with one rank.
        repeats: Number of repetitions; the default depends on the bytes.
        begin: Called before each of `measurements`, with its name and that of the case. Nothing is measured meanwhile.
    """
    nbytes, size, rank = case.nbytes, common.size(), common.rank()
    arrays = [np.full(shape, rank, np.float32) for shape in case.shapes]
    # Not zeros: the kernel maps all pages of those to one page, which stays in the cache.
    flat, result = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    counts = rows_of_ranks(flat.size, size)
    splits, received = np.array(counts, np.int32), np.empty(counts[rank] * size, np.float32)
    wire = f"bench.{name}"
    begin_collective: Callable[[], Any] = {
        "allreduce": lambda: array_ops.grouped_allreduce_async(arrays, name=wire, op=common.Sum),
        "reducescatter": lambda: array_ops.reducescatter_async(arrays[0], name=wire, op=common.Sum),
        "alltoall": lambda: array_ops.alltoall_async(arrays[0], splits, name=wire)}[case.operation]
    factor, product, products = np.ones((_WIDTH, _WIDTH), np.float32), np.empty((_WIDTH, _WIDTH), np.float32), 1

    def compute() -> None:
        for _ in range(products):
            np.matmul(factor, factor, out=product)

    def both() -> None:
        begun = begin_collective()
        compute()
        begun.wait()

    actions: dict[str, Callable[[], object]] = {
        "mpistrat": lambda: begin_collective().wait(), "computing": compute, "both": both,
        "memcpy": lambda: np.copyto(result, flat)}
    if comm is not None:
        actions |= {
            "MPI_Allreduce": lambda: comm.Allreduce(flat, result),
            "MPI_Reduce_scatter": lambda: comm.Reduce_scatter(flat, result[:counts[rank]], counts),
            "MPI_Alltoallv": lambda: comm.Alltoallv((flat, counts), (received, [counts[rank]] * size))}
    seconds: dict[str, float] = {}
    for what in measurements(case, comm):
        begin(f"{name}: {what}")
        if what == "computing":
            products = max(1, round(seconds["mpistrat"] / min(_seconds(compute, _WARM_UP))))
        seconds[what] = _median(actions[what], repeats, nbytes)
    hidden = None
    if comm is not None:  # A time beyond these limits is noise.
        gained = seconds["mpistrat"] + seconds["computing"] - seconds["both"]
        hidden = min(max(gained / seconds["mpistrat"], 0.0), 1.0)
    return Point(name, case.operation, len(case.shapes), nbytes, size, seconds["mpistrat"],
                 seconds.get(OPERATIONS[case.operation]), seconds["memcpy"], hidden)


def _median(action: Callable[[], object], repeats: int | None, nbytes: int) -> float:
    """Return the median seconds of the calls, each the time of the slowest rank. Collective.

    `repeats`: How often; None: by the bytes, and no longer than LIMIT_S.
    """
    warm = min(_seconds(action, _WARM_UP))
    if repeats is None:
        repeats = min(repeats_for(nbytes), max(_LEAST, int(LIMIT_S / max(warm, 1e-9))))
    return statistics.median(_seconds(action, repeats))


def _seconds(action: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of `count` calls on the slowest rank. Collective."""
    seconds = []
    for _ in range(count):
        array_ops.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return list(array_ops.allreduce(np.array(seconds), name="bench.seconds", op=common.Max).tolist())
