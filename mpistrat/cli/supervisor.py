"""Run mpirun: forward signals and stderr, kill remaining processes, and say why a job has failed.

Normally mpirun ends its ranks and itself. But mpirun was observed to hang after its ranks had ended, when hosts lost
their connection. And mpirun may be killed before it can end its ranks. Therefore `launch` does the following:

- SIGTERM and Ctrl-C go to the ranks (`_handing_on`), which have some time to save. Then mpirun gets SIGTERM, and ends
  the ranks. A terminal sends Ctrl-C to mpirun too, so SIGINT is blocked in mpirun, unless mpirun forwards SIGINT.
- After a rank has aborted the job, or after a signal, mpirun has some time to end. Then mpirun is terminated, and
  killed if it still runs. After a second signal, mpirun is killed at once.
- After a job has failed or received a signal, its remaining processes on this host are killed.
- The whole job may have a time limit, after which mpirun is ended in the same way.
- In MPI_Init, ranks wait without a time limit for a rank that has ended without init(). mpirun ends the job if that
  rank has failed. Otherwise `launch` terminates mpirun. It reports a wait for ranks that still run.
- mpirun waits without a time limit for hosts that do not answer, and ignores signals meanwhile. Therefore `launch`
  kills mpirun if ranks on other hosts have not started in time, or a short time after a signal before the start.
- A thread reads the stderr of mpirun, and writes the filtered output (`stderr`) to the stderr of this process. A slow
  reader of stderr may block this thread. The main thread is not blocked: it queues its own lines for the thread. The
  last lines are a summary.
- mpirun inherits the stdout of this process, unless the caller names a different descriptor. mpirun also inherits the
  stdin of this process if `LaunchCommand.reads_stdin` is true.

Called by `mpistrat run` and `mpistrat doctor`, in their main thread.
"""

import contextlib
import ctypes
import math
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import LaunchError
from ..core.topology import rank_list
from ..core.tuning import STDERR_READ_BYTES, SUPERVISOR_POLL_S
from ..process import procfs
from ..process.launch_env import RUN_NAME, RUN_REPORTS
from ..process.launcher_watch import ABORTED
from ..process.report import SUMMARY, ReportReader
from ..trace import last
from .inventory import LEAST_FILES
from .mpirun import LaunchCommand
from .stderr import JOB, Output, first_code, summarize

# -- time limits ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TimeLimits:
    """Time limits, in seconds."""

    total_s: float = math.inf  # From the start of the job to SIGTERM for mpirun.
    abort_s: float = 15.0  # From the abort of the job by a rank to SIGTERM for mpirun.
    grace_s: float = 0.0  # From SIGTERM or Ctrl-C for the ranks to SIGTERM for mpirun; 0: mpirun alone gets the signal.
    # From the first signal that mpirun gets to SIGKILL for mpirun. Meanwhile mpirun ends its ranks.
    signal_s: float = 30.0
    unstarted_s: float = 2.0  # In place of signal_s, as long as not all ranks have started.
    # A signal within this time after the first signal counts as the same signal, because some senders signal both a
    # process and its process group.
    second_s: float = 0.3
    kill_s: float = 5.0  # From SIGTERM to SIGKILL for mpirun.
    left_s: float = 5.0  # From the end of mpirun to SIGKILL for the remaining processes.


