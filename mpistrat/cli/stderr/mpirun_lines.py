"""What mpirun prints about the end of a process, as text and as data. Pure.

The texts stand in the table of launchers (process/launchers.py). MPICH's frame of "BAD TERMINATION" goes to stdout,
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
    host: str = ""  # Its host, or "" if mpirun does not name it.
    code: int | None = None  # Its exit code; None if a signal has ended it, or if mpirun does not say it.
    signal: int | None = None  # The number of the signal that has ended it, or None.


@dataclass(frozen=True)
class Words:
    """A text of mpirun, or of MPI on a rank, about the end of a process."""

    text: bytes  # As it was printed.
    # What it says; None if it only says that other processes were ended, or what error it was.
    ending: Ending | None = None
    is_error: bool = False  # Whether it says what error it was.


def understand(text: bytes) -> Words | None:
    """Return a text of mpirun as Words, or None if it is not about the end of a process.

    `text`: A line, or the lines from a rule to the next rule, with both.
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
