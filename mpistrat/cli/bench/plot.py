"""The plot of `mpistrat bench --plot`: bytes per second against bytes, compared with MPI_Allreduce and memcpy.

Called by bench_command.py, on rank 0.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...core.errors import MissingDependencyError
from ...core.install import pip_extra
from .measure import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR = "tab:blue"  # of mpistrat
_COMPARED: dict[str, Any] = {"color": "dimgray", "linewidth": 1.2, "markersize": 4}


def require_matplotlib() -> None:
    """Raise MissingDependencyError if matplotlib is not installed. Called before the measurement starts."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"--plot needs matplotlib ({pip_extra('bench')}).")


def plot(points: Sequence[Point], path: str, title: str) -> None:
    """Plot the measurements of all-reduces to a file.

    The upper plot shows bytes per second, compared with MPI_Allreduce and memcpy. The lower plot, with more than one
    rank, shows the time as a multiple of the time of MPI_Allreduce. A curve joins the cases of one tensor. Each case
    of a group of tensors is a separate mark, because groups differ in more than their size.

    Args:
        points: The measurements, at least one, in any order.
        path: The file. The extension selects the format (.png, .svg, .pdf).
    """
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
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
    _draw_sizes(axes[-1], [point.nbytes for point in points])
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
    """Draw mpistrat's values: a curve of the single tensors, and a mark for each group of tensors."""
    single = [(point.nbytes, value) for point, value in zip(points, values, strict=True) if point.tensors == 1]
    groups = [(point, value) for point, value in zip(points, values, strict=True) if point.tensors > 1]
    if single:
        axes.plot(*zip(*single, strict=True), "o-", color=_COLOUR, label="mpistrat, one tensor")
    if groups:
        axes.plot([point.nbytes for point, _ in groups], [value for _, value in groups], "D", color=_COLOUR,
                  markerfacecolor="white", label="mpistrat, a group of tensors")


def _draw_sizes(axes: "Axes", sizes: Sequence[int]) -> None:
    """Draw the axis of bytes, which both plots share: powers of 4, with units."""
    from matplotlib.ticker import LogLocator
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 2, max(sizes) * 2.5)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=16))
    axes.xaxis.set_major_formatter(lambda size, position: binary_text(size))
    axes.tick_params(axis="x", labelsize="small")
    axes.set_xlabel("bytes on each rank")


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