class Termination:
    """Decides when to terminate or kill an mpirun that does not end by itself. Times are arguments, in seconds."""

    def __init__(self, limits: TimeLimits, now: float):
        self._limits = limits
        self._terminate_at, self._kill_at = now + limits.total_s, math.inf
        self._signalled_at: float | None = None
        self.reason = ""  # Why mpirun is terminated or killed, for the user.
        # is_late: Whether the start of all ranks has timed out.
        # is_urgent: Whether a second signal has arrived, so that the remaining processes are killed at once.
        self.is_late = self.is_urgent = False

    def note_abort(self, now: float) -> None:
        if not self.reason:
            self._terminate_at = min(self._terminate_at, now + self._limits.abort_s)
            self.reason = f"a rank ended the job, and mpirun has not ended within {self._limits.abort_s:g} s"

    def note_stop(self, now: float, reason: str) -> None:
        """Record that mpirun must end now, for the given reason."""
        self._terminate_at, self.reason = now, reason

    def note_no_start(self, now: float, timeout_s: float) -> None:
        """Record that not all ranks have started in time."""
        self._kill_at = now
        self.is_late = True
        self.reason = f"mpirun has not started all ranks within {timeout_s:g} s (--start-timeout)"

    def is_first(self, now: float) -> bool:
        """Return whether no signal has arrived before, or the first arrived less than TimeLimits.second_s ago."""
        return self._signalled_at is None or now - self._signalled_at < self._limits.second_s

    def note_signal(self, now: float, has_started: bool, handed_on: str) -> None:
        """Record a signal to end the job. `handed_on`: Its name if ranks got the signal; "" if mpirun itself got it."""
        if self._signalled_at is None and handed_on:
            self._signalled_at = now
            self._terminate_at = min(self._terminate_at, now + self._limits.grace_s)
            self.reason = \
                f"the ranks have not ended within {self._limits.grace_s:g} s after {handed_on} (--grace-period)"
        elif self._signalled_at is None:
            self._signalled_at = now
            limit_s = self._limits.signal_s if has_started else self._limits.unstarted_s
            self._kill_at = min(self._kill_at, now + limit_s)
            self.reason = f"mpirun has not ended within {limit_s:g} s after a signal"
        elif not self.is_first(now):
            self._kill_at = now
            self.reason = "this is the second signal"
            self.is_urgent = True

    def due(self, now: float) -> signal.Signals | None:
        """Return the signal to send to mpirun now, if any."""
        if now >= self._kill_at:
            self._kill_at = math.inf
            return signal.SIGKILL
        if now >= self._terminate_at:
            self.reason = self.reason or f"the job has not ended within {self._limits.total_s:g} s"
            self._terminate_at = math.inf
            self._kill_at = min(self._kill_at, now + self._limits.kill_s)
            return signal.SIGTERM
        return None

    def wait_s(self, now: float) -> float:
        """Return the seconds until `due` may return a signal."""
        return max(0.0, min(self._terminate_at, self._kill_at) - now)


# -- stderr -----------------------------------------------------------------------------------------------------------

_STDERR = 2
# Processes that outlive a job may keep the pipe open. The pipe counts as ended after this time without output, or after
# the number of bytes that a pipe can hold.
_QUIET_S = 0.2
_LAST_BYTES = 2**20


class Forwarder:
    """A thread that forwards the stderr of mpirun to the stderr of this process, through the filter `output`.

    `source`: The pipe from mpirun, which `join` closes. Only the thread calls methods of `output`, until it ends.
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
        """Make the thread end after it has forwarded all output of mpirun. Returns at once.

        `last`: Called by the thread at its end. Returns whole lines to print after the output of mpirun.
        """
        self._last = last
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. Call `end` first. Return whether it has ended; if so, call no more methods."""
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
        """Write whole lines. If the output so far ends within a line, write a newline first."""
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


# -- the launcher -----------------------------------------------------------------------------------------------------

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
# The reason if ranks have not started on hosts that ssh reaches.
_NO_ANSWER = ("mpirun has no answer from the hosts. They must reach this host by TCP (check the firewalls), and have "
              "the same MPI under the same path")
_LOOK_S = 0.5  # interval between checks of the ranks' reports, until all ranks have called init()
# Time after a rank has ended without init(), in which mpirun may end the job itself, with the exit code of that rank.
_WITHOUT_INIT_S = 2.0
_REPORT_S, _AGAIN_S = 60.0, 600.0  # from the first call of init() to the report of a wait, and between two reports
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_FORWARDED = {signal.SIGUSR1, signal.SIGUSR2}  # mpirun forwards these to the ranks


@dataclass(frozen=True)
class Start:
    """The expected start of the ranks. With the default values, ranks do not print that they start (`in_shell`)."""

    ranks: int = 0  # Number of ranks.
    timeout_s: float = math.inf  # Time limit in seconds, from the start of mpirun to the start of all ranks.
    why_not: Callable[[], str] = str  # Called after the timeout. Takes some seconds; returns the reason, or "".
    hosts: int = 1  # Number of hosts of the ranks.


@dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    # The exit code of mpirun, which is that of a rank; or 128 + the number of the signal that ended mpirun or the job.
    code: int
    why: str  # Why mpirun was terminated or killed; "" if mpirun ended by itself.
    has_started: bool = True  # Whether ranks had started on all hosts.
    # The measurements of each rank, as JSON (process/step_timer.py).
    measured: Mapping[int, str] = field(default_factory=dict)


class Interference:
    """Callbacks by which an elastic job (several mpiruns) controls `launch`. This base class is for all other jobs."""

    subject = JOB  # the name of the job in messages
    ends_all = False  # Whether remaining processes are killed even if the exit code of mpirun is 0
    is_done = False  # Whether all ranks have succeeded, so that terminating mpirun is not a failure

    def why_stop(self) -> str:
        """Return why mpirun must end now; "" if it need not. May be called at any time after the start of mpirun."""
        return ""

    def takes(self, number: int) -> bool:
        """Return whether this method has handled signal `number`. If so, mpirun does not get the signal."""
        return False

    def why_vain(self, told: ReportReader, gone: Collection[int] = ()) -> str:
        """Return why the ranks in init() wait forever, or "". Called until all are. `gone`: Ranks without a process."""
        absent, waiting = told.without_init.union(gone) - told.in_init, told.in_init - told.without_init
        if not absent or not waiting:
            return ""
        return (f"ranks {rank_list(sorted(absent))} ended without init(), and ranks {rank_list(sorted(waiting))} "
                "waited for them in init()")

    def keep_last(self, told: Collection[Sequence[str]]) -> str:
        """Write the last operations of the ranks to a file, after a failure. Return a sentence on the file, or ""."""
        return last.save(told)


