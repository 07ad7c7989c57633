"""`mpistrat bench`: measure the collectives of mpistrat, and compare them with MPI's collectives and with memcpy.

Every rank of a job runs the command. Rank 0 prints the results and writes the files.
"""

import argparse
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api import array_ops, common, runtime
from ..core.errors import LaunchError, MissingDependencyError
from ..core.install import pip_extra
from ..core.rows import rows_of_ranks
from ..process.cores import physical_cores
from ..process.launcher_watch import launcher_here
from .arguments import Parser, counted, number
from .inventory import busy_cores

if TYPE_CHECKING:
    import rich.progress
    from matplotlib.axes import Axes
    from mpi4py import MPI

# -- the cases --------------------------------------------------------------------------------------------------------

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """Shapes of ResNet-50's trainable variables (He et al., 2015), 1000 classes: 161 tensors, 102 MB in float32."""
    shapes: Shapes = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            kernels = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                kernels.insert(0, (1, 1, channels, 4 * width))
            for kernel in kernels:
                shapes += [kernel, kernel[-1:], kernel[-1:]]  # with the batch normalisation after it
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def bert_base() -> Shapes:
    """Shapes of BERT-base's trainable variables (Devlin et al., 2018) with pooler: 199 tensors, 438 MB in float32."""
    width, inner = 768, 3072
    vector = (width,)
    shapes: Shapes = [(30522, width), (512, width), (2, width), vector, vector]
    for _ in range(12):
        shapes += [(width, width), vector] * 4
        shapes += [vector, vector] * 2
        shapes += [(width, inner), (inner,), (inner, width), vector]
    return [*shapes, (width, width), vector]


# Maps mpistrat's name of a collective to the name of the same collective in MPI.
OPERATIONS = {"allreduce": "MPI_Allreduce", "reducescatter": "MPI_Reduce_scatter", "alltoall": "MPI_Alltoallv"}


@dataclass(frozen=True)
class Case:
    """A collective on float32 arrays."""

    shapes: Shapes  # Shapes of the arrays on each rank. Only an all-reduce may have several arrays.
    operation: str = "allreduce"  # A key of OPERATIONS.

    @property
    def nbytes(self) -> int:
        """The total bytes of the arrays on one rank."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


_SINGLE: dict[str, Shapes] = {
    "1KB": [(256,)], "64KB": [(2**14,)], "1MB": [(2**18,)], "16MB": [(2**22,)], "64MB": [(2**24,)]}

CASES = {
    **{name: Case(shapes) for name, shapes in _SINGLE.items()},
    "400x1KB": Case([(256,)] * 400), "resnet50": Case(resnet50()), "bert": Case(bert_base()),
    **{f"{operation}-{name}": Case(shapes, operation) for operation in ("reducescatter", "alltoall")
       for name, shapes in _SINGLE.items()}}


# -- the measurements -------------------------------------------------------------------------------------------------

_TOTAL_BYTES = 1.5e9  # bytes of all repetitions of a case together
_LEAST, _MOST = 5, 200
LIMIT_S = 3.0  # limit for the repetitions of one measurement, unless _LEAST repetitions take longer
_WARM_UP = 3
_MATRIX = (64, 64)  # shape of the matrices that a rank multiplies; for small ones the BLAS starts no threads


@dataclass(frozen=True)
class Point:
    """The results for one case. In each repetition the slowest rank counts. A time is the median of the repetitions."""

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
        """The bus bandwidth in bytes per second: (n-1)/n of a rank's bytes over the time; for an all-reduce 2 (n-1)/n.

        n is the number of ranks. An all-reduce moves twice as many bytes as other collectives. The definition is that
        of NVIDIA's nccl-tests (doc/PERFORMANCE.md). The value is comparable with the bandwidth of the hardware.
        """
        passes = 2 if self.operation == "allreduce" else 1
        return passes * (self.ranks - 1) / self.ranks * self.nbytes / self.mpistrat_s

    @property
    def times_as_long_as_mpi(self) -> float | None:
        """The time of mpistrat divided by the time of MPI. Below 1, mpistrat is faster. None with one rank."""
        return None if self.mpi_s is None else self.mpistrat_s / self.mpi_s

    def as_json(self) -> dict[str, Any]:
        """Return the results as a dictionary for --json. The units are seconds, bytes, and bytes per second."""
        return {**asdict(self), "bus_bytes_per_s": self.bus_bytes_per_s, "times_as_long_as_mpi":
                self.times_as_long_as_mpi, "times_as_long_as_memcpy": self.mpistrat_s / self.memcpy_s}


def repeats_for(nbytes: int) -> int:
    """Return the number of repetitions for a case of `nbytes` bytes: from 200 for small cases to 5 for large cases."""
    return int(min(max(_TOTAL_BYTES / max(nbytes, 1), _LEAST), _MOST))


def measurements(case: Case, comm: "MPI.Intracomm | None") -> tuple[str, ...]:
    """Return the names of the measurements that `measure` makes for `case`, in order. `comm`: None with one rank."""
    return ("mpistrat", "memcpy") if comm is None else (
        "mpistrat", "computing", "both", OPERATIONS[case.operation], "memcpy")


def measure(name: str, case: Case, comm: "MPI.Intracomm | None", repeats: int | None,
            begin: Callable[[str], None]) -> Point:
    """Measure `case`, which is called `name` in the results. Collective.

    Args:
        comm: A communicator of all ranks, used for MPI's own collective only; None with one rank.
        repeats: Repetitions of each measurement; None: `repeats_for(nbytes)`; fewer if these take over LIMIT_S seconds.
        begin: Called with the text "CASE: MEASUREMENT" before each measurement.
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
    factor, product, products = np.ones(_MATRIX, np.float32), np.empty(_MATRIX, np.float32), 1

    def compute() -> None:
        for _ in range(products):
            np.matmul(factor, factor, out=product)

    def both() -> None:
        begun = begin_collective()
        compute()
        begun.wait()

    actions: dict[str, Callable[[], object]] = {"mpistrat": lambda: begin_collective().wait(), "computing": compute,
                                                "both": both, "memcpy": lambda: np.copyto(result, flat)}
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
    """Return the median of `_seconds(action, repeats)`. If `repeats` is None, choose it as in `measure`. Collective."""
    warm = min(_seconds(action, _WARM_UP))
    if repeats is None:
        repeats = min(repeats_for(nbytes), max(_LEAST, int(LIMIT_S / max(warm, 1e-9))))
    return statistics.median(_seconds(action, repeats))


