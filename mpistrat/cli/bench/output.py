"""What `mpistrat bench` prints while it measures: lines, and on a terminal a progress bar below them.

The bar is rich's, because Keras depends on rich, so most users have it. Without rich, and where stdout is no terminal,
the lines are plain text. Called by command.py, on rank 0.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import TracebackType

from ...process.launcher_watch import launcher_here

_WIDTH = 78  # Ranks do not know the width of the terminal: the pty that Open MPI gives them has none.


class Silent:
    """The output of all ranks but the first: nothing."""

    def line(self, text: str) -> None:
        """Print a line."""

    def begin(self, what: str) -> None:
        """Show what is measured from now on."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        """Remove the bar, if there is one."""


class Plain(Silent):
    """Lines of plain text."""

    def line(self, text: str) -> None:
        print(text, flush=True)


class Bar(Silent):
    """Lines above a progress bar.

    The bar is drawn only when a measurement begins. A thread that refreshes it would take time from what is measured.

    Args:
        steps: The number of measurements.
    """

    def __init__(self, steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        console = Console(file=sys.stdout, force_terminal=True, width=_WIDTH)
        self._progress = Progress(BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
                                  TextColumn("{task.description}", markup=False), console=console, auto_refresh=False,
                                  transient=True)
        self._task = self._progress.add_task("", total=steps)
        self._begun = 0

    def line(self, text: str) -> None:
        self._progress.console.out(text, highlight=False)

    def begin(self, what: str) -> None:
        self._progress.update(self._task, completed=self._begun, description=what, refresh=True)
        self._begun += 1

    def __enter__(self) -> "Bar":
        self._progress.start()
        self._progress.console.show_cursor(True)  # A job that is killed would leave the terminal without a cursor.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._progress.stop()


def output(steps: int, is_chief: bool) -> Silent:
    """Return the output of this rank: a bar of `steps` steps where rank 0 has a terminal, else plain text."""
    if not is_chief:
        return Silent()
    return Bar(steps) if has_terminal(os.environ) and find_spec("rich") is not None else Plain()


def has_terminal(environ: Mapping[str, str]) -> bool:
    """Whether stdout is a terminal on which a line can be drawn again. `environ`: this process' environment.

    Open MPI gives each rank a pty as stdout, and copies what it reads there to its own stdout, which may be a file. So
    under a launcher the launcher's stdout must be a terminal too.
    """
    if environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return False
    launcher = launcher_here(environ)
    if launcher is None:
        return True
    try:
        return os.readlink(f"/proc/{launcher.pid}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False  # It belongs to another user, or has ended.
