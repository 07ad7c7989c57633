"""Filter the stderr of mpirun: decide which lines are shown at once, and make the summary at the end. Pure.

Bytes and times are arguments. Bytes pass unchanged, except for these lines:

- Some lines are held back for the summary: the report and the last operations of a rank that fails, the line of a rank
  that ends without init(), and texts of mpirun about the end of a rank.
- Some lines are shown once, and not for each rank: log lines of TensorFlow, warnings of Python, and errors in the
  arguments of a script. TensorFlow's C++ code prints several lines, some in spite of TF_CPP_MIN_LOG_LEVEL.

An incomplete line passes after a moment, so prompts and progress bars appear.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.topology import runs_of
from ..process.error_text import OWN_ERRORS
from ..process.launchers import STARTED, Launcher
from ..process.report import Report, ReportReader

# -- texts of mpirun --------------------------------------------------------------------------------------------------

# The patterns are in the table of launchers (process/launchers.py). MPICH's "BAD TERMINATION" block goes to stdout,
# which is not read.
_RULE = re.compile(rb"-{60,}\s*$")  # the line before and after a text of Open MPI
_LINE_STARTS = tuple(start for launcher in STARTED for start in launcher.line_starts)


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

    `text`: One line, or a block of lines that begins and ends with a line of dashes.
    """
    flat = b" ".join(text.split())
    for launcher in STARTED:
        for pattern in launcher.endings:
            if match := re.search(pattern, flat):
                found = match.groupdict()
                numbers = {name: int(found[name] or 0) for name in ("code", "signal") if name in found}
                host = found.get("host", b"").decode(errors="replace")
                return Words(text, Ending(int(found["rank"]), host, **numbers))
        if any(re.search(pattern, flat) for pattern in launcher.consequences):
            return Words(text)
        if any(re.search(pattern, flat) for pattern in launcher.errors):
            return Words(text, is_error=True)
    return None


# -- lines that several ranks print -----------------------------------------------------------------------------------

_MOST_KEYS = 10_000

# "2024-01-31 09:30:00.123456: I tensorflow/core/util/port.cc:153] text" and "I0000 00:00:1706.123456  4711 port.cc:153]
# text". C++ code that has not initialised its log prints zeros for the date, and TensorFlow never initialises the log.
_RECORD = re.compile(rb"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ([IWEF]) |([IWEF])0000 00:00:[\d.]+ +\d+ )"
                     rb"(\S+\.(?:cc|h):\d+\] .*)")
_SEVERITIES = b"IWEF"
# These two lines belong to log lines of severity INFO.
_OF_INFO = (b"WARNING: All log messages before absl::InitializeLog()", b"To enable the following instructions:")
_WARNING = re.compile(rb"\S.*\.py:\d+: \w*Warning: ")  # a warning of Python; the next line is the line of source
_COMMAND = re.compile(rb"mpistrat [a-z]+: ")  # an error of a command that runs on all ranks
_NO_FILE = re.compile(rb"\S*python[\d.]*: can't open file ")
_USAGE = re.compile(rb"usage: (\S+)")  # argparse prints it before an error. Its other lines are indented.
_USAGE_INDENT = b" " * len("usage: ")
_NO_DRIVER = b"failed call to cuInit"


class _Repeats:
    """Decides which lines to show. Of equal lines that several ranks print, one is shown. For arguments see Output."""

    def __init__(self, least: int, has_driver: bool) -> None:
        self._least, self._has_driver = least, has_driver
        self._programs: set[bytes] = set()  # programs that have printed a usage
        self._warning = b""  # the previous line, if that was a warning
        self._seen: set[bytes] = set()

    def is_shown(self, line: bytes) -> bool:
        """Return whether to show a line. Call this once for each line, in order, because earlier lines count."""
        text = line.rstrip()
        warning, self._warning = self._warning, text if _WARNING.match(text) else b""
        match = _RECORD.match(text)
        if match:
            severity, message = match[1] or match[2], match[3]
            return (_SEVERITIES.index(severity) >= self._least and (self._has_driver or _NO_DRIVER not in message)
                    and self._is_new(severity + message))
        if text.startswith(_OF_INFO):
            return self._least == 0 and self._is_new(text)
        if warning and text.startswith(b"  "):
            return self._is_new(warning + text)
        if self._warning or _COMMAND.match(text) or _NO_FILE.match(text) or self._is_usage(text):
            return self._is_new(text)
        return True

    def _is_new(self, text: bytes) -> bool:
        is_new = text not in self._seen
        if len(self._seen) < _MOST_KEYS:
            self._seen.add(text)
        return is_new

    def _is_usage(self, text: bytes) -> bool:
        """Whether a line belongs to a usage text of argparse, or is the error after the usage."""
        match = _USAGE.match(text)
        if match and len(self._programs) < _MOST_KEYS:
            self._programs.add(match[1])
        return bool(match) or (bool(self._programs) and (
            text.startswith(_USAGE_INDENT) or (b": error: " in text and text.startswith(tuple(self._programs)))))


