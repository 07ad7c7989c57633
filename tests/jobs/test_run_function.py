"""mpistrat.run with a real mpirun: results, exceptions, ranks without the directory, and ends of all kinds."""

import re
import signal
import sys

import pytest

from ..support.jobs import processes_of, run_limited, running, wait_until

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
def test_the_job_ends_with_the_process_that_called(number: signal.Signals) -> None:
    with running([*SCRIPT, "sleeps"]) as (caller, job, printed):
        wait_until(lambda: printed().count(": sleeps") == 2, 60)
        caller.send_signal(number)
        assert caller.wait(60) != 0
        wait_until(lambda: not processes_of(job), 60)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in printed()
