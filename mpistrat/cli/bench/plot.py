"""The plot of `mpistrat bench --plot`: size against bandwidth, compared with MPI_Allreduce and memcpy."""

from collections.abc import Sequence
from importlib.util import find_spec

from ...core.errors import MissingDependencyError
from ...core.install import pip_extra
from .measure import Point


def require_matplotlib() -> None:
    """Raise MissingDependencyError if matplotlib is not installed. Called before the measurement starts."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"--plot needs matplotlib ({pip_extra('plot')}).")


def plot(points: Sequence[Point], path: str) -> None:
    """Draw the points to a file. Its extension selects the format (.png, .svg, .pdf)."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    points = sorted(points, key=lambda point: point.nbytes)
    sizes = [point.nbytes for point in points]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(sizes, [p.nbytes / p.seconds / 1e9 for p in points], "o-", label="mpistrat")
    if all(p.mpi_s for p in points):
        axes.plot(sizes, [p.nbytes / p.mpi_s / 1e9 for p in points if p.mpi_s], "s--", label="MPI_Allreduce")
    axes.plot(sizes, [p.nbytes / p.copy_s / 1e9 for p in points], "^:", label="one memcpy")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes on each rank")
    axes.set_ylabel("GB reduced per second")
    axes.set_title(f"All-reduce of float32, {points[0].ranks} ranks")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
