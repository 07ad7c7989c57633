"""Log lines of TensorFlow, warnings and errors of Python on stderr: what several ranks print is shown once. Pure.

TensorFlow's C++ code prints several lines when it starts, on each rank, and some in spite of TF_CPP_MIN_LOG_LEVEL. When
an operation fails it prints the error with the stack of the operation, before the script gets the same error as an
exception.

mpirun reads 4096 bytes at once of the output of a rank. So the lines of another rank, or a part of them, may stand
between those of an error, and even within a line.
"""

import re
from collections.abc import Iterable

# An error is held back for so long. It is not shown if the rank's report, which has the same message, arrives by then.
HOLD_S = 2.0
HEADING_S = 0.1  # The first line of a stack is held back for so long, until the second line shows whose stack it is.
_MOST_KEYS = 10_000
_ENOUGH = 100  # By so many bytes an error is compared with the reports: its end may be torn off.
_LEAST_PIECE = 8  # A piece of a line is recognized by so many characters.

# "2024-01-31 09:30:00.123456: I tensorflow/core/util/port.cc:153] text" and "I0000 00:00:1706.123456  4711 port.cc:153]
# text". The zeros in place of a date are those of C++ code that has not set up its log, which TensorFlow never does.
_RECORD = re.compile(rb"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ([IWEF]) |([IWEF])0000 00:00:[\d.]+ +\d+ )"
                     rb"(\S+\.(?:cc|h):\d+\] .*)")
_SEVERITIES = b"IWEF"
# These two belong to lines of information.
_OF_INFO = (b"WARNING: All log messages before absl::InitializeLog()", b"To enable the following instructions:")
_WARNING = re.compile(rb"\S.*\.py:\d+: \w*Warning: ")  # Python's, with the line of source in the next line
_NO_FILE = re.compile(rb"\S*python[\d.]*: can't open file ")
_USAGE = re.compile(rb"usage: (\S+)")  # argparse's, before its error. The next lines of the usage are indented.
_USAGE_INDENT = b" " * len("usage: ")
_NO_DRIVER = b"failed call to cuInit"
_FAILURE = re.compile(rb"(?:op_kernel|local_rendezvous)\.cc:\d+\] .*?\b[A-Z]+(?:_[A-Z]+)*: (.*\S)")
_CLASS = re.compile(rb"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b")
_NODE_BEGIN = b"\t [["
_STACK = b"Traceback (most recent call last):"


class _Record:
    """A log line of TensorFlow that is kept back, with the lines that belong to it."""

    def __init__(self, line: bytes, failure: str, until: float):
        self.lines, self.failure, self.until = [line], failure, until