def _seconds(action: Callable[[], object], count: int) -> list[float]:
    """Call `action` `count` times. Return, for each call, the seconds that the slowest rank takes. Collective."""
    seconds = []
    for _ in range(count):
        array_ops.barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return list(array_ops.allreduce(np.array(seconds), name="bench.seconds", op=common.Max).tolist())


# -- the printed table ------------------------------------------------------------------------------------------------

_WIDTH = 78  # Ranks cannot ask for the width of the terminal: the pty that Open MPI gives them has no size.
# Wide enough for any case and the times of slow machines, because a row is printed before the next is measured.
_TITLES = {"ms": 10, "MPI ms": 10, "memcpy ms": 10, "bus GB/s": 8, "hidden": 6, "against MPI": 12}


class Output:
    """The output of bench. Rank 0 prints lines, and on a terminal also a progress bar. Other ranks print nothing.

    The bar is redrawn only when a measurement begins, because redrawing during a measurement would disturb it.
    """

    def __init__(self, steps: int, is_chief: bool):
        self._is_chief = is_chief
        self._begun = 0
        self.bar: rich.progress.Progress | None = None
        if is_chief and has_terminal(os.environ) and find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            console = Console(file=sys.stdout, force_terminal=True, width=_WIDTH)
            self.bar = Progress(BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
                                TextColumn("{task.description}", markup=False), console=console, auto_refresh=False,
                                transient=True)
            self.bar.add_task("", total=steps)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.out(text, highlight=False)
        elif self._is_chief:
            print(text, flush=True)

    def begin(self, what: str) -> None:
        """Show the name of the measurement that begins now."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self._begun, description=what, refresh=True)
        self._begun += 1

    def __enter__(self) -> "Output":
        if self.bar is not None:
            self.bar.start()
            self.bar.console.show_cursor(True)  # Otherwise a killed job would leave the terminal without a cursor.
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def has_terminal(environ: Mapping[str, str]) -> bool:
    """Return whether stdout is a terminal on which a line can be redrawn. `environ`: The environment of this process.

    Open MPI gives each rank a pty as stdout, and copies the output of the rank to the stdout of mpirun. The stdout of
    mpirun may be a file. Therefore the stdout of the launcher, if there is one, must be a terminal too.
    """
    if environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return False
    launcher = launcher_here(environ)
    if launcher is None:
        return True
    try:
        return os.readlink(f"/proc/{launcher.pid}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False  # The launcher belongs to another user, or has ended.


class Table:
    """A table with aligned columns. Each row can be printed as soon as its case is measured."""

    def __init__(self, cases: Mapping[str, Case]):
        names = ["case", *cases]
        counts = ["tensors", *(str(len(case.shapes)) for case in cases.values())]
        sizes = ["bytes", *(f"{case.nbytes:,}" for case in cases.values())]
        self._widths = [*(max(map(len, column)) for column in (names, counts, sizes)), *_TITLES.values()]

    def header(self) -> str:
        """Return the line above the rows."""
        return self._line(["case", "tensors", "bytes", *_TITLES])

    def row(self, point: Point) -> str:
        """Return the line of one case."""
        ratio = point.times_as_long_as_mpi
        against = "-" if ratio is None else f"{1 / ratio:.1f}x faster" if ratio <= 1 else f"{ratio:.1f}x slower"
        return self._line([
            point.case, str(point.tensors), f"{point.nbytes:,}", f"{1e3 * point.mpistrat_s:.3f}",
            "-" if point.mpi_s is None else f"{1e3 * point.mpi_s:.3f}", f"{1e3 * point.memcpy_s:.3f}",
            f"{point.bus_bytes_per_s / 1e9:.2f}", "-" if point.hidden is None else f"{point.hidden:.0%}", against])

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(width) if i else cell.ljust(width)
                         for i, (cell, width) in enumerate(zip(cells, self._widths, strict=True)))


# -- the plot ---------------------------------------------------------------------------------------------------------

_COLOUR = "tab:blue"  # of mpistrat
_COMPARED: dict[str, Any] = {"color": "dimgray", "linewidth": 1.2, "markersize": 4}


def plot(points: Sequence[Point], path: str, title: str) -> None:
    """Plot the results of all-reduces, and write the plot to the file `path`.

    The upper plot shows bytes per second, with MPI_Allreduce and memcpy for comparison. With several ranks, a lower
    plot shows the time of mpistrat divided by the time of MPI_Allreduce. A curve joins the cases with one tensor. Each
    case with several tensors is a separate mark, because these cases differ in more than their bytes.

    `points`: At least one. The extension of `path` selects the format (.png, .svg, .pdf).
    """
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator
    points = sorted(points, key=lambda point: point.nbytes)
    has_ratios = all(point.mpi_s is not None for point in points)
    figure, rows = pyplot.subplots(2 if has_ratios else 1, 1, sharex=True, squeeze=False, layout="constrained",
                                   figsize=(8, 6 if has_ratios else 4.2),
                                   height_ratios=(2.4, 1) if has_ratios else (1,))
    axes = rows[:, 0]
    axes[0].set_title(title)
    _draw_rates(axes[0], points)
    if has_ratios:
        _draw_ratios(axes[1], points)
    lower = axes[-1]  # Both plots share its axis of bytes: powers of 4, with units.
    lower.set_xscale("log", base=2)
    lower.set_xlim(points[0].nbytes / 2, points[-1].nbytes * 2.5)
    lower.xaxis.set_major_locator(LogLocator(base=4, numticks=16))
    lower.xaxis.set_major_formatter(lambda size, position: binary_text(size))
    lower.tick_params(axis="x", labelsize="small")
    lower.set_xlabel("bytes on each rank")
    for point in points:
        if point.tensors > 1:
            axes[0].annotate(f"{point.case}\n({point.tensors} tensors)",
                             (point.nbytes, point.nbytes / point.mpistrat_s), xytext=(0, -8),
                             textcoords="offset points", ha="center", va="top", fontsize="x-small", color=_COLOUR)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_rates(axes: "Axes", points: Sequence[Point]) -> None:
    """Draw the bytes per second of mpistrat, of MPI_Allreduce and of memcpy."""
    sizes = [point.nbytes for point in points]
    copied = [point.nbytes / point.memcpy_s for point in points]
    axes.plot(sizes, copied, "^:", label="for comparison: memcpy", **_COMPARED)
    own = [point.nbytes / point.mpistrat_s for point in points]
    by_mpi = [point.nbytes / point.mpi_s for point in points if point.mpi_s is not None]
    if len(by_mpi) == len(points):
        axes.plot(sizes, by_mpi, "s--", label="for comparison: MPI_Allreduce", **_COMPARED)
    _draw_own(axes, points, own)
    axes.set_yscale("log")
    rates = [*copied, *own, *by_mpi]
    axes.set_ylim(10 ** math.floor(math.log10(min(rates))), 10 ** math.ceil(math.log10(max(rates)) + 1e-9))
    axes.yaxis.set_major_formatter(lambda rate, position: decimal_text(rate))
    axes.set_ylabel("bytes of each rank, per second")
    axes.grid(True, alpha=0.4)
    axes.legend(fontsize="small")


def _draw_ratios(axes: "Axes", points: Sequence[Point]) -> None:
    """Draw the time of mpistrat divided by the time of MPI_Allreduce."""
    ratios = [point.times_as_long_as_mpi or math.nan for point in points]
    axes.axhline(1.0, linestyle="--", color=_COMPARED["color"], linewidth=_COMPARED["linewidth"])
    _draw_own(axes, points, ratios)
    axes.set_yscale("log", base=2)
    low, high = math.floor(math.log2(min(0.5, *ratios))), math.ceil(math.log2(max(2.0, *ratios)))
    axes.set_ylim(2 ** (low - 0.2), 2 ** (high + 0.2))
    axes.yaxis.set_major_formatter(lambda ratio, position: ratio_text(ratio))
    axes.set_ylabel("times as long as\nMPI_Allreduce")
    axes.grid(True, alpha=0.4)


def _draw_own(axes: "Axes", points: Sequence[Point], values: Sequence[float]) -> None:
    """Draw mpistrat's values: a curve through the cases with one tensor, and a mark for each case with several."""
    single = [(point.nbytes, value) for point, value in zip(points, values, strict=True) if point.tensors == 1]
    groups = [(point, value) for point, value in zip(points, values, strict=True) if point.tensors > 1]
    if single:
        axes.plot(*zip(*single, strict=True), "o-", color=_COLOUR, label="mpistrat, one tensor")
    if groups:
        axes.plot([point.nbytes for point, _ in groups], [value for _, value in groups], "D", color=_COLOUR,
                  markerfacecolor="white", label="mpistrat, a group of tensors")


