"""mpirun under supervision: it gets the signals that are sent to `mpistrat run`, and when it ends nothing stays behind.

mpirun mostly ends its ranks. It has been seen not to end itself when hosts were cut off from each other, although its
ranks had, and to be killed before it could end them. What is done about it: mpirun is terminated some time after a rank
has ended the job or a signal has come, and killed if that does not help, or at the second signal. What a failed job
leaves on this host is killed. What a job leaves that has succeeded is left alone.
"""

import contextlib
import ctypes
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..api import processes
from ..api.launch_env import RUN_NAME
from ..api.launcher_watch import ABORTED
from ..core.errors import LaunchError
from .mpirun import LaunchLine

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_PASSED_ON = {signal.SIGUSR1, signal.SIGUSR2}  # mpirun hands these to the ranks
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Patience:
    """How long is waited, in seconds.

    Attributes:
        abort_s: For mpirun to end when a rank has ended the job.
        signal_s: For mpirun to end after the first signal; it gives its ranks time to end.
        second_s: A signal that comes sooner after the first is the same one: some senders address a process and its
            group.
        kill_s: Between SIGTERM and SIGKILL.
        left_s: For what is left when mpirun has ended.
    """

    abort_s: float = 15.0
    signal_s: float = 30.0
    second_s: float = 0.3
    kill_s: float = 5.0
    left_s: float = 5.0


class Ending:
    """When mpirun is to be terminated or killed. Times come as arguments, in seconds."""

    def __init__(self, patience: Patience):
        self._patience = patience
        self._terminate_at = self._kill_at = math.inf
        self._signalled_at: float | None = None
        self.reason = ""
        self.is_urgent = False

    def note_abort(self, now: float) -> None:
        """A rank has ended the job."""
        if not self.reason:
            self._terminate_at = now + self._patience.abort_s
            self.reason = f"a rank ended the job, and mpirun has not ended within {self._patience.abort_s:g} s"

    def note_signal(self, now: float) -> None:
        """A signal that ends programs has come, and mpirun has it, too."""
        if self._signalled_at is None:
            self._signalled_at = now
            self._kill_at = min(self._kill_at, now + self._patience.signal_s)
            self.reason = f"mpirun has not ended within {self._patience.signal_s:g} s after a signal"
        elif now - self._signalled_at >= self._patience.second_s:
            self._kill_at = now
            self.reason = "this is the second signal"
            self.is_urgent = True

    def due(self, now: float) -> signal.Signals | None:
        """What is to be sent to mpirun now."""
        if now >= self._kill_at:
            self._kill_at = math.inf
            return signal.SIGKILL
        if now >= self._terminate_at:
            self._terminate_at = math.inf
            self._kill_at = min(self._kill_at, now + self._patience.kill_s)
            return signal.SIGTERM
        return None

    def wait_s(self, now: float) -> float:
        """How long until `due` may say something."""
        return max(0.0, min(self._terminate_at, self._kill_at) - now)


def supervise(line: LaunchLine, environ: Mapping[str, str], patience: Patience = Patience()) -> int:
    """Run mpirun until the job has ended; returns the exit code: mpirun's, or 128 + the signal that ended it.

    Raises:
        LaunchError: mpirun cannot be started.
    """
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ignored, it would take mpirun's exit code away.
    # What nohup, or a shell for what it starts in the background, has set to be ignored stays so.
    caught = {number for number in _ENDING | _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, caught | {signal.SIGCHLD, ABORTED})
    try:
        return _Run(line, {**environ, **line.environment, RUN_NAME: name}, caught, before, patience).end()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Run:
    """One mpirun. The signals in `caught`, SIGCHLD and ABORTED are blocked, and are taken up by waiting for them."""

    def __init__(self, line: LaunchLine, environ: Mapping[str, str], caught: set[signal.Signals],
                 mask: Collection[int], patience: Patience):
        self._caught, self._patience, self._name = caught, patience, environ[RUN_NAME]
        self._ending = Ending(patience)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._mpirun = subprocess.Popen(line.argv, env=dict(environ), preexec_fn=_prepare(mask, os.getpid()))
        except OSError as error:
            raise LaunchError(f"{line.argv[0]} cannot be started: {error.strerror}. Try --mpirun PATH.") from None

    def end(self) -> int:
        """Wait for the end, and see to it."""
        last: int | None = None
        killed = False
        while self._mpirun.poll() is None:
            number = self._next_signal(self._ending.wait_s(time.monotonic()))
            last = number or last
            due = self._ending.due(time.monotonic())
            if due is not None:
                killed = True
                _say(f"{self._ending.reason}; it is sent {due.name}")
                self._mpirun.send_signal(due)
        code = self._mpirun.returncode
        if code != 0 or last is not None:
            self._end_what_is_left()
        if killed:
            return 128 + last if last is not None else 1
        return code if code >= 0 else 128 - code

    def _next_signal(self, timeout_s: float) -> int | None:
        """Wait for a signal and do what it asks for; its number if it is one that ends programs."""
        info = signal.sigtimedwait(self._caught | {signal.SIGCHLD, ABORTED}, min(timeout_s, 3600.0))
        if info is None or info.si_signo == signal.SIGCHLD:
            return None
        if info.si_signo == ABORTED:
            self._ending.note_abort(time.monotonic())
            return None
        # What a terminal sends (its code is above 0) all processes in the foreground get, mpirun among them.
        if info.si_code <= 0:
            self._mpirun.send_signal(info.si_signo)
        if info.si_signo not in _ENDING:
            return None
        self._ending.note_signal(time.monotonic())
        return info.si_signo

    def _end_what_is_left(self) -> None:
        until = time.monotonic() + self._patience.left_s
        while left := processes_of_run(self._name):
            if self._ending.is_urgent or time.monotonic() >= until:
                _say(f"what is left of the job is killed: processes {', '.join(str(each.pid) for each in left)}")
                for process in left:
                    with contextlib.suppress(OSError):  # It has just ended, or has become another user's.
                        os.kill(process.pid, signal.SIGKILL)
                return
            self._next_signal(_LOOK_S)


def processes_of_run(name: str) -> list[processes.Process]:
    """The processes on this host that were started by the run of that name."""
    def belongs(process: processes.Process) -> bool:
        environ = processes.environment_of(process.pid)
        return environ is not None and environ.get(RUN_NAME) == name
    return [process for process in processes.everything() if belongs(process)]


def _prepare(mask: Collection[int], parent: int) -> Callable[[], None]:
    """What is done in the new process before it becomes mpirun."""
    set_option = ctypes.CDLL(None).prctl

    def prepare() -> None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should this process be killed
        if os.getppid() != parent:
            os._exit(1)  # That has happened before.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return prepare


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # Its reader has ended; the job must end all the same.
        print(f"mpistrat run: {text}", file=sys.stderr, flush=True)
