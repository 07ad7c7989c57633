"""Jobs with sessions of tf.compat.v1: after disable_v2_behavior(), random graphs, ranks that are lost."""

import pytest

from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample

pytestmark = needs_mpirun


@sample("ranks", [2, 1, 3])
def test_a_script_of_tensorflow_1(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/session_v1.py"], limit_s=200)
    assert job.code == 0, job.output
    assert job.output.count("ends\n") == ranks, job.output
    assert job.left == (), job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "options"), [(2, ["0"]), (3, ["1000"]), (2, ["2000", "gpu"])], ids=str)
def test_random_graphs(ranks: int, options: list[str]) -> None:
    """Any number of them is run by hand."""
    job = run_job(ranks, ["python", "tests/scripts/random_sessions.py", "12", *options], limit_s=400)
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: 12 programs are right")
