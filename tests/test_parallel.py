"""Run tests/parallel, the same pytest session on every rank, with 2 and with 3 ranks."""

import pytest

from .jobs import needs_mpirun, run_job


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_passes(ranks: int) -> None:
    job = run_job(ranks, ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parallel"], limit_s=900)
    assert job.code == 0, job.output
    assert " passed" in job.output, job.output
    print(job.output)