def launch(command: LaunchCommand, environ: Mapping[str, str], limits: TimeLimits = TimeLimits(),
           output: Output | None = None, start: Start = Start(), speaker: str = "mpistrat run",
           interference: Interference | None = None, stdout: int | None = None, ranks: int = 0,
           why_no_init: Callable[[], str] = str) -> Outcome:
    """Run mpirun until the job has ended. Call this on the main thread, because it changes the handling of signals.

    Args:
        environ: The environment for mpirun, to which the variables of `command` are added.
        speaker: The name of the command, which is printed before each line of mpistrat.
        interference: The callbacks of an elastic job; None: the job is not elastic.
        stdout: A file descriptor for mpirun's stdout; None: the stdout of this process.
        ranks: Number of ranks that print that they call init(); 0: ranks do not print it.
        why_no_init: Called if the job has failed and no rank has called init(). Returns the reason, or "".

    Raises LaunchError: mpirun cannot be started.
    """
    output = output or Output()
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # If SIGCHLD is ignored, the kernel discards exit codes.
    # Signals that are ignored stay ignored: nohup does this, and a shell for background processes.
    caught = {number for number in _ENDING | _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, caught | {signal.SIGCHLD, ABORTED})
    try:
        run = _Run(command, {**environ, **command.environment, RUN_NAME: name}, caught, before, limits,
                   output, start, speaker, interference or Interference(), stdout, ranks, why_no_init)
        outcome = run.wait()
        return replace(outcome, code=run.say_why(outcome.code), measured=output.told.measured)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Run:
    """One mpirun process. `mask`: The signal mask with which mpirun starts.

    The caller must have blocked SIGCHLD, ABORTED (launcher_watch.py) and the signals in `caught`. `wait` receives them.
    """

    def __init__(self, command: LaunchCommand, environ: Mapping[str, str], caught: set[signal.Signals],
                 mask: Collection[int], limits: TimeLimits, output: Output, start: Start, speaker: str,
                 interference: Interference, stdout: int | None, ranks: int, why_no_init: Callable[[], str]):
        self._interference = interference
        self._caught, self._limits, self._name = caught, limits, environ[RUN_NAME]
        self._termination = Termination(limits, time.monotonic())
        self._output, self._start, self._launcher, self._speaker = output, start, command.launcher, speaker
        self._start_until = time.monotonic() + start.timeout_s
        self._ranks, self._are_all_in_init, self._why_no_init = ranks, not ranks, why_no_init
        self._why_vain, self._vain_since = "", math.inf
        self._init_since, self._report_s = math.inf, _REPORT_S  # Since when ranks wait in init(); the next report.
        self._last_signal: int | None = None  # the last signal of those that end programs
        self._is_handed_on = False  # Whether the ranks got the last signal, and not mpirun.
        # Whether mpirun does not see the Ctrl-C of a terminal.
        self._holds_interrupts = self._handing_on(signal.SIGINT) != (signal.SIGINT,)
        self._is_killed = False
        self._can_show_more = environ.get(RUN_REPORTS) == SUMMARY
        guard = parent_guard(os.getpid())
        mask = {*mask, signal.SIGINT} if self._holds_interrupts else mask

        def prepare() -> None:  # The child process calls this before it executes mpirun.
            if not guard():  # mpirun gets SIGTERM if this process is killed.
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        sys.stdout.flush()
        sys.stderr.flush()
        source, sink = os.pipe()
        try:
            self._mpirun = subprocess.Popen(command.argv, env=dict(environ), stdout=stdout, stderr=sink,
                                            stdin=None if command.reads_stdin else subprocess.DEVNULL,
                                            preexec_fn=prepare)
        except OSError as error:
            os.close(source)
            raise LaunchError(f"{command.argv[0]} cannot be started: {error.strerror}. Try --mpirun PATH.") from None
        finally:
            os.close(sink)
        self._forwarder = Forwarder(source, self._output)

    def wait(self) -> Outcome:
        """Wait until the job has ended, and enforce the time limits."""
        if why := self._interference.why_stop():  # The signal came before it was blocked.
            self._termination.note_stop(time.monotonic(), why)
        while self._mpirun.poll() is None:
            now = time.monotonic()
            if now >= self._start_until:
                self._start_until = math.inf
                if not self._has_started:
                    self._termination.note_no_start(now, self._start.timeout_s)
            self._look_at_ranks(now)
            look_s = math.inf if self._are_all_in_init else _LOOK_S
            self._next_signal(min(self._termination.wait_s(now), self._start_until - now, look_s))
            if (due := self._termination.due(time.monotonic())) is not None:
                self._is_killed = True
                self._mpirun.send_signal(due)
                if not self._is_recalled and not self._interference.is_done and not self._why_vain:
                    self._say(f"{self._termination.reason}; mpirun gets {due.name}")
        code = self._mpirun.returncode
        if code != 0 or self._last_signal is not None or self._interference.ends_all:
            self._kill_remaining()
        if self._is_killed and self._interference.is_done:
            return Outcome(0, self._termination.reason)
        is_ended = self._is_killed or self._is_recalled
        why = self._termination.reason if is_ended else ""
        # If mpirun got the signal, its code says nothing about the job. If the ranks got it, MPICH returns its number.
        if (last := self._last_signal) is not None and (is_ended or not self._is_handed_on or code == last):
            return Outcome(128 + last, why, self._are_hosts_reached)
        return Outcome(1 if is_ended else code if code >= 0 else 128 - code, why, self._are_hosts_reached)

    def _look_at_ranks(self, now: float) -> None:
        """Report that ranks wait in init(). End a job whose ranks wait there in vain, or whose mpirun outlives them."""
        if self._are_all_in_init:
            return
        told, limit_s = self._output.told, _WITHOUT_INIT_S
        ended = sorted(told.without_init)
        # A rank has returned from init(). Of ranks whose stderr goes elsewhere nothing is known.
        self._are_all_in_init = len(told.in_init) >= self._ranks or bool(told.handing_on)
        self._init_since = min(self._init_since, now if told.in_init else math.inf)
        waited_s = -math.inf if self._are_all_in_init else now - self._init_since
        why = self._interference.why_vain(told, self._gone() if waited_s >= _WITHOUT_INIT_S else ())
        if waited_s >= self._report_s:
            self._report_s = waited_s + _AGAIN_S
            missing = rank_list([rank for rank in range(self._ranks) if rank not in told.in_init])
            self._say(f"ranks {rank_list(sorted(told.in_init))} wait in init() for ranks {missing}, which have not "
                      f"called it for {waited_s:.0f} s")
        # mpirun 5.0 may deadlock when it ends ranks because a rank has ended with an error before MPI_Init.
        if not why and ended and (told.reports or len(ended) < self._ranks) and self._start.hosts == 1 \
                and {process.pid for process in self._remaining()} <= {self._mpirun.pid}:
            why, limit_s = f"ranks {rank_list(ended)} ended without init(), and mpirun has not ended", 5 * limit_s
        self._vain_since = min(self._vain_since, now) if why else math.inf
        if now - self._vain_since >= limit_s and not self._termination.reason:
            self._why_vain = why
            self._termination.note_stop(now, why)

    @property
    def _has_started(self) -> bool:
        return len(self._output.told.started) >= self._start.ranks

    @property
    def _are_hosts_reached(self) -> bool:
        """Whether a rank has started on each host. Other ranks may be missing, because a rank may abort early."""
        hosts = {host for host, _ in self._output.told.started.values()}
        return self._has_started or len(hosts) >= self._start.hosts

    def _handing_on(self, number: int) -> tuple[signal.Signals, ...]:
        """Return signals that make mpirun send signal `number` to ranks; () if none does or TimeLimits.grace_s is 0."""
        return () if self._launcher is None or not self._limits.grace_s else self._launcher.handed_on.get(number, ())

    @property
    def _is_recalled(self) -> bool:
        """Whether a signal has ended the job before all ranks had started.

        Then mpirun may end by itself or be killed, so its exit code says nothing about the job, which is 128 + the
        number of the signal, and no line about mpirun is printed.
        """
        return self._last_signal is not None and not self._has_started and not self._termination.is_urgent

    def say_why(self, code: int) -> int:
        """Forward the last output, print the summary, and return the exit code. Ends early after a second signal."""
        self._code = code
        self._forwarder.end(self._summary)
        # A blocked reader of stderr may block the thread.
        while not self._forwarder.join(SUPERVISOR_POLL_S) and not self._termination.is_urgent:
            self._next_signal(0.0)
        return self._code

    def _summary(self) -> bytes:
        def has_failed() -> bool:  # The main thread may receive a signal meanwhile.
            return self._code != 0 and self._last_signal is None

        why, told, words = "", self._output.told, self._output.words
        died_of = -self._mpirun.returncode if self._mpirun.returncode < 0 and not self._is_killed else None
        if has_failed() and not self._has_started:
            why = self._start.why_not() or (_NO_ANSWER if self._termination.is_late else "")
        why = why or self._why_vain
        if has_failed() and died_of != signal.SIGKILL and not self._interference.why_stop():
            why = why or self._interference.why_vain(told)
            if died_of is not None and not why and 0 < len(told.without_init) < self._ranks:
                why = f"ranks {rank_list(sorted(told.without_init))} ended without init(), and mpirun crashed"
            # If mpirun crashes or is terminated, and sometimes if not, it does not return the exit code of the rank.
            if self._code == 1 or died_of is not None:
                self._code = first_code(told.reports, words) or (1 if why else self._code)
        if has_failed() and not why and not told.in_init:
            why = self._why_no_init()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if has_failed() and not why and not words and limit < LEAST_FILES:
            why = f"a process may open only {limit} files here, too few for mpirun. Type: ulimit -n 65536"
        text, lines = summarize(self._code, told.reports, words, interrupted_by=self._last_signal, died_of=died_of,
                                launcher=self._launcher, can_show_more=self._can_show_more, why_not_started=why,
                                without_init=len(told.without_init), subject=self._interference.subject)
        if has_failed() and not self._interference.why_stop():
            lines = [*lines[:-1], *filter(None, [self._interference.keep_last(told.last.values())]), *lines[-1:]]
        # A terminal has printed ^C without a newline.
        start = b"\n" if self._last_signal == signal.SIGINT and os.isatty(sys.stderr.fileno()) else b""
        said = "".join(f"{self._speaker}: {line}\n" for line in lines)
        return start + text + said.encode(errors="backslashreplace")

    def _next_signal(self, timeout_s: float) -> None:
        info = signal.sigtimedwait(self._caught | {signal.SIGCHLD, ABORTED}, min(timeout_s, 3600.0))
        if info is None or info.si_signo == signal.SIGCHLD:
            return
        if info.si_signo == ABORTED:
            if why := self._interference.why_stop():
                self._termination.note_stop(time.monotonic(), why)
            else:
                self._termination.note_abort(time.monotonic())
            return
        if self._interference.takes(info.si_signo):
            return
        now, number = time.monotonic(), signal.Signals(info.si_signo)
        ways, is_first = self._handing_on(number), self._termination.is_first(now)
        # mpirun forwards the signal itself, or ranks have printed that they know which signals replace it.
        if not is_first or not (ways == (number,) or self._output.told.handing_on):
            ways = ()
        is_repeated = bool(ways) and self._last_signal is not None
        # A terminal sends a signal (si_code > 0) to all processes in the foreground, so mpirun has received it already.
        is_there = info.si_code > 0 and not (number == signal.SIGINT and self._holds_interrupts)
        for each in ways or ((signal.SIGTERM,) if number == signal.SIGINT and self._holds_interrupts else (number,)):
            if not is_repeated and not is_there:
                self._mpirun.send_signal(each)
        if number in _ENDING:
            name = "Ctrl-C" if number == signal.SIGINT else number.name
            self._termination.note_signal(now, self._has_started, name if ways else "")
            self._last_signal, self._is_handed_on = number, bool(ways)

    def _kill_remaining(self) -> None:
        """Wait up to TimeLimits.left_s for remaining processes of the job on this host to end. Then kill them."""
        until = time.monotonic() + self._limits.left_s
        while left := self._remaining():
            if self._termination.is_urgent or not self._has_started or time.monotonic() >= until:
                if not self._is_recalled:
                    numbers = ", ".join(str(each.pid) for each in left)
                    self._say(f"killing the remaining processes of the job: {numbers}")
                for process in left:
                    with contextlib.suppress(OSError):  # The process has just ended.
                        os.kill(process.pid, signal.SIGKILL)
                return
            self._next_signal(SUPERVISOR_POLL_S)

    def _remaining(self) -> list[procfs.Process]:
        """Return the running processes on this host that the job has started."""
        def belongs(process: procfs.Process) -> bool:
            environ = procfs.environment_of(process.pid)
            return environ is not None and environ.get(RUN_NAME) == self._name
        return [process for process in procfs.running() if belongs(process)]

    def _gone(self) -> set[int]:
        """Return the ranks that have no process, not even one of a wrapper, if all ranks are on this host; else {}."""
        if self._launcher is None:
            return set()
        environs, processes = [], procfs.running()
        below = procfs.descendants(self._mpirun.pid, processes)
        for process in processes:
            environ = procfs.environment_of(process.pid) or {}
            if environ.get(RUN_NAME) == self._name:
                environs.append(environ)
            elif process in below:
                return set()  # Perhaps a rank that hides its environment, as setproctitle and sudo do.
        if str(self._ranks) not in {environ.get(self._launcher.local[1]) for environ in environs}:
            return set()
        return set(range(self._ranks)) - {int(environ.get(self._launcher.rank, -1)) for environ in environs}

    def _say(self, text: str) -> None:
        self._forwarder.say(f"{self._speaker}: {text}")


def parent_guard(parent: int) -> Callable[[], bool]:
    """Return a function that makes Linux send SIGTERM to the calling process when the process `parent` ends.

    The function returns False if the parent has already ended, because no signal will come then. The C library is
    loaded here, so that the function may be called between fork and exec.
    """
    set_option = ctypes.CDLL(None).prctl

    def guard() -> bool:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)
        return os.getppid() == parent

    return guard