class Records:
    """Decides which log lines of TensorFlow and warnings of Python are shown, and when.

    Args:
        least: The least severity of the log lines to show, as in TF_CPP_MIN_LOG_LEVEL: 0 is INFO, 1 WARNING, 2 ERROR.
        has_driver: Whether a rank may find a driver for GPUs. Without one, TensorFlow's error that says so is left out.
    """

    def __init__(self, least: int = 0, has_driver: bool = True) -> None:
        self._least, self._has_driver = least, has_driver
        self._programs: set[bytes] = set()  # that have printed a usage
        self._warning = b""  # the previous line, if it is one
        self._seen: set[bytes] = set()
        self._held: list[_Record] = []
        self._current: _Record | None = None  # the latest failure, to which the next line may belong
        self._stack = ""  # of the latest failure: "", "goes on" or "ends"
        self._heading: tuple[bytes, float] | None = None  # a line that begins a stack, and until when it waits
        # Since the first failure that is kept back: the lines of stacks, and whether Python has printed a traceback.
        self._known: set[bytes] = set()
        self._has_traceback = False

    def take(self, line: bytes, now: float) -> bytes:
        """Take a line, and return what is to be shown now. `due` returns later what is not a repetition."""
        text = line.rstrip()
        warning, self._warning = self._warning, b""
        begin = self._failure_within(text)
        if begin:
            before = b"" if self._current and self._stack else self.take(line[:begin] + b"\n", now)
            return before + self.take(line[begin:], now)
        match = _RECORD.match(text)
        if match:
            return self._take_heading() + self._take_record(line, match, now)
        if text.startswith(_OF_INFO):
            return line if self._least == 0 and self._is_new(text) else b""
        if _WARNING.match(text):
            self._warning = text
            return line if self._is_new(text) else b""
        if warning and text.startswith(b"  "):
            return line if self._is_new(warning + text) else b""
        if _NO_FILE.match(text) or self._is_usage(text):
            return line if self._is_new(text) else b""
        if self._current is None and text == _STACK and self._held and not self._has_traceback:
            self._current = self._held[-1]
        if self._current is None:
            return b"" if self._resumes(line, text) else line
        if self._heading is not None and not text:
            # TensorFlow's stacks have an empty line after the first line and after each frame. Python's have not.
            self._append(self._take_heading())
            self._stack = "goes on"
        elif text == _STACK and self._stack != "goes on" and self._heading is None:
            self._heading, self._stack = (line, now + HEADING_S), ""
            return b""
        elif not self._belongs(text):
            if self._heading is not None:
                self._has_traceback = True
            if self._resumes(line, text):
                return b""
            self._current = None
            return self._take_heading() + line
        self._append(line)
        return b""

    def _append(self, line: bytes) -> None:
        if self._current is not None:
            self._current.lines.append(line)
            self._known.add(line.rstrip())

    def _is_new(self, text: bytes) -> bool:
        is_new = text not in self._seen
        if len(self._seen) < _MOST_KEYS:
            self._seen.add(text)
        return is_new

    def _is_usage(self, text: bytes) -> bool:
        """Whether a line is of argparse's usage, or of its error after that."""
        match = _USAGE.match(text)
        if match and len(self._programs) < _MOST_KEYS:
            self._programs.add(match[1])
        return bool(match) or (bool(self._programs) and (
            text.startswith(_USAGE_INDENT) or (b": error: " in text and text.startswith(tuple(self._programs)))))

    def _take_record(self, line: bytes, match: "re.Match[bytes]", now: float) -> bytes:
        severity, text = match[1] or match[2], match[3]
        is_shown = self._is_new(severity + text) and _SEVERITIES.index(severity) >= self._least
        is_shown = is_shown and (self._has_driver or _NO_DRIVER not in text)
        failure = _FAILURE.search(text)
        self._stack, self._current = "", None
        if failure:
            self._current = _Record(line, failure[1][:_ENOUGH].decode(errors="replace"), now + HOLD_S)
            self._held += [self._current] if is_shown else []
        return line if is_shown and not failure else b""

    def _failure_within(self, text: bytes) -> int:
        """Where a record of a failure begins in a line that begins with a piece of another rank's; else 0."""
        match = _RECORD.search(text, 1) if self._held else None
        return match.start() if match and _FAILURE.search(match[3]) else 0

    def _resumes(self, line: bytes, text: bytes) -> bool:
        """Whether a line is the rest of a stack, of which the beginning was kept back. It is kept back as well."""
        if not self._held or self._has_traceback:
            return False
        failed = next((record for record in self._held if record.failure.encode() in text), None)
        stripped = text.strip()
        is_piece = len(stripped) >= _LEAST_PIECE and any(stripped in known for known in self._known)
        if failed is None and text not in self._known and not is_piece and not text.startswith(_NODE_BEGIN):
            return False
        self._current = failed or self._held[-1]
        self._append(line)
        self._stack = "goes on" if failed is None else "ends"
        return True

    def _belongs(self, text: bytes) -> bool:
        """Whether a line belongs to the latest failure: a node of the graph, or a line of a stack that has begun."""
        is_node = text.startswith(_NODE_BEGIN)
        if is_node or (text and self._stack == "ends"):
            self._stack = ""
        elif text and self._stack == "goes on" and not text.startswith(b" "):
            self._stack = "ends" if _CLASS.match(text) else ""
        return is_node or bool(self._stack)

    def _take_heading(self) -> bytes:
        line, self._heading = self._heading[0] if self._heading else b"", None
        return line

    def due(self, now: float, messages: Iterable[str]) -> bytes:
        """Return the lines that were kept back long enough and that no message of a report contains."""
        heading = self._take_heading() if self._heading and self._heading[1] <= now else b""
        shown = [record for record in self._held if record.until <= now]
        self._held = [record for record in self._held if record.until > now]
        if not self._held:
            self._known, self._has_traceback = set(), False
        texts = list(messages)
        return heading + b"".join(line for record in shown if not any(record.failure in text for text in texts)
                                  for line in record.lines)

    def next_s(self, now: float) -> float | None:
        """Return the time until `due` has something to return, or None."""
        times = [*(record.until for record in self._held), *([self._heading[1]] if self._heading else [])]
        return max(0.0, min(times) - now) if times else None