# -- the filter -------------------------------------------------------------------------------------------------------

PARTIAL_S = 0.1  # The longest time for which an incomplete line is held back.
BLOCK_S = 1.0  # The longest time for which a text after a rule waits for the second rule.
_BLOCK_LINES = 60
# The tag that mpirun puts before the lines of a rank (--tag-output, -prepend-rank).
_TAG = re.compile(rb"[^<>]*<stderr>:? ?|\[\d+\] ?")


def _untagged(line: bytes) -> bytes:
    tag = _TAG.match(line)
    return line[tag.end():] if tag else line


class Output:
    """The filter of the stderr of one mpirun.

    Args:
        is_all: Show everything except reports.
        least_severity: Least severity of TensorFlow's log lines to show, as in TF_CPP_MIN_LOG_LEVEL: 0 is INFO, 1
            WARNING, 2 ERROR.
        has_driver: Whether a rank may find a GPU driver. If not, TensorFlow's error about the missing driver is hidden.
    """

    def __init__(self, is_all: bool = False, least_severity: int = 0, has_driver: bool = True):
        self._is_all = is_all
        self.told = ReportReader()  # The reports that ranks have printed so far.
        self._repeats = _Repeats(least_severity, has_driver)
        self._partial, self._partial_until = b"", math.inf
        self._is_inside_line = False  # Whether the beginning of the next line has been returned.
        self._block: list[bytes] = []
        self._block_until = math.inf
        self.words: list[Words] = []  # Texts of mpirun about the end of ranks, in order.
        self.is_at_line_start = True  # Whether the bytes returned so far end with a newline.

    def feed(self, data: bytes, now: float) -> bytes:
        """Take bytes that mpirun has printed, and return the bytes to show now."""
        *lines, partial = (self._partial + data).split(b"\n")
        shown = [self._line(line + b"\n", now) for line in lines]
        if not self._is_inside_line:
            partial = self._without_null(partial)
        if not partial:
            self._partial_until = math.inf
        elif lines or not self._partial:
            self._partial_until = now + PARTIAL_S  # More bytes of the same line do not extend the time.
        self._partial = partial
        return self._shown(b"".join(shown))

    def due(self, now: float) -> bytes:
        """Return the bytes that were held back and must be shown now, because their time has passed."""
        shown = b""
        if self._block and self._block_until <= now:
            shown += self._end_block()
        if self._partial and self._partial_until <= now:
            shown += self._partial
            self._partial, self._partial_until, self._is_inside_line = b"", math.inf, True
        return self._shown(shown)

    def next_s(self, now: float) -> float | None:
        """Return the seconds until `due` may return bytes; None if no bytes are held back for a limited time."""
        until = min(self._partial_until, self._block_until)
        return max(0.0, until - now) if until < math.inf else None

    def end(self) -> bytes:
        """Return the remaining bytes to show when mpirun has ended."""
        last, self._partial, self._partial_until = self._partial, b"", math.inf
        shown = self._line(last, math.inf) if last else b""
        return self._shown(shown) + self.due(math.inf)

    def _shown(self, data: bytes) -> bytes:
        if data:
            self.is_at_line_start = data.endswith(b"\n")
        return data

    def _line(self, line: bytes, now: float) -> bytes:
        is_start, self._is_inside_line = not self._is_inside_line, False
        line = self._without_null(line) if is_start else line
        before = self.told.take(line)
        if before is not None:
            if _TAG.fullmatch(before) or not before:
                return b""
            return self._once(before + b"\n") if is_start else before + b"\n"
        if not is_start:
            return line
        if _RULE.match(_untagged(line)):
            text = self._end_block()
            if text and self._keep(text + line):
                return text + line if self._is_all else b""
            # The first rule, or the second rule of an unrelated text, or the first rule after a line like a rule.
            self._block, self._block_until = [line], now + BLOCK_S
            return text
        if self._block:
            self._block.append(line)
            return self._end_block() if len(self._block) > _BLOCK_LINES else b""
        if line.startswith(_LINE_STARTS) and self._keep(line):
            return line if self._is_all else b""
        return self._once(line)

    def _without_null(self, line: bytes) -> bytes:
        """Remove null characters from the start of a line. Open MPI 5 prints them after its texts about ended ranks."""
        bare = _untagged(line)
        if not self.words or not bare.startswith(b"\0"):
            return line
        rest = bare.lstrip(b"\0")
        return line[:-len(bare)] + rest if rest.strip() else b""

    def _once(self, line: bytes) -> bytes:
        return line if self._is_all or self._repeats.is_shown(line) else b""

    def _end_block(self) -> bytes:
        text, self._block, self._block_until = b"".join(self._block), [], math.inf
        return text

    def _keep(self, text: bytes) -> bool:
        """Hold back a text of mpirun about the end of a rank. Returns False if the text is about something else."""
        words = understand(text)
        if words is None:
            return False
        self.words.append(words)
        return True


