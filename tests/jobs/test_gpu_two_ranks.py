"""The program that two ranks run on a GPU, on a stand-in."""

import pytest

from ..support.jobs import needs_mpirun, run_job


@pytest.mark.quick
@needs_mpirun
def test_all_collectives_are_right_by_nccl_and_staged() -> None:
    job = run_job(2, ["python", "-m", "tests.gpu.two_ranks", "--stand-in"])
    assert job.code == 0, job.output
    assert [line for line in job.output.splitlines() if "all collectives" in line] == [
        "auto: all collectives are right on 2 ranks", "staged: all collectives are right on 2 ranks"]
