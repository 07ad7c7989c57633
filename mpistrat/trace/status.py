"""The status file: the current state of each rank, written by rank 0 once a second, for `mpistrat top`.

The file is `<host>-<pid>.json` in `${XDG_RUNTIME_DIR:-/tmp}/mpistrat-<uid>/`, which only the user may read. The file
exists from the first second of a job to its end.
"""

import contextlib
import glob
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.handle import Entry
from ..core.ownership import own_directory
from ..core.slowest import Waits
from .record_ring import Operation
from .spans import Span, hidden, length, union
from .totals import StepCounter, is_of_gradients

VERSION = 1
_MOST_OUTSTANDING = 8  # operations that are listed for a rank
_MOST_CHARACTERS = 120  # of a name


def status_directory(environ: Mapping[str, str]) -> Path:
    """The directory with the status files of this user's jobs on this host. It need not exist."""
    return Path(environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"mpistrat-{os.getuid()}"


def waits(operations: Sequence[Operation], in_flight: Iterable[Entry], interval: Span) -> Waits:
    """How long a rank waited for collectives, moved bytes and hid collectives in an interval.

    A rank waits while the ranks have not agreed on an operation that it has submitted, and moves bytes from then until
    the result is delivered. Otherwise it computes. Waits while other threads compute count as hidden, see spans.py.

    `operations`: In the order of execution.
    """
    moving = length(union([(each.agreed, each.delivered) for each in operations], interval))
    joined = [(each.agreed, each.delivered) for each in operations if not each.submitted]
    submitted = [*((each.request, (each.submitted, each.delivered)) for each in operations if each.submitted),
                 *((entry.request, (entry.submitted, interval[1])) for entry in in_flight if entry.submitted)]
    outstanding = length(union([*joined, *(span for _, span in submitted)], interval))
    counter, spans = StepCounter(), defaultdict[int, list[Span]](list)
    for request, span in submitted:
        step = counter.add(request)
        if is_of_gradients(request):
            spans[step].append(span)
    return Waits(*(ns / 1e9 for ns in (max(interval[1] - interval[0], 1), outstanding - moving, moving,
                                       length(union(hidden(spans.values()), interval)))))


def outstanding(in_flight: Iterable[Entry], now: int) -> list[dict[str, Any]]:
    """The operations that have been outstanding for the longest time, with their names and seconds."""
    oldest = sorted((entry for entry in in_flight if entry.submitted), key=lambda entry: entry.submitted)
    return [{"name": entry.request.name[:_MOST_CHARACTERS], "since_s": round((now - entry.submitted) / 1e9, 3)}
            for entry in oldest[:_MOST_OUTSTANDING]]


def rss_bytes() -> int:
    """The resident memory of this process in bytes; 0 if /proc is not available."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class StatusFile:
    """Writes the status file of a job. On rank 0.

    Args:
        size: The number of ranks.
        environ: The environment, which may name the runtime directory, and the job's id given by a launcher.

    Raises:
        OSError: The directory, which only this user may read, does not exist and cannot be made.
    """

    def __init__(self, size: int, environ: Mapping[str, str]):
        directory = status_directory(environ)
        own_directory(directory, 0o700, 0o077)
        for path in directory.glob(f"{glob.escape(platform.node())}-*.json"):
            process = f"/proc/{path.stem.rpartition('-')[2]}"
            if os.path.exists("/proc/self") and not os.path.exists(process):  # Its job was killed.
                path.unlink(missing_ok=True)
        name = f"{platform.node()}-{os.getpid()}"
        self.path = directory / f"{name}.json"
        self._pid = os.getpid()
        self._head = {"version": VERSION, "job": environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID") or name,
                      "started": time.time(), "size": size, "script": sys.argv[0] if sys.argv else ""}

    def write(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Replace the file atomically: a reader sees the old file or the new file.

        Args:
            ranks: The latest report of each rank that has sent a report.

        Raises:
            OSError: The file cannot be written.
        """
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self._head, "written": time.time(), "ranks": ranks}))
        new.replace(self.path)

    def remove(self) -> None:
        """Remove the file if possible. May be called twice. Does nothing in a forked process."""
        if os.getpid() == self._pid:
            for path in (self.path, self.path.with_suffix(".new")):
                with contextlib.suppress(OSError):
                    path.unlink()
