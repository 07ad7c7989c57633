"""Jobs with sessions of tf.compat.v1: after disable_v2_behavior()."""


from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample

pytestmark = needs_mpirun


@sample("ranks", [2, 1, 3])
def test_a_script_of_tensorflow_1(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/session_v1.py"], limit_s=200)
    assert job.code == 0, job.output
    assert job.output.count("ends\n") == ranks, job.output
    assert job.left == (), job.output
