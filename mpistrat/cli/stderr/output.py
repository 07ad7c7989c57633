"""Decide which lines of mpirun's stderr are shown at once or held back. Pure: bytes and times are arguments.

Bytes pass unchanged, with these exceptions, for which whole lines are needed:

- Held back for the summary at the end: the report and the last operations of a rank that fails, and the line of a rank
  that ends without init().
- Texts of mpirun about the end of a rank are also held back.
- Log lines of TensorFlow, warnings of Python and errors in the arguments of a script are shown once, and not for each
  rank (`tensorflow_lines`).

An incomplete line passes after a moment, so that prompts and progress bars appear.
"""

import math
import re

from ...process.report import ReportReader
from .mpirun_lines import LINE_STARTS, RULE, Words, understand
from .tensorflow_lines import Records

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
        least_severity: Least severity of TensorFlow's log lines to show, as in TF_CPP_MIN_LOG_LEVEL.
        has_driver: Whether a rank may find a GPU driver.
    """

    def __init__(self, is_all: bool = False, least_severity: int = 0, has_driver: bool = True):
        self._is_all = is_all
        # told: The reports that ranks have printed so far.
        self.told, self._records = ReportReader(), Records(least_severity, has_driver)
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
        """Return the seconds until `due` may return bytes; None if nothing is held back for a time."""
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
        if is_start:
            line = self._without_null(line)
        before = self.told.take(line)
        if before is not None:
            if _TAG.fullmatch(before) or not before:
                return b""
            return self._once(before + b"\n") if is_start else before + b"\n"
        if not is_start:
            return line
        is_rule = RULE.match(_untagged(line)) is not None
        if self._block and not is_rule:
            self._block.append(line)
            return self._end_block() if len(self._block) > _BLOCK_LINES else b""
        if is_rule:
            return self._take_rule(line, now)
        if line.startswith(LINE_STARTS) and self._keep(line):
            return line if self._is_all else b""
        return self._once(line)

    def _without_null(self, line: bytes) -> bytes:
        """Remove the null character that Open MPI 5 prints after its last texts, or after lines of ranks."""
        bare = _untagged(line)
        if not self.words or not bare.startswith(b"\0"):
            return line
        rest = bare.lstrip(b"\0")
        return line[:-len(bare)] + rest if rest.strip() else b""

    def _once(self, line: bytes) -> bytes:
        return line if self._is_all or self._records.is_shown(line) else b""

    def _take_rule(self, line: bytes, now: float) -> bytes:
        text = b"".join(self._block)
        if text and self._keep(text + line):
            self._block, self._block_until = [], math.inf
            return text + line if self._is_all else b""
        # The first rule, or the second rule of an unrelated text, or the first rule after a line like a rule.
        self._block, self._block_until = [line], now + BLOCK_S
        return text

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
