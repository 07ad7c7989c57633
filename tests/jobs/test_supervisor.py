"""What `mpistrat run` does when mpirun, or a part of the job, does not end, and what it makes of mpirun's stderr.

stubborn_mpirun.py is in mpirun's place.
"""

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import psutil
import pytest

from ..support.jobs import ROOT, job_environment, kill_processes_of, living_after, processes_of, wait_until
from ..support.levels import sample

SOON_S = 60  # for what takes a second on a machine that is not busy
LONG = {"abort_s": 1e4, "signal_s": 1e4, "second_s": 0.3, "kill_s": 1e4, "left_s": 1e4}
MPIRUN = "tests/scripts/stubborn_mpirun.py"
ABORT = "import os, mpistrat.process.launcher_watch as watch; watch.notify_abort(os.environ); "
KILLED = 256 - signal.SIGKILL  # as stubborn_mpirun.py reports a rank that was killed
SLEEP = ("sh", "-c", "echo the rank begins; exec sleep 600")

SUPERVISE = """
import os, sys
from mpistrat.cli.mpirun import LaunchCommand
from mpistrat.cli.supervisor import Start, TimeLimits, launch
from mpistrat.process.launchers import OPEN_MPI
limits = eval(sys.argv[1])
start = Start(limits.pop("ranks"), 1e4) if "ranks" in limits else Start()
command = LaunchCommand(tuple(sys.argv[2:]), launcher=OPEN_MPI)
sys.exit(launch(command, os.environ, TimeLimits(**limits), start=start).code)
"""


class Run:
    """A supervised mpirun, from its start on."""

    def __init__(self, words: Sequence[str], prefix: Sequence[str], limits: Mapping[str, float], output: IO[bytes],
                 stderr: int = subprocess.STDOUT):
        self.job = uuid.uuid4().hex
        self._output = output
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SUPERVISE, str({**LONG, **limits}), *words], cwd=ROOT,
            env=job_environment(self.job, {}), stdin=subprocess.DEVNULL, stdout=self._output, stderr=stderr)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        kill_processes_of(self.job)

    @property
    def output(self) -> str:
        return os.pread(self._output.fileno(), 2**20, 0).decode()

    def await_text(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None, SOON_S)
        assert text in self.output

    def code(self) -> int:
        """The exit code, soon; nothing of the job is left then."""
        code = self.process.wait(SOON_S)
        assert living_after(self.job, SOON_S) == (), self.output
        return code

    def named(self, text: str) -> psutil.Process:
        """The process of the job with this in its command line, this or that way."""
        def found() -> list[psutil.Process]:
            return [each for each in processes_of(self.job) if text in (each.info["cmdline"] or ())[:2]]

        wait_until(found, SOON_S)  # A shell that has forked may not have started the program yet.
        process, = found()
        return process


@contextlib.contextmanager
def supervised(*words: str, prefix: Sequence[str] = (), **limits: float) -> Iterator[Run]:
    """mpirun with these words, under supervision. Limits that are not given are practically infinite.

    With `ranks` it waits for so many ranks to say that they start.
    """
    with tempfile.TemporaryFile() as output:
        run = Run([sys.executable, MPIRUN, *words], prefix, limits, output)
        try:
            yield run
        finally:
            run.end()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_mpirun(code: int) -> None:
    with supervised("ends", "sh", "-c", f"exit {code}", left_s=0.1) as run:
        assert run.code() == code
        last = f"mpistrat run: the job has ended with exit code {code}\n" if code else ""
        assert run.output == f"the rank has ended\n{last}"


@sample("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_goes_to_mpirun_and_the_second_kills(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by the job")
    with supervised("ends", *SLEEP, second_s=0.0) as run:
        run.await_text("the rank begins")
        run.process.send_signal(number)
        # The Ctrl-C of a terminal, which would come to mpirun too, is nothing to it.
        run.await_text(f"got {'SIGTERM' if number == signal.SIGINT else number.name}\n")
        assert run.process.poll() is None
        run.process.send_signal(number)
        assert run.code() == 128 + number
        assert "mpistrat run: this is the second signal; mpirun gets SIGKILL\n" in run.output
        assert "mpistrat run: killing the remaining processes of the job: " in run.output


@pytest.mark.parametrize(("number", "name", "got"), [
    (signal.SIGTERM, "SIGTERM", ["SIGURG"]), (signal.SIGINT, "Ctrl-C", ["SIGCONT", "SIGURG"])])
