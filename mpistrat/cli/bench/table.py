"""What `mpistrat bench` prints while it measures: lines, and on a terminal a progress bar below them.

The bar is rich's, because Keras depends on rich, so most users have it. Without rich, and where stdout is no terminal,
the lines are plain text. Called by bench_command.py.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...process.launcher_watch import launcher_here
from .cases import Case
from .measure import Point

if TYPE_CHECKING:
    import rich.progress

_WIDTH = 78  # Ranks cannot ask for the width of the terminal: the pty that Open MPI gives them has no size.
# Wide enough for any case and the times of slow machines, because a row is printed before the next is measured.
_TITLES = {"ms": 10, "MPI ms": 10, "memcpy ms": 10, "bus GB/s": 8, "hidden": 6, "against MPI": 12}


class Output:
    """The output of one rank: lines on rank 0, with a progress bar on a terminal; nothing on other ranks.

    The bar is drawn only when a measurement begins. A thread that refreshes the bar would disturb the measurement.
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
    """Whether stdout is a terminal on which a line can be redrawn. `environ`: the environment of this process.

    Open MPI gives each rank a pty as stdout, and copies the rank's output to mpirun's stdout, which may be a file. So
    under a launcher the launcher's stdout must be a terminal, too.
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
