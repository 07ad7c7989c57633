"""Run a function on the ranks of a new job and collect the results, for mpistrat.run (mpistrat/horovod).

The function and its arguments are pickled into a temporary directory. The ranks of the job run function_rank.py. Ranks
that see the directory write their results there. All other ranks send their results to one of these ranks.

A child process executes `mpistrat run`, because `mpistrat run` changes the handling of signals. This affects all
threads of a process, and is possible on its main thread only.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.array_ops import dumps
from ..core.errors import LaunchError, RunError
from ..core.forked import RANK_PROCESS
from ..core.install import pip
from ..core.tuning import RUN_START_POLL_S
from ..process.launch_env import launched_size
from ..process.launchers import SRUN
from .main import main
from .run import parse, plan
from .supervisor import parent_guard

CALL, STARTED, RANK_FILE = "call", "started", "rank.{}"  # files in the directory; RANK_FILE has a RankResult
_RANK_MODULE = "mpistrat.cli.function_rank"
_END_S = 60.0  # The launcher kills mpirun and its remaining processes within about 40 s.
Call = tuple[Any, Sequence[Any], dict[str, Any]]  # a function, its arguments and its keyword arguments


@dataclass(frozen=True)
class RankResult:
    """The result or the error of one rank."""

    result: bytes | None = None  # The pickled result; None after an error.
    error: str = ""  # The traceback of the exception, as text; "" without an exception.
    exception: bytes | None = None  # The pickled exception; None if it cannot be pickled.
    is_consequence: bool = False  # Whether the failure of another rank probably caused the exception.
    host: str = ""  # The host of the rank.


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the whole file, or no file."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def run_function(call: Call, options: Sequence[str], executable: str, start_timeout_s: float,
                 is_printed: bool) -> list[Any]:
    """Call a function on all ranks of a new job. Return the results in rank order. For the errors see mpistrat.run.

    `executable`: The Python interpreter of the ranks. `is_printed`: Whether to print the command of mpirun.
    """
    environ = {name: value for name, value in os.environ.items() if name != RANK_PROCESS}
    size, launcher = launched_size(environ)
    # A step of srun with one task, as for a notebook server, is not a job of ranks.
    if size != 1 or launcher not in ("", SRUN.title):
        raise LaunchError("run() starts a job, but this process is already a rank of a job. Call run() in a script "
                          "that is started without mpirun.")
    with tempfile.TemporaryDirectory(prefix="mpistrat-run-") as name:
        directory = Path(name)
        # Whole tracebacks: the traceback of a rank that does not see the directory is in the output alone.
        argv = [*options, "--traceback", f"--start-timeout={start_timeout_s:g}", "--", executable, "-m", _RANK_MODULE,
                name]
        planned = plan(*parse(argv), environ)  # Wrong arguments raise in this process.
        if is_printed:
            print(planned.composed(environ), file=sys.stderr, flush=True)
        try:
            # The ranks get this process' sys.path, because the function may be in a module next to the script.
            pickled = pickle.dumps((list(sys.path), dumps(call)))
        except Exception as error:
            raise LaunchError(f"run() cannot send {call[0]!r} and its arguments to the ranks: {error}. "
                              f"{pip('cloudpickle')}, or pass a function that is defined in a module, and arguments "
                              "that can be pickled.") from error
        write(directory / CALL, pickled)
        code = _launched(argv, environ, directory / STARTED, start_timeout_s)
        return _results(directory, planned.job.ranks, code)


def _launched(argv: Sequence[str], environ: dict[str, str], started: Path, start_timeout_s: float) -> int:
    """Run `mpistrat run` in a child process, wait until the child has ended, and return its exit code.

    Raises RunError: After `start_timeout_s`, no rank has written the file `started`.
    """
    process = subprocess.Popen([sys.executable, "-m", __name__, str(os.getpid()), *argv], env=environ,
                               stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + start_timeout_s
        while not started.exists():
            if process.poll() is not None:
                return process.returncode
            if time.monotonic() >= until:
                raise RunError(f"the ranks have not started within {start_timeout_s:g} s. Check that ssh reaches "
                               "all hosts and that all hosts reach each other, or raise start_timeout (seconds).")
            time.sleep(RUN_START_POLL_S)
        return process.wait()
    finally:
        if process.poll() is None:  # after KeyboardInterrupt, or the timeout
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _results(directory: Path, ranks: int, code: int) -> list[Any]:
    """Return the results of all ranks, in rank order. Raises RunError: A rank or the job has failed."""
    outcomes: dict[int, RankResult] = {rank: pickle.loads(path.read_bytes()) for rank in range(ranks)
                                       if (path := directory / RANK_FILE.format(rank)).exists()}
    failed = sorted((outcome.is_consequence, rank) for rank, outcome in outcomes.items() if outcome.error)
    if failed:
        _, rank = failed[0]
        outcome, cause = outcomes[rank], None
        with contextlib.suppress(Exception):  # The exception cannot be unpickled here.
            cause = pickle.loads(outcome.exception) if outcome.exception is not None else None
        raise RunError(f"rank {rank} on {outcome.host} has raised an exception. Its traceback:\n\n"
                       f"{outcome.error}") from cause if isinstance(cause, BaseException) else None
    missing = [rank for rank in range(ranks) if rank not in outcomes]
    if code or missing:
        lack = f"ranks {missing} have returned no result" if missing else "all ranks have returned a result"
        raise RunError(f"the job has ended with exit code {code}, and {lack}. The output of the job has the reason.")
    results = []
    for rank, outcome in outcomes.items():
        assert outcome.result is not None
        try:
            results.append(pickle.loads(outcome.result))
        except Exception as error:
            raise RunError(f"the result of rank {rank} cannot be read here: {error}. Return plain values, or numpy "
                           "arrays.") from error
    return results


if __name__ == "__main__":
    # The job ends when the parent of this process ends.
    sys.exit(main(["run", *sys.argv[2:]]) if parent_guard(int(sys.argv[1]))() else 1)