def test_ranks_that_hand_a_signal_on_have_some_time_before_mpirun_gets_sigterm(number: signal.Signals, name: str,
                                                                              got: list[str]) -> None:
    tells = ("sh", "-c", "echo '[mpistrat] rank 1 hands SIGTERM on' >&2; sleep 0.5; echo the rank begins; "
             "exec sleep 600")
    with supervised("stays", *tells, grace_s=1.0, kill_s=0.5, left_s=0.1) as run:
        run.await_text("the rank begins")
        run.process.send_signal(number)
        run.process.send_signal(number)  # As from a sender that signals a process and its group.
        assert run.code() == 128 + number
        ends = f"mpistrat run: the ranks have not ended within 1 s after {name} (--grace-period); mpirun gets SIGTERM\n"
        assert ends in run.output
        assert [line.removeprefix("got ") for line in run.output.splitlines() if line.startswith("got ")] == [
            *got, "SIGTERM"]
        assert "mpirun gets SIGKILL" in run.output


@pytest.mark.nightly
def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    with supervised("ends", *SLEEP, second_s=1e4, left_s=0.1) as run:
        run.await_text("the rank begins")
        run.process.send_signal(signal.SIGTERM)
        run.await_text("got SIGTERM\n")
        run.process.send_signal(signal.SIGTERM)
        run.named("sleep").kill()
        assert run.code() == 128 + signal.SIGTERM
        assert "mpirun gets" not in run.output


def test_mpirun_that_does_not_end_after_a_signal_is_killed() -> None:
    with supervised("ends", *SLEEP, signal_s=0.5, left_s=0.1) as run:
        run.await_text("the rank begins")
        run.process.send_signal(signal.SIGINT)
        assert run.code() == 130
        assert "got SIGTERM\n" in run.output
        assert "mpirun has not ended within 0.5 s after a signal; mpirun gets SIGKILL\n" in run.output


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["ends", "stays"])
def test_a_signal_before_all_ranks_have_started_is_the_exit_code_however_mpirun_ends(way: str) -> None:
    with supervised(way, *SLEEP, ranks=2, unstarted_s=2.0) as run:
        run.await_text("the rank begins")
        run.process.send_signal(signal.SIGTERM)
        run.await_text("got SIGTERM\n")
        if way == "ends":
            run.named("sleep").kill()
        assert run.code() == 128 + signal.SIGTERM
        assert "mpistrat run: the job has ended with exit code 143: it was ended by signal 15 (SIGTERM)\n" in run.output
        assert "mpirun has not ended" not in run.output
        assert "is killed" not in run.output


@pytest.mark.nightly
def test_other_signals_go_to_mpirun_and_end_nothing() -> None:
    with supervised("ends", *SLEEP, left_s=0.1) as run:
        run.await_text("the rank begins")
        run.process.send_signal(signal.SIGUSR1)
        run.await_text("got SIGUSR1\n")
        assert run.process.poll() is None
        run.named("sleep").kill()
        assert run.code() == KILLED


@pytest.mark.nightly
def test_mpirun_that_does_not_end_when_a_rank_has_ended_the_job_is_ended() -> None:
    with supervised("stays", sys.executable, "-c", ABORT, abort_s=0.5, kill_s=0.5, left_s=0.1) as run:
        assert run.code() == 1
        assert run.output.index("mpirun gets SIGTERM\n") < run.output.index("mpirun gets SIGKILL\n")
        assert "a rank ended the job, and mpirun has not ended within 0.5 s" in run.output


@pytest.mark.nightly
def test_a_job_that_takes_too_long_is_ended() -> None:
    with supervised("stays", *SLEEP, total_s=2.0, kill_s=0.5, left_s=0.1) as run:
        assert run.code() == 1
        assert "the job has not ended within 2 s; mpirun gets SIGTERM\n" in run.output
        assert "the job has not ended within 2 s; mpirun gets SIGKILL\n" in run.output


@pytest.mark.nightly
def test_mpirun_that_ends_after_a_rank_has_ended_the_job_has_the_exit_code() -> None:
    with supervised("ends", sys.executable, "-c", f"{ABORT} raise SystemExit(7)") as run:
        assert run.code() == 7
        assert "mpirun gets" not in run.output


@pytest.mark.nightly
def test_a_job_that_a_rank_starts_may_abort_without_ending_the_job_around_it() -> None:
    inner = [sys.executable, MPIRUN, "ends", sys.executable, "-c", f"{ABORT} raise SystemExit(7)"]
    outer = f"import subprocess, time; code = subprocess.run({inner!r}).returncode; time.sleep(2); exit(code)"
    with supervised("ends", sys.executable, "-c", outer, abort_s=0.5, kill_s=0.5, left_s=0.1) as run:
        assert run.code() == 7
        assert "mpirun gets" not in run.output


