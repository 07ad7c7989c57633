"""Show lines that several ranks print only once: TensorFlow's log, warnings of Python, errors of commands. Pure.

TensorFlow's C++ code prints several lines at its start, on each rank, and some in spite of TF_CPP_MIN_LOG_LEVEL.
"""

import re

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


class Records:
    """Decides which lines are shown.

    Args:
        least: The least severity of the log lines to show, as in TF_CPP_MIN_LOG_LEVEL: 0 is INFO, 1 WARNING, 2 ERROR.
        has_driver: Whether a rank may find a GPU driver. If not, TensorFlow's error about the missing driver is hidden.
    """

    def __init__(self, least: int = 0, has_driver: bool = True) -> None:
        self._least, self._has_driver = least, has_driver
        self._programs: set[bytes] = set()  # programs that have printed a usage
        self._warning = b""  # the previous line, if that was a warning
        self._seen: set[bytes] = set()

    def is_shown(self, line: bytes) -> bool:
        """Whether to show a line. Call this once for each line, in order."""
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
