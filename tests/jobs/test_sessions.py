"""Jobs with sessions of tf.compat.v1: after disable_v2_behavior()."""

import pytest

from ..support.jobs import needs_mpirun, run_job

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.quick), 1, 3])
def test_a_script_of_tensorflow_1(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/session_v1.py"], limit_s=200)
    assert job.code == 0, job.output
    assert job.output.count("ends\n") == ranks, job.output
    assert job.left == (), job.output
