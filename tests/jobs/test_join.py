"""join() in jobs of its own: the average of Horovod, and a rank that ends."""

import pytest

from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample

SUM_AND_AVERAGES = """
import numpy, mpistrat
mpistrat.init()
if mpistrat.rank() == 1:
    total = mpistrat.allreduce(numpy.full(3, 8.0), op=mpistrat.Sum)
    print(total, mpistrat.allreduce(numpy.full(3, 8.0)), flush=True)
mpistrat.join()
"""


@needs_mpirun
@pytest.mark.horovod("join")
@sample(("average", "expected"), [
    ("active", "[8. 8. 8.] [8. 8. 8.]"), ("all", "[8. 8. 8.] [4. 4. 4.]")])
def test_what_an_average_divides_by_is_a_setting(average: str, expected: str) -> None:
    job = run_job(2, ["python", "-c", SUM_AND_AVERAGES], env={"MPISTRAT_JOIN_AVERAGE": average})
    assert job.code == 0, job.output
    assert expected in job.output


@pytest.mark.nightly
@needs_mpirun
def test_a_rank_that_ends_instead_of_joining_ends_the_job() -> None:
    script = "import sys, mpistrat; mpistrat.init(); mpistrat.join() if mpistrat.rank() == 0 else sys.exit()"
    job = run_job(2, ["python", "-c", script])
    assert job.code != 0
    assert "join(): ranks [0] wait for ranks [1], which have already shut down" in job.output
