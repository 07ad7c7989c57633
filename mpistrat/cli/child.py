"""A program that runs for a limited time, and what it has printed.

The end of a pipe comes only when all processes that hold it have ended: a wrapper script, a connection that ssh keeps
(ControlPersist) or a daemon of MPI may leave one behind. So the output goes to files without a name, and nothing but
the program itself is waited for. Used by the launcher and by `mpistrat doctor`.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

_KILLED_S = 2.0  # from SIGKILL to the end of a process; one that waits for a disk that is gone does not end


class Child:
    """A program, which is started at once, without stdin, in a process group of its own. A context that ends this group
    if the program has not ended.

    Args:
        argv: The program with its arguments.
        environ: Its environment.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]):
        # In memory: there may be no directory that can be written.
        self._out = open(os.memfd_create("mpistrat-out"), "w+b")  # noqa: SIM115 - the end of the context closes it
        self._err = open(os.memfd_create("mpistrat-err"), "w+b")  # noqa: SIM115 - likewise
        self._process = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=self._out,
                                         stderr=self._err, start_new_session=True)

    def wait(self, until: float) -> int | None:
        """Wait for the end until time.monotonic() is `until`. Returns the exit code; None if it has not ended."""
        try:
            return self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    @property
    def said(self) -> tuple[str, str]:
        """What it has printed so far to stdout and to stderr."""
        return _content(self._out), _content(self._err)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait(time.monotonic() + _KILLED_S)
        self._out.close()
        self._err.close()


def _content(file: IO[bytes]) -> str:
    """All of a file, whose position is also that of the program, which may still write."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
