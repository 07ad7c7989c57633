"""Run a program with a time limit and collect its output; print facts as lines of JSON, and parse such lines.

The output goes to anonymous files. With a pipe, the caller would also wait for processes that the program leaves behind
with the pipe open: children of a wrapper script, an ssh connection (ControlPersist) or a daemon of MPI. Used by
`mpistrat run`, by `mpistrat doctor`, and by the processes that doctor starts.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

_KILLED_S = 2.0  # time limit from SIGKILL to the end of a process; a process that waits for a lost disk does not end


class Child:
    """A program in its own process group, with empty stdin. The end of `with` kills the group if it still runs.

    Raises OSError: The program cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]):
        # Files in memory, because there may be no writable directory.
        self._out = open(os.memfd_create("mpistrat-out"), "w+b")  # noqa: SIM115 - the end of the context closes it
        self._err = open(os.memfd_create("mpistrat-err"), "w+b")  # noqa: SIM115 - likewise
        self._process = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=self._out,
                                         stderr=self._err, start_new_session=True)

    def wait(self, until: float) -> int | None:
        """Wait for the program until time.monotonic() is `until`. Return the exit code, or None if it still runs."""
        try:
            return self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    @property
    def said(self) -> tuple[str, str]:
        """What the program has printed so far: (stdout, stderr)."""
        return _content(self._out), _content(self._err)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # The process has just ended.
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait(time.monotonic() + _KILLED_S)
        self._out.close()
        self._err.close()


def _content(file: IO[bytes]) -> str:
    """Return the content of a file. The file position does not move, because the running program shares it."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


MARK = "mpistrat-doctor "  # begins a line with findings


def say(kind: str, **values: object) -> None:
    """Print facts as one marked line of JSON. Lines below 4096 bytes do not mix with lines of other processes."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def understood(text: str) -> Iterator[dict[str, Any]]:
    """Yield the facts in the lines of `text` that `say` has printed. Truncated lines are skipped."""
    for line in text.splitlines():
        _, mark, said = line.partition(MARK)
        try:
            found = json.loads(said) if mark else None
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
