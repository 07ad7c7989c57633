"""Parse the lines that mpirun prints about the end of a process. Pure.

The patterns are in the table of launchers (process/launchers.py). MPICH's "BAD TERMINATION" block goes to stdout,
which is not read.
"""

import re
from dataclasses import dataclass

from ...process.launchers import STARTED

RULE = re.compile(rb"-{60,}\s*$")  # the line before and after a text of Open MPI

LINE_STARTS = tuple(start for launcher in STARTED for start in launcher.line_starts)


@dataclass(frozen=True)
class Ending:
    """How a rank has ended."""

    rank: int
    host: str = ""  # The host of the rank, or "" if mpirun does not name the host.
    code: int | None = None  # The exit code of the rank; None after a signal, or if mpirun does not say.
    signal: int | None = None  # The number of the signal that ended the rank, or None.


@dataclass(frozen=True)
class Words:
    """A text of mpirun, or of MPI on a rank, about the end of a process."""

    text: bytes  # The unchanged text.
    # How a rank has ended; None if the text only says that other processes were ended, or names an error.
    ending: Ending | None = None
    is_error: bool = False  # Whether the text names the error.


def understand(text: bytes) -> Words | None:
    """Parse a text of mpirun. Returns None if the text is not about the end of a process.

    `text`: A line, or the lines from a rule to the next rule, including both rules.
    """
    flat = b" ".join(text.split())
    for launcher in STARTED:
        for pattern in launcher.endings:
            if match := re.search(pattern, flat):
                return Words(text, _ending(match.groupdict()))
        if any(re.search(pattern, flat) for pattern in launcher.consequences):
            return Words(text)
        if any(re.search(pattern, flat) for pattern in launcher.errors):
            return Words(text, is_error=True)
    return None


def _ending(found: dict[str, bytes]) -> Ending:
    numbers = {name: int(found[name]) for name in ("code", "signal") if name in found}
    return Ending(int(found["rank"]), found.get("host", b"").decode(errors="replace"), **numbers)
