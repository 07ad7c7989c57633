"""The variables that `mpistrat run` adds to the environment of the ranks, so that a rank that fails reports why.

From init() on, a rank reports errors by itself. Earlier errors, such as a missing package, are reported by the module
`sitecustomize` of this directory, which Python imports when it starts on a rank.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...process.launch_env import RUN_REPORTS
from ...process.report import SUMMARY, TRACEBACK

HERE = str(Path(__file__).parent)
_PYTHON = re.compile(r"python[\d.]*")


def is_python(command: Sequence[str]) -> bool:
    """Whether a command is a Python interpreter with its arguments."""
    return _PYTHON.fullmatch(Path(command[0]).name) is not None


def variables(command: Sequence[str], is_here: bool, environ: Mapping[str, str], is_whole: bool) -> dict[str, str]:
    """Return the variables to add to the environment of mpirun.

    Args:
        is_here: Whether all ranks run on this host. The PYTHONPATH of another host is not known here.
        environ: The environment before the additions.
        is_whole: Whether ranks also print whole tracebacks.
    """
    added = {RUN_REPORTS: TRACEBACK if is_whole else SUMMARY}
    path = environ.get("PYTHONPATH")
    if is_python(command) and (is_here or path is not None):
        added["PYTHONPATH"] = HERE if path is None else HERE + os.pathsep + path
    return added
