"""Programs for a GPU run to their end on a stand-in: that of two ranks, and the measurements."""

import pytest

from ..support.jobs import run_job
from ..support.levels import sample


def test_all_collectives_are_right_by_nccl_and_staged() -> None:
    job = run_job(2, ["python", "-m", "tests.gpu.two_ranks", "--stand-in"]).well()
    assert [line for line in job.output.splitlines() if "all collectives" in line] == [
        "auto: all collectives are right on 2 ranks", "staged: all collectives are right on 2 ranks"]


FAILS_FIRST = """
import os, sys
sys.argv.append("--stand-in")
from tests.gpu import tensorflow_checks as program
import mpistrat

def one_rank_fails_where_the_others_wait() -> None:
    if mpistrat.rank() == 0:
        raise ValueError("this rank alone")
    program.a_sum_of_eager_tensors()

os.environ["MPISTRAT_STALL_CHECK_TIME_SECONDS"] = "1"
os.environ["MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS"] = "2"
sys.exit(program.main([one_rank_fails_where_the_others_wait, *program.CHECKS]))
"""


@pytest.mark.nightly
def test_a_check_of_tensorflow_that_fails_on_a_rank_keeps_no_other_from_running() -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    job = run_job(2, ["python", "-c", FAILS_FIRST])
    assert job.code == 1, job.output
    first, *others = [line for line in job.output.splitlines() if line.startswith("== ")]
    assert first.startswith("== one rank fails where the others wait: FAILED on rank 0: ValueError: this rank alone")
    assert len(others) >= 10 and all(": passed (" in line for line in others), job.output


@sample("ranks", [1, 2])
def test_every_figure_is_printed(ranks: int) -> None:
    job = run_job(ranks, ["python", "-m", "tests.gpu.figures", "--stand-in"]).well()
    rows = [line for line in job.output.splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows] == [*["pack"] * 5, *["step"] * 2, "a" if ranks == 1 else "overhead",
                                                "staged"], job.output
    steps = [row for row in rows if row.startswith("| step of")]
    assert not any("record 0" in row or "batched_copy 0" in row for row in steps), "calls were not counted"
    assert all("scratch 0, pinned 0" in row for row in steps)
