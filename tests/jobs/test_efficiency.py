"""`mpistrat run --efficiency`: the script is run on one rank and on all, and is ended after its first steps."""

import sys

import pytest

from ..support.jobs import needs_mpirun, run_limited

pytest.importorskip("tensorflow")
pytestmark = needs_mpirun
LINE = [sys.executable, "-m", "mpistrat", "run", "-np", "2", "--efficiency", "20", "--", sys.executable,
        "tests/scripts/timed_steps.py"]


def test_all_ranks_end_after_the_same_steps_and_their_speed_is_told() -> None:
    job = run_limited(LINE)
    assert (job.code, job.left) == (0, ()), job.output
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        assert f"rank {rank} of {size} ends" in job.output, job.output
    assert "not reached" not in job.output
    assert "\n2 ranks train " in job.output, job.output
    assert " rows per second, and " in job.output, job.output


@pytest.mark.nightly
def test_a_script_that_ends_too_early_is_told() -> None:
    job = run_limited([*LINE, "short"])
    assert job.code == 2, job.output
    assert "the script ended after 3 steps, but --efficiency should time 20 steps." in job.output, job.output
