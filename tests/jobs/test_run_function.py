"""mpistrat.run with a real mpirun: results, exceptions, ranks without the directory, and ends of all kinds."""

import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ..support.jobs import (
    ROOT,
    job_environment,
    kill_processes_of,
    processes_of,
    run_limited,
    wait_until,
)

SCRIPT = [sys.executable, "tests/scripts/run_function.py"]


@pytest.mark.horovod("run")
def test_results_come_in_the_order_of_ranks_and_an_exception_comes_home() -> None:
    job = run_limited([*SCRIPT, "result", "fails"])
    assert job.code == 0 and "result: done" in job.output, job.output
    assert re.search(r"\bfails: RunError, cause ZeroDivisionError\('on rank 1'\): rank 1 on \S+ has raised an "
                     r"exception\. Its traceback: Traceback .* in fails .*ZeroDivisionError: on rank 1$", job.output,
                     re.MULTILINE), job.output
    assert "left: []" in job.output
    assert not job.left


NO_RESULT = r"RunError, cause None: the job has ended with exit code \d+, and ranks \[0, 1\] have returned no result\. "
CASES = {
    "files": "done", "leaves": "done",
    "dies": NO_RESULT,
    "exits": r"RunError, cause SystemExit\(0\): rank 1 on ",
    "nests": r"RunError, cause LaunchError\('run\(\) starts a job, but this process is already a",
    "remote": NO_RESULT,
    "nowhere": NO_RESULT,
    "late": r"RunError, cause None: the ranks have not started within 1 s\. ",
}


@pytest.mark.nightly
def test_ends_of_all_kinds() -> None:
    job = run_limited([*SCRIPT, *CASES], limit_s=240).well()
    for case, text in CASES.items():
        assert re.search(f"\\b{case}: {text}", job.output), f"{case}\n{job.output}"
    # What no rank could bring home is in the output.
    assert "ZeroDivisionError: on rank 1" in job.output
    assert "no rank sees the directory" in job.output
    assert "left: []" in job.output
    assert not job.left


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_job_ends_with_the_process_that_called(number: signal.Signals, tmp_path: Path) -> None:
    name, output = uuid.uuid4().hex, tmp_path / "output"
    with output.open("wb") as file:
        caller = subprocess.Popen([*SCRIPT, "sleeps"], cwd=ROOT, env=job_environment(name, {}),
                                  stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: output.read_text().count(": sleeps") == 2, 60)
        caller.send_signal(number)
        assert caller.wait(60) != 0
        wait_until(lambda: not processes_of(name), 60)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in output.read_text()
    finally:
        kill_processes_of(name)
        caller.wait()