def binary_text(nbytes: float) -> str:
    """Return a number of bytes with its unit, in powers of 1024, as in the names of the cases: "64 KB"."""
    return _with_unit(nbytes, 1024, ("B", "KB", "MB", "GB", "TB"))


def decimal_text(rate: float) -> str:
    """Return a number of bytes per second with its unit, in powers of 1000, as in the table: "10 MB/s"."""
    return _with_unit(rate, 1000, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))


def ratio_text(ratio: float) -> str:
    """Return a ratio as text; a ratio below 1 is written as a fraction: "1/128"."""
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"


def _with_unit(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {units[power]}"


# -- the command ------------------------------------------------------------------------------------------------------

_EPILOG = """\
Run it on ranks: mpistrat run -np 2 -- mpistrat bench

For each case bench prints, for float32 arrays,
- the median time of the collective, of MPI's own collective (MPI_Allreduce, MPI_Reduce_scatter, MPI_Alltoallv) and of a
  memcpy of the same bytes, in the same run. Times are those of the slowest rank;
- the bandwidth of each rank's link in 10^9 bytes per second (2 (n-1)/n of the bytes over the time in an all-reduce,
  (n-1)/n in the others);
- the share of the collective's time that is hidden behind matrix products, which each rank computes meanwhile on one
  core for the same time;
- how many times faster or slower than MPI's own collective the collective of mpistrat is.
A case whose name has no collective is a grouped all-reduce.
"""
_PICTURES = (".png", ".svg", ".pdf")


def main(argv: list[str]) -> int:
    """Measure the cases that the options select, and return 0. Collective; rank 0 prints and writes the files."""
    options = _parser().parse_args(argv)
    if options.plot:
        if find_spec("matplotlib") is None:
            raise MissingDependencyError(f"--plot needs matplotlib ({pip_extra('bench')}).")
        if Path(options.plot).suffix not in _PICTURES:
            raise LaunchError(f"--plot {options.plot}: the name must end with {', '.join(_PICTURES)}.")
        if all(CASES[name].operation != "allreduce" for name in options.cases):
            raise LaunchError("--plot draws all-reduces, but no chosen case is an all-reduce. Add one, such as 1MB.")
    common.init()
    _require_writable(*filter(None, (options.json, options.plot)))
    for sentence in _disturbances():
        print(f"mpistrat bench: {sentence}. So the times below are not reliable. To see these processes, type: "
              "ps aux --sort=-%cpu | head", flush=True)
    if (tracer := runtime.current().tracer) is not None:
        tracer.is_line_due = False  # The tracer would print one line on all cases together.
    _measure(options)
    common.shutdown()
    return 0


def _disturbances() -> list[str]:
    """Return, on rank 0, a sentence for each host whose cores other processes use; [] on other ranks. Collective."""
    # The load is that of the host, and this rank is bound to a share of the host's cores.
    cores = len(physical_cores(range(os.cpu_count() or 1)))
    busy = "" if common.local_rank() else busy_cores(os.getloadavg()[1], cores)
    sentences = array_ops.allgather_object(f"on {socket.gethostname()} {busy}" if busy else "")
    return list(filter(None, sentences)) if common.rank() == 0 else []


def _require_writable(*paths: str) -> None:
    """Raise LaunchError on all ranks if rank 0 cannot write one of the files. Collective."""
    problem = ""
    for path in paths if common.rank() == 0 else ():
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}."
    problem = array_ops.broadcast_object(problem, 0)
    if problem:
        common.shutdown()
        raise LaunchError(problem)


