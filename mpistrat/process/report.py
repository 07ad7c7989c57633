"""The report of a rank that fails: the rank prints it to stderr (`announce`), `mpistrat run` reads it (ReportReader).

Under `mpistrat run` a rank that fails prints a report instead of the traceback. Each line of the report begins with a
mark and the rank, because lines of several ranks may mix. `mpistrat run` collects the reports, and prints one summary
after the job has ended. Without `mpistrat run` a rank prints one sentence after the traceback. process/abort.py calls
`announce`, in the thread of the exception.

mpirun forwards the stderr of the ranks of all hosts, and so the reports. But a wrapper may have joined the stderr of
Python with its stdout (`python train.py 2>&1 | tee log`). So a rank opens, in /proc, the stderr of the process that
mpirun started. A shell could instead keep a copy of that stderr open. But processes that a wrapper leaves behind would
have the copy too, and mpirun would wait for their end. PMIx_Log, another way, works only after MPI_Init.
"""

import contextlib
import fcntl
import os
import re
import stat
import sys
import termios
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from . import launcher_watch
from .error_text import ErrorText
from .launch_env import RUN_REPORTS

# The values of RUN_REPORTS.
SUMMARY = "summary"
TRACEBACK = "traceback"  # the whole traceback as well

_MOST_CHARACTERS = 100_000  # of a message
_WRITE_BYTES = 4000  # A pipe takes up to 4096 bytes at once, and mpirun reads up to 4096 bytes at once.
_READ_S = 0.1  # How long mpirun may take to read the earlier lines.
# A rank on another host, or of an elastic job, prints this before its command begins.
STARTS = "[mpistrat] rank {rank} starts as process {pid} on {host}"
# The states that a rank reports: it has called init(); it handles SIGURG as SIGTERM (process/abort.py); it has ended
# without init() (cli/startup, which imports nothing, has a copy of this text).
IN_INIT, HANDS_ON, WITHOUT_INIT = "is in init()", "hands SIGTERM on", "has ended without init()"
MEASURES = "measures"  # Followed by the measurements of a rank, as JSON (process/step_timer.py).
# Followed by a line of the last operations of a rank (trace/last.py): LAST_BEGIN by the first line, LAST by the others.
LAST_BEGIN, LAST = "begins", "has"
_FRAMES, _MESSAGE = "|", ">"
_BEGIN_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) on (\S+) fails with exit code (\d+):\s*$")
_STATE_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) (%b)\s*$" % b"|".join(
    re.escape(state).encode() for state in (IN_INIT, HANDS_ON, WITHOUT_INIT)))
_STARTS_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) starts as process (\d+) on (\S+)\s*$")
_MEASURES_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) measures (\{.*\})\s*$")
_LAST_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) (begins|has) (\S+)\s*$")
_LINE_PATTERN = re.compile(rb"\[mpistrat\] rank (\d+) ([|>]) ?(.*?)[\r\n]*$")

_mode: str | None = None
_descriptor: int | None = None  # the stderr that mpirun reads, if it is not the stderr of this process


@dataclass(frozen=True)
class Report:
    rank: int  # in MPI_COMM_WORLD
    host: str
    code: int  # the exit code of the rank
    text: ErrorText

    def lines(self) -> list[str]:
        message = self.text.message
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}\n(and {len(message) - _MOST_CHARACTERS} more characters)"
        parts = [(_FRAMES, self.text.frames)] if self.text.frames else []
        lines = [(kind, line.replace("\r", "\\r")) for kind, text in [*parts, (_MESSAGE, message)]
                 for line in text.split("\n")]
        return [f"[mpistrat] rank {self.rank} on {self.host} fails with exit code {self.code}:\n",
                *(f"[mpistrat] rank {self.rank} {kind} {line}\n" for kind, line in lines)]


class ReportReader:
    """Collects the reports of all ranks from the lines of a stream."""

    def __init__(self) -> None:
        self.started: dict[int, tuple[str, int]] = {}  # The host and the pid of each rank that has reported its start.
        self.in_init: set[int] = set()  # The ranks that have called init().
        self.handing_on: set[int] = set()  # The ranks to which mpirun forwards SIGTERM.
        self.without_init: set[int] = set()  # The ranks that have reported an end without init().
        self._in_state = {IN_INIT: self.in_init, HANDS_ON: self.handing_on, WITHOUT_INIT: self.without_init}
        self.measured: dict[int, str] = {}  # The measurements of ranks, as JSON.
        self.last: dict[int, list[str]] = {}  # The last operations of ranks, as lines of trace/last.py.
        self._begun: list[tuple[int, str, int, dict[str, list[str]]]] = []

    @property
    def reports(self) -> list[Report]:
        """The reports so far, in the order in which they began."""
        return [Report(rank, host, code, ErrorText("\n".join(parts[_FRAMES]), "\n".join(parts[_MESSAGE])))
                for rank, host, code, parts in self._begun]

    def take(self, line: bytes) -> bytes | None:
        """Parse a line of a report. Return None if the line does not belong to a report.

        Else return the text before the report: nothing, a tag of mpirun, or an unfinished line of another rank.
        """
        if b"[mpistrat] rank " not in line:
            return None
        if found := _STARTS_PATTERN.search(line):
            self.started[int(found[1])] = found[3].decode(errors="replace"), int(found[2])
        elif found := _STATE_PATTERN.search(line):
            self._in_state[found[2].decode()].add(int(found[1]))
        elif found := _MEASURES_PATTERN.search(line):
            self.measured[int(found[1])] = found[2].decode(errors="replace")
        elif found := _LAST_PATTERN.search(line):
            if found[2].decode() == LAST_BEGIN:
                self.last[int(found[1])] = []
            self.last.setdefault(int(found[1]), []).append(found[3].decode(errors="replace"))
        elif found := _BEGIN_PATTERN.search(line):
            self._begun.append((int(found[1]), found[2].decode(errors="replace"), int(found[3]),
                                {_FRAMES: [], _MESSAGE: []}))
        elif found := _LINE_PATTERN.search(line):
            parts = next((parts for rank, *_, parts in reversed(self._begun) if rank == int(found[1])), None)
            if parts is None:
                return None
            parts[found[2].decode()].append(found[3].decode(errors="replace"))
        else:
            return None
        return line[:found.start()]


