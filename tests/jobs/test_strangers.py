"""Jobs on a machine that other users use too, and in containers: what ranks open of each other, and what nobody can."""

from collections.abc import Mapping

import pytest

from ..support.jobs import needs_mpirun, run_job
from ..support.strangers import needs_another_user

pytestmark = needs_mpirun


@needs_another_user
@pytest.mark.parametrize("env", [{}, {"MPISTRAT_CPU_OPERATIONS": "mpi"}], ids=["shared memory", "pipes"])
def test_a_job_goes_on_while_another_user_writes_to_what_it_has_open(env: Mapping[str, str]) -> None:
    job = run_job(2, ["python", "tests/scripts/strangers_write.py", "2"], env=env, limit_s=90)
    assert job.code == 0, job.output
    assert job.of_rank(0) == ["attacked 2 processes; written 0 times", "done"], job.output
    assert job.of_rank(1) == ["done"]


REFUSED = "ranks [1]: pipes of their host cannot be opened in /proc (Permission denied), as in other containers"


def test_mpi_serves_ranks_that_cannot_open_each_others_pipes_with_one_warning() -> None:
    job = run_job(3, ["python", "tests/scripts/not_connected.py"])
    assert job.code == 0, job.output
    served = "returned mpi for 3 ranks of a host"
    assert job.of_rank(0) == [f"WARNING: {REFUSED}. MPI is used instead, which is slower.", served], job.output
    assert job.of_rank(1) == job.of_rank(2) == [served], job.output


def test_ranks_that_were_to_share_memory_and_cannot_are_an_error_on_every_rank() -> None:
    job = run_job(3, ["python", "tests/scripts/not_connected.py"], env={"MPISTRAT_CPU_OPERATIONS": "shared_memory"})
    said = [f"MpistratError: MPISTRAT_CPU_OPERATIONS=shared_memory: {REFUSED}"]
    assert [job.of_rank(rank) for rank in range(3)] == [said] * 3, job.output