# -- the summary ------------------------------------------------------------------------------------------------------

JOB = "the job"
_MOST_GROUPS = 3
_MOST_HOSTS = 4
# Raised on ranks that wait for a rank that has ended. If the ended rank reports why, this error is a consequence.
_CONSEQUENCE = f"{OWN_ERRORS}ShutdownError:"
_WITHOUT_INIT = ("no rank has called init(): each of {} processes has run the whole script alone. If it trains, each "
                 "process has trained its own model. To train together, write in the script: import mpistrat.keras as "
                 "hvd; hvd.init(); optimizer = hvd.DistributedOptimizer(optimizer). Or, in place of a strategy of "
                 "tf.distribute: strategy = mpistrat.tensorflow.MPIStrategy()")
_SIGNAL_NAMES = {int(each): each.name for each in signal.Signals}
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "by a user (kill -9), or by the kernel for lack of memory (see dmesg)",
    signal.SIGSEGV: "it crashed in compiled code; PYTHONFAULTHANDLER=1 prints where",
    signal.SIGABRT: "a library ended the rank; the message of the library is above",
    signal.SIGBUS: "it crashed in compiled code; PYTHONFAULTHANDLER=1 prints where"}


def causes(reports: Sequence[Report]) -> list[Report]:
    """Return the reports that do not follow from those of other ranks; all reports if there are none."""
    return [each for each in reports if not each.text.message.startswith(_CONSEQUENCE)] or list(reports)


def first_code(reports: Sequence[Report], words: Sequence[Words]) -> int:
    """Return the exit code of the first rank that has failed; 0 if it is not known. For arguments see `summarize`."""
    endings = [each.ending for each in words if each.ending is not None]
    return next((report.code for report in causes(reports)), 0) or next(
        (each.signal + 128 if each.signal is not None else (each.code or 0) % 256 for each in endings), 0)


def summarize(code: int, reports: Sequence[Report], words: Sequence[Words], *, interrupted_by: int | None = None,
              died_of: int | None = None, launcher: Launcher | None = None, can_show_more: bool = True,
              without_init: int = 0, why_not_started: str = "", subject: str = JOB) -> tuple[bytes, list[str]]:
    """Return what to print after the job: unchanged output of mpirun, and lines of mpistrat.

    Args:
        reports: The reports of ranks that failed, in order of arrival.
        words: The texts of mpirun that were held back.
        interrupted_by: The signal with which the user has ended the job, or None.
        died_of: The signal that has killed mpirun itself; None also if this process has sent the signal.
        can_show_more: Whether --traceback would show more.
        without_init: Number of ranks that have ended without init().
        why_not_started: Why some ranks have not started, or "".
        subject: The subject of the sentence on the exit code: the job, or a generation (one mpirun) of the job.
    """
    if code == 0:
        # The reports are from another job, which a rank has started, and whose failure the rank has handled.
        alone = [_WITHOUT_INIT.format(without_init)] if without_init > 1 else []
        return b"".join(each.text for each in words), [*_lines_of(_groups(reports)), *alone]
    if interrupted_by == signal.SIGINT:
        reports = [report for report in reports if report.text.message != KeyboardInterrupt.__name__]
    groups = _groups(causes(reports))
    end = f"{subject} has ended with exit code {code}"
    if groups:
        text = groups[0][0].text
        if len(groups) == 1 and not text.frames and "\n" not in text.message:
            return b"", [f"{end}. R{_who(groups[0])[1:]}: {text.message}"]
        return b"", [*_lines_of(groups), end + (" (--traceback prints whole tracebacks)" if can_show_more else "")]
    endings = [each.ending for each in words if each.ending is not None]
    is_said = bool(why_not_started or endings) and all(each.signal in (None, interrupted_by) for each in endings)
    kept = b"".join(each.text for each in words if each.is_error or not is_said)
    reason = f": {why_not_started}" if why_not_started else \
        _reason(code, endings, interrupted_by, died_of, launcher, subject)
    return kept, [f"{end}{reason}"]


