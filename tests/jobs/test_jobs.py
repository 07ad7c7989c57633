"""What a test sees of a job that is stuck, or that leaves something behind."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.jobs import JOB_VARIABLE, run_job, run_limited


def test_a_stuck_job_prints_the_stacks_of_every_rank() -> None:
    script = "import os, time; print('rank', os.environ['OMPI_COMM_WORLD_RANK']); time.sleep(1000)"
    with pytest.raises(pytest.fail.Exception, match="was not done after 6 s") as failure:
        run_job(3, ["python", "-c", script], limit_s=6)
    assert sorted(re.findall(r"rank (\d)", str(failure.value))) == ["0", "1", "2"]
    assert str(failure.value).count("Current thread") == 3


@pytest.fixture
def stray(tmp_path: Path) -> Iterator[str]:
    """Words for a shell that start a process which no one finds by the job's mark, and which keeps the output open."""
    file = tmp_path / "pid"
    yield f"env -u {JOB_VARIABLE} setsid sleep 600 & echo $! > {file}"
    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.nightly
def test_the_limit_holds_even_if_something_keeps_the_output_open(stray: str) -> None:
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="was not done after 2 s; left were sleep") as failure:
        run_limited(["sh", "-c", f"echo begins; {stray}; exec sleep 1000"], limit_s=2)
    assert time.monotonic() - began < 120
    assert "It printed:\nbegins\n" in str(failure.value)


def test_a_job_is_done_when_its_first_process_ends_whatever_keeps_the_output_open(stray: str) -> None:
    job = run_limited(["sh", "-c", f"echo begins; {stray}; exit 3"], limit_s=120)
    assert (job.code, job.output, job.left) == (3, "begins\n", ())
    assert job.seconds < 100


def test_a_script_ends_well_with_strategies_and_iterators_of_tensorflow() -> None:
    job = run_job(2, ["python", "tests/scripts/iterators_at_end.py"])
    assert (job.code, job.output.count("done"), job.left) == (0, 2, ()), job.output
