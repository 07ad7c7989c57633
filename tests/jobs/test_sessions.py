"""Jobs with sessions of tf.compat.v1: after disable_v2_behavior(), random graphs, ranks that are lost."""

import pytest

from ..support.jobs import needs_mpirun, run_job

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.quick), 1, 3])
def test_a_script_of_tensorflow_1(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/session_v1.py"], limit_s=200)
    assert job.code == 0, job.output
    assert job.output.count("ends\n") == ranks, job.output
    assert job.left == (), job.output


@pytest.mark.parametrize(("ranks", "first"), [(2, 0), (3, 1000)])
def test_random_graphs(ranks: int, first: int) -> None:
    """More of them are run by hand: 200 from 0 and from 1000 on were right."""
    job = run_job(ranks, ["python", "tests/scripts/random_sessions.py", "12", str(first)], limit_s=400)
    assert job.code == 0, job.output
    for rank in range(ranks):
        assert f"rank {rank}: 12 programs are right" in job.output, job.output