def _measure(options: argparse.Namespace) -> None:
    comm = None
    if common.size() > 1:
        from mpi4py import MPI
        comm = MPI.COMM_WORLD.Dup()
    cases = {name: CASES[name] for name in options.cases}
    where = f"{counted(common.size(), 'rank')} on {counted(len(common.hosts()), 'host')}"
    points = []
    steps = sum(len(measurements(case, comm)) for case in cases.values())
    with Output(steps, is_chief=common.rank() == 0) as out:
        table = Table(cases)
        out.line(f"{where}, {runtime.current().data_name}. {steps} measurements"
                 + ("" if options.repeats else f", most of them within {LIMIT_S:g} s, so at most about "
                    f"{counted(math.ceil(steps * LIMIT_S / 60), 'minute')}") + f"\n{table.header()}")
        for name, case in cases.items():
            points.append(measure(name, case, comm, options.repeats, out.begin))
            out.line(table.row(points[-1]))
    if comm is not None:
        comm.Free()
    if common.rank() != 0:
        return
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([point.as_json() for point in points], file, indent=1)
    if options.plot:
        allreduces = [point for point in points if point.operation == "allreduce"]
        plot(allreduces, options.plot, f"All-reduce of float32, {where}")


def _parser() -> Parser:
    parser = Parser("bench", "Measure collectives on the ranks of this job.", _EPILOG)
    parser.add_argument("cases", nargs="*", type=_case, default=list(CASES), metavar="CASE",
                        help=f"one or more of {', '.join(CASES)}; default: all")
    parser.add_argument("--repeats", metavar="N", help="repetitions of each case; by default more for small cases",
                        type=number(int, lambda n: n >= 1, "a whole number of at least 1 is needed. Received: {}"))
    parser.add_argument("-np", help=argparse.SUPPRESS, type=number(int, lambda n: False, "bench runs on the ranks of a "
                        "job. Type: mpistrat run -np {} mpistrat bench"))
    parser.add_argument("--json", metavar="FILE", help="write the results to a file, as JSON")
    parser.add_argument("--plot", metavar="FILE",
                        help=f"plot the bandwidth of the all-reduces against their bytes ({', '.join(_PICTURES)})")
    return parser


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a case. The cases are: {', '.join(CASES)}")
    return text
