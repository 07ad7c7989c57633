"""What a test sees of a job that is stuck."""

import re

import pytest

from .jobs import needs_mpirun, run_job


@needs_mpirun
def test_a_stuck_job_prints_the_stacks_of_every_rank() -> None:
    script = "import os, time; print('rank', os.environ['OMPI_COMM_WORLD_RANK']); time.sleep(1000)"
    with pytest.raises(pytest.fail.Exception, match="was not done after 15 s") as failure:
        run_job(3, ["python", "-c", script], limit_s=15)
    assert sorted(re.findall(r"rank (\d)", str(failure.value))) == ["0", "1", "2"]
    assert str(failure.value).count("Current thread") == 3
