"""The measurements of `mpistrat bench`: a collective of mpistrat, of MPI, and a memcpy of the same bytes."""

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

_TOTAL_BYTES = 1.5e9  # bytes of all repetitions of a case together
_LEAST, _MOST = 5, 200
LIMIT_S = 3.0  # limit for the repetitions of one measurement, unless _LEAST repetitions take longer
_WARM_UP = 3
_WIDTH = 64  # width of the matrices that a rank multiplies; for small ones the BLAS starts no threads


@dataclass(frozen=True)
class Point:
    """The measurement of one case. A time is the median over the repetitions of the time of the slowest rank."""

    case: str
    operation: str  # The collective, a key of cases.OPERATIONS.
    tensors: int  # Number of arrays: the size of the group in an all-reduce, else 1.
    nbytes: int  # Bytes on each rank, before the collective.
    ranks: int
    mpistrat_s: float  # Seconds of mpistrat's collective; an all-reduce is a grouped all-reduce.
    mpi_s: float | None  # Seconds of MPI's own collective on as many bytes; None with one rank.
    memcpy_s: float  # Seconds of one memcpy of as many bytes, on all ranks at the same time.
    # The share (0 to 1) of the collective's time that overlaps with matrix products. Each rank computes the products on
    # one core, for the same time. None with one rank.
    hidden: float | None

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes per second that each rank must send and receive: (n-1)/n of its bytes over the time, or twice that.

        An all-reduce moves twice as many bytes as the others. NVIDIA's nccl-tests (doc/PERFORMANCE.md) define the bus
        bandwidth in this way. It is comparable with the bandwidth of the hardware for any number of ranks.
        """
        passes = 2 if self.operation == "allreduce" else 1
        return passes * (self.ranks - 1) / self.ranks * self.nbytes / self.mpistrat_s

    @property
    def times_as_long_as_mpi(self) -> float | None:
        """The time of mpistrat divided by the time of MPI: below 1 mpistrat is faster. None with one rank."""
        return None if self.mpi_s is None else self.mpistrat_s / self.mpi_s

    @property
    def times_as_long_as_memcpy(self) -> float:
        """The time of mpistrat divided by the time of one memcpy."""
        return self.mpistrat_s / self.memcpy_s

    def as_json(self) -> dict[str, Any]:
        """Return all figures, in seconds, bytes and bytes per second, for the file of --json."""
        return {**asdict(self), "bus_bytes_per_s": self.bus_bytes_per_s,
                "times_as_long_as_mpi": self.times_as_long_as_mpi,
                "times_as_long_as_memcpy": self.times_as_long_as_memcpy}


def repeats_for(nbytes: int) -> int:
    """Return the number of repetitions for a case of `nbytes`: 5 to 200, and fewer for larger arrays."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measurements(case: Case, comm: "MPI.Intracomm | None") -> tuple[str, ...]:
    """Return the names of the measurements that `measure` makes of a case, in this order."""
    return ("mpistrat", "memcpy") if comm is None else (
        "mpistrat", "computing", "both", OPERATIONS[case.operation], "memcpy")


def measure(name: str, case: Case, comm: "MPI.Intracomm | None", repeats: int | None = None,
            begin: Callable[[str], None] = lambda what: None) -> Point:
    """Measure one case. Collective.

    Args:
        comm: A communicator of all ranks, used for MPI's own collective only; None with one rank.
        repeats: Number of repetitions; None: chosen by the bytes, and by LIMIT_S.
        begin: Called with the text "CASE: MEASUREMENT" before each measurement. Nothing is measured during the call.
    """
    nbytes, size, rank = case.nbytes, common.size(), common.rank()
    arrays = [np.full(shape, rank, np.float32) for shape in case.shapes]
    # Not np.zeros: the kernel would map all its pages to one page, which stays in the cache.
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
    if comm is not None:  # A share below 0 or above 1 is noise.
        gained = seconds["mpistrat"] + seconds["computing"] - seconds["both"]
        hidden = min(max(gained / seconds["mpistrat"], 0.0), 1.0)
    return Point(name, case.operation, len(case.shapes), nbytes, size, seconds["mpistrat"],
                 seconds.get(OPERATIONS[case.operation]), seconds["memcpy"], hidden)


def _median(action: Callable[[], object], repeats: int | None, nbytes: int) -> float:
    """Return the median over repeated calls of the seconds that the slowest rank takes. Collective.

    `repeats`: The number of calls; None: chosen by the bytes, and by LIMIT_S.
    """
    warm = min(_seconds(action, _WARM_UP))
    if repeats is None:
        repeats = min(repeats_for(nbytes), max(_LEAST, int(LIMIT_S / max(warm, 1e-9))))
    return statistics.median(_seconds(action, repeats))


def _seconds(action: Callable[[], object], count: int) -> list[float]:
    """Call `action` `count` times, and return the seconds of each call on the slowest rank. Collective."""
    seconds = []
    for _ in range(count):
        array_ops.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return list(array_ops.allreduce(np.array(seconds), name="bench.seconds", op=common.Max).tolist())