def mode(environ: MutableMapping[str, str]) -> str:
    """Return how this rank reports errors: SUMMARY, TRACEBACK (with a traceback), or "" without `mpistrat run`."""
    global _mode
    if _mode is None:  # Programs that this process starts must not inherit the variable.
        _mode, _, number = environ.pop(RUN_REPORTS, "").partition(" ")
        if _mode and not _finds_launcher(number, environ):
            _mode = ""
    return _mode


def _finds_launcher(number: str, environ: MutableMapping[str, str]) -> bool:
    """Set `_descriptor` to the stderr that mpirun reads. Return False if a wrapper redirects its stderr elsewhere.

    `number`: The descriptor that mpirun reads, in the process that mpirun has started; "" stands for 2 (stderr).
    """
    global _descriptor
    first, launcher = launcher_watch.start_of_rank(environ)
    if first == os.getpid():
        if number:
            _descriptor = int(number)
            os.set_inheritable(_descriptor, False)
        return True
    path, readers = f"/proc/{first}/fd/{number or 2}", f"/proc/{launcher.pid if launcher else 0}/fd"
    with contextlib.suppress(OSError):  # /proc does not show the descriptor. Most wrappers do not redirect stderr.
        pipe = os.readlink(path)
        if not pipe.startswith("pipe:") or pipe not in {os.readlink(f"{readers}/{name}")
                                                        for name in os.listdir(readers)}:
            return False
        _descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return True


def replaces_traceback(environ: MutableMapping[str, str]) -> bool:
    """Return whether this rank prints only the report of an exception, without the traceback.

    The rank also prints the traceback if the script has replaced sys.stderr, or if stderr is a file or a pipe of a
    wrapper, because these may lead to a log of this rank.
    """
    stream = sys.__stderr__
    if mode(environ) != SUMMARY or stream is None or sys.stderr is not stream:
        return False
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(stream.fileno())
        return not stat.S_ISREG(found.st_mode) and (_descriptor is None
                                                    or os.path.samestat(found, os.fstat(_descriptor)))
    return False


def announce(rank: int, host: str, code: int, text: ErrorText, environ: MutableMapping[str, str],
             ends_job: bool = True) -> None:
    """Print why this rank fails: as a report under `mpistrat run`, else as a sentence with the whole message."""
    if not mode(environ):
        how = ("ends the job" if ends_job else "ends") + (f" with exit code {code}" if code != 1 else "")
        print(f"[mpistrat] rank {rank} on {host} {how}: {text.message}", file=sys.stderr, flush=True)
        return
    _send(Report(rank, host, code, text).lines())


def tell(rank: int, text: str, environ: MutableMapping[str, str]) -> None:
    """Send a text of one line to `mpistrat run`. Does nothing without `mpistrat run`."""
    if mode(environ):
        _send([f"[mpistrat] rank {rank} {text}\n"])


def tell_last(rank: int, lines: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Send the records of this rank's last operations (trace/last.py) to `mpistrat run`. Does nothing without it."""
    if mode(environ):
        _send([f"[mpistrat] rank {rank} {LAST if place else LAST_BEGIN} {line}\n" for place, line in enumerate(lines)])


def _send(lines: list[str]) -> None:
    """Write lines to the stderr that mpirun reads. Does nothing if there is no stderr, or no reader."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
        # Not sys.stderr: the script may have replaced it, whereas mpirun reads the original stderr.
        stderr = sys.__stderr__.fileno() if _descriptor is None else _descriptor  # type: ignore[union-attr]
        _write(stderr, lines)


def _write(descriptor: int, lines: list[str]) -> None:
    """Write blocks of whole lines, because the lines of other ranks may come between two writes."""
    block = b""
    for line in [*(line.encode(errors="backslashreplace") for line in lines), b""]:
        if block and (not line or len(block) + len(line) > _WRITE_BYTES):
            _await_reader(descriptor)
            while block:
                block = block[os.write(descriptor, block):]
        block += line


def _await_reader(descriptor: int) -> None:
    """Wait up to 0.1 s until the pipe is empty: mpirun reads at most 4096 bytes, and could otherwise split a line."""
    until = time.monotonic() + _READ_S
    with contextlib.suppress(OSError):  # The descriptor is not a pipe.
        while time.monotonic() < until and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))):
            time.sleep(0.001)
