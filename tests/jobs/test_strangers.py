"""Jobs on a machine that other users use too: these can neither end them nor get anything into them."""

import re
from collections.abc import Mapping

import pytest

from ..support.jobs import run_job
from ..support.levels import sample
from ..support.strangers import needs_another_user


@needs_another_user
@sample("env", [{}, {"MPISTRAT_CPU_OPERATIONS": "mpi"}], ids=["shared memory", "sockets"])
def test_a_job_goes_on_while_another_user_writes_to_its_sockets(env: Mapping[str, str]) -> None:
    job = run_job(2, ["python", "tests/scripts/strangers_write.py", "2"], env=env, limit_s=90).well()
    assert job.of_rank(0) == ["attacked 0 names; taken: nothing", "done"], job.output
    assert job.of_rank(1) == ["done"]


@pytest.mark.nightly
def test_ranks_that_cannot_be_connected_are_an_error_on_every_rank() -> None:
    job = run_job(3, ["python", "tests/scripts/not_connected.py"], limit_s=60)
    said = job.of_rank(0)
    assert len(said) == 1, job.output
    assert job.of_rank(1) == job.of_rank(2) == said, job.output
    assert re.fullmatch(r"MpistratError: Ranks of one host cannot connect to each other\. rank 0 on \S+: ranks \[1\] "
                        r"have not connected to rank 0 on the same host in 1 s\. Do the ranks run in containers "
                        r"with separate networks\?; rank 1 on \S+: process 7 of user 8 answers in the place of rank 0",
                        said[0]), said
