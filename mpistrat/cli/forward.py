"""A thread that reads mpirun's stderr, and writes the filtered output to stderr of this process.

The thread may wait for a slow reader of stderr. The main thread, which supervises mpirun, never waits: it queues its
own lines for this thread.
"""

import os
import select
import threading
import time
from collections.abc import Callable

from ..core.tuning import STDERR_READ_BYTES
from .stderr import Output

_STDERR = 2
# Processes that outlive a job may keep the pipe open. The pipe counts as ended after this time without output, or after
# the number of bytes that a pipe can hold.
_QUIET_S = 0.2
_LAST_BYTES = 2**20


class Forwarder:
    """Starts the thread that forwards from a file descriptor.

    Args:
        source: The read end of a pipe. `join` closes it.
        output: The filter. Only the thread uses it, until the thread has ended.
    """

    def __init__(self, source: int, output: Output):
        self._source, self._output = source, output
        self._said: list[str] = []
        self._last: Callable[[], bytes] | None = None
        self._has_reader = True
        self._wake_in, self._wake_out = os.pipe()
        self._thread = threading.Thread(target=self._run, name="mpistrat-stderr", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Queue a line of mpistrat for the thread to print. Returns at once."""
        self._said.append(line)
        self._wake()

    def end(self, last: Callable[[], bytes]) -> None:
        """Let the thread end after it has forwarded all output of mpirun. Returns at once.

        `last`: Returns whole lines to print after the output of mpirun. Called by the thread.
        """
        self._last = last
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, after `end`. Returns True if the thread has ended; then call no more methods."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        for descriptor in (self._source, self._wake_in, self._wake_out):
            os.close(descriptor)
        return True

    def _wake(self) -> None:
        os.write(self._wake_out, b"\0")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._wake_in, select.POLLIN)
        left = _LAST_BYTES
        while left > 0:
            next_s = _QUIET_S if self._last is not None else self._output.next_s(time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(None if next_s is None else 1000 * next_s + 1)}
            if self._wake_in in ready:
                os.read(self._wake_in, STDERR_READ_BYTES)
            data = os.read(self._source, STDERR_READ_BYTES) if self._source in ready else None
            now = time.monotonic()
            self._write((self._output.feed(data, now) if data else b"") + self._output.due(now))
            self._write_said()
            if data == b"":
                poll.unregister(self._source)
            if self._last is not None:
                left = 0 if data == b"" or not ready else left - len(data or b"")
        self._write(self._output.end())
        self._write_said()
        self._write_lines(self._last() if self._last is not None else b"")

    def _write_said(self) -> None:
        while self._said:
            self._write_lines(f"{self._said.pop(0)}\n".encode(errors="backslashreplace"))

    def _write_lines(self, lines: bytes) -> None:
        """Write whole lines of mpistrat or of mpirun, on a new line."""
        if lines:
            self._write(lines if self._output.is_at_line_start else b"\n" + lines)
            self._output.is_at_line_start = True

    def _write(self, data: bytes) -> None:
        """Write to stderr. If stderr has no reader, the data is discarded, and mpirun goes on."""
        while data and self._has_reader:
            try:
                data = data[os.write(_STDERR, data):]
            except BlockingIOError:
                select.select([], [_STDERR], [])  # Another program has made stderr non-blocking.
            except OSError:
                self._has_reader = False