def _reason(code: int, endings: Sequence[Ending], interrupted_by: int | None, died_of: int | None,
            launcher: Launcher | None, subject: str) -> str:
    """Return the reason for the exit code, as the end of a sentence; "" if the reason is not known."""
    if interrupted_by is not None:
        return f": it was ended by {'Ctrl-C' if interrupted_by == signal.SIGINT else _signal(interrupted_by)}"
    if died_of == signal.SIGKILL:
        by_agent = "" if subject == JOB else "by the agent of this host, "
        return f": mpirun itself was killed, {_signal(died_of)}: {by_agent}{_SIGNAL_HINTS[signal.SIGKILL]}"
    if endings:
        ending = endings[0]
        where = f"rank {ending.rank}" + (f" on {ending.host}" if ending.host else "")
        if ending.signal is None and ending.code is None:
            return f": {where} called MPI_Abort. If \"Socket closed\" is above, another rank or its host has died"
        if ending.code == 0:
            return f": {where} has ended with exit code 0 and without MPI_Finalize, while other ranks waited or ran"
        if ending.signal is None:
            return f", that of {where}" if ending.code == code else f": {where} has ended with exit code {ending.code}"
        hint = _SIGNAL_HINTS.get(ending.signal)
        return f": {where} was killed, {_signal(ending.signal)}" + (f": {hint}" if hint else "")
    if died_of is not None:
        return f": mpirun itself crashed, {_signal(died_of)}. Were there more ranks than this machine can start (-np)?"
    if code - 128 in _SIGNAL_NAMES:
        return (f": mpirun ended with the code of {_signal(code - 128)}, and named no rank. Probably mpirun itself "
                "crashed. Were there more ranks than this machine can start (-np)?")
    if launcher is not None and launcher.is_code_ambiguous and code in (
            signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM):
        return f": a rank returned this code, or was killed by {_signal(code)}; {launcher.name} has one code for both"
    return ""


def _groups(reports: Sequence[Report]) -> list[list[Report]]:
    """Group reports by message. In each group the report of the lowest rank comes first."""
    by_message: dict[str, list[Report]] = {}
    for report in reports:
        by_message.setdefault(report.text.message, []).append(report)
    return [sorted(group, key=lambda report: report.rank) for group in by_message.values()]


def _lines_of(groups: Sequence[list[Report]]) -> list[str]:
    """Return the lines about groups of reports. The first group is printed last, at the end of the output."""
    lines = []
    if len(groups) > _MOST_GROUPS:
        left = [report for group in groups[_MOST_GROUPS:] for report in group]
        lines.append(f"{_who(left)} failed with {len(groups) - _MOST_GROUPS} other messages (--traceback prints them)")
    return lines + [f"{_who(group)} failed:\n{group[0].text}" for group in reversed(groups[:_MOST_GROUPS])]


def _who(reports: Sequence[Report]) -> str:
    """Return ranks and hosts as text: "rank 1 on node1", "ranks 0-3, 5 on node1, node2"."""
    ranks = sorted({report.rank for report in reports})
    hosts = sorted({report.host for report in reports})
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs_of(ranks))
    places = ", ".join(hosts) if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"
    return f"rank{'s' * (len(ranks) > 1)} {numbers} on {places}"


def _signal(number: int) -> str:
    return f"signal {number}" + (f" ({_SIGNAL_NAMES[number]})" if number in _SIGNAL_NAMES else "")