def test_what_is_left_of_a_job_whose_mpirun_was_killed_is_killed() -> None:
    with supervised("ends", *SLEEP, left_s=0.5) as run:
        run.await_text("the rank begins")
        run.named(MPIRUN).kill()
        assert run.code() == 128 + signal.SIGKILL
        assert "mpistrat run: killing the remaining processes of the job: " in run.output


@pytest.mark.nightly
def test_what_a_job_leaves_that_has_succeeded_is_left_alone() -> None:
    with supervised("ends", "sh", "-c", "setsid sleep 600 &", left_s=0.0) as run:
        assert run.process.wait(SOON_S) == 0
        assert run.named("sleep").is_running()
        assert run.output == "the rank has ended\n"


@pytest.mark.nightly
def test_mpirun_is_told_to_end_when_its_supervisor_was_killed() -> None:
    with supervised("ends", *SLEEP) as run:
        run.await_text("the rank begins")
        run.process.kill()
        run.await_text("got SIGTERM\n")
        run.named("sleep").kill()
        assert living_after(run.job, SOON_S) == ()


@pytest.mark.nightly
def test_a_signal_that_is_ignored_from_the_start_stays_so() -> None:
    with supervised("ends", *SLEEP, prefix=["nohup"], left_s=0.1) as run:
        run.await_text("the rank begins")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGUSR1)
        run.await_text("got SIGUSR1\n")
        run.named("sleep").kill()
        run.code()
        assert "SIGHUP" not in run.output


# -- mpirun's stderr --------------------------------------------------------------------------------------------------

MEGABYTE = "import os, random; data = random.Random(1).randbytes(2**20); "
WRITES = MEGABYTE + "[os.write(2, data[i:i + 5000]) for i in range(0, len(data), 5000)]"


def test_stderr_passes_at_once_and_unchanged() -> None:
    with supervised("ends", "sh", "-c", "printf 'no end' >&2; exec sleep 600", left_s=0.1) as run:
        run.await_text("no end")
        run.named("sleep").kill()
        assert run.code() == KILLED
        said = run.output.replace("the rank has ended\n", "")
        assert said.startswith("no end\nmpistrat run: the job has ended with exit code ")
    done = subprocess.run([sys.executable, "-c", SUPERVISE, str(LONG), sys.executable, MPIRUN, "ends", sys.executable,
                           "-c", WRITES], cwd=ROOT, env=job_environment("", {}), capture_output=True, timeout=SOON_S)
    assert (done.returncode, done.stdout) == (0, b"the rank has ended\n")
    assert done.stderr == random.Random(1).randbytes(2**20)


@pytest.mark.nightly
def test_a_reader_of_stderr_that_does_not_read_holds_up_mpirun_but_no_signal() -> None:
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output:
        run = Run([sys.executable, MPIRUN, "ends", sys.executable, "-c", f"{WRITES}; print('written')"], (),
                  {"second_s": 0.0}, output, stderr=write)
        os.close(write)
        try:
            wait_until(lambda: select.select([read], [], [], 0)[0], SOON_S)
            time.sleep(0.5)  # The pipes fill.
            assert "written" not in run.output
            run.process.send_signal(signal.SIGTERM)
            run.await_text("got SIGTERM\n")
            run.process.send_signal(signal.SIGTERM)
            assert run.code() == 128 + signal.SIGTERM
        finally:
            os.close(read)
            run.end()


@pytest.mark.nightly
def test_without_a_reader_of_stderr_the_job_goes_on() -> None:
    read, write = os.pipe()
    os.close(read)
    with tempfile.TemporaryFile() as output:
        run = Run([sys.executable, MPIRUN, "ends", sys.executable, "-c", f"{WRITES}; print('written')"], (), {}, output,
                  stderr=write)
        os.close(write)
        try:
            assert run.code() == 0
            assert "written" in run.output
        finally:
            run.end()


def test_a_crash_of_mpirun_is_explained() -> None:
    with tempfile.TemporaryFile() as output:
        run = Run(["sh", "-c", "kill -SEGV $$"], (), {"left_s": 0.1}, output)
        assert run.code() == 128 + signal.SIGSEGV
        assert run.output.startswith("mpistrat run: the job has ended with exit code 139: mpirun itself crashed, "
                                     "signal 11 (SIGSEGV).")
        assert run.output.count("\n") == 1
