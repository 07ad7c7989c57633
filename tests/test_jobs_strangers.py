"""Jobs on a machine that other users use too: these can neither end them nor get anything into them."""

from collections.abc import Mapping

import pytest

from .jobs import needs_mpirun, run_job
from .strangers import needs_another_user

pytestmark = [needs_mpirun, needs_another_user]


@pytest.mark.parametrize("env", [{}, {"MPISTRAT_CPU_OPERATIONS": "mpi"}], ids=["shared memory", "sockets"])
def test_a_job_goes_on_while_another_user_writes_to_its_sockets(env: Mapping[str, str]) -> None:
    job = run_job(2, ["python", "tests/scripts/strangers_write.py", "2"], env=env, limit_s=90)
    assert job.code == 0, job.output
    assert job.of_rank(0) == ["attacked 0 names; taken: nothing", "done"], job.output
    assert job.of_rank(1) == ["done"]
