"""MPIStrategy in whole jobs: a rank that leaves its loop, that calls alone, and files with fewer ranks."""

from pathlib import Path

import pytest

from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample


@needs_mpirun
def test_a_rank_that_leaves_the_loop_is_named() -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_left_early.py"])
    assert job.code != 0
    assert job.of_rank(0) == ["done"]
    assert "ranks [1] wait for ranks [0], which have already shut down" in job.output, job.output


@needs_mpirun
@sample("what", ["metric", "variable", "checkpoint", "save", "evaluate"])
def test_what_one_rank_calls_alone_is_named_with_its_cause(what: str, tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", what, str(tmp_path)],
                  env={"MPISTRAT_DEADLOCK_S": "0"})  # It would come before the limit.
    for rank in range(2):
        error = job.of_rank(rank)[0]
        assert error.startswith("StallError: "), job.output
        assert "look for one under `if rank == 0`" in error
        assert "strategy/" in error
        assert "Ended after 3 s (CommunicationOptions.timeout_seconds)" in error


@pytest.mark.nightly
@needs_mpirun
def test_sharded_slots_go_on_from_a_file_with_fewer_ranks(tmp_path: Path) -> None:
    for jobs_before, ranks in enumerate((3, 2, 1)):
        job = run_job(ranks, ["python", "tests/scripts/strategy_goes_on.py", str(tmp_path)])
        steps = 4 * (jobs_before + 1)
        for rank in range(ranks):
            assert job.of_rank(rank) == [f"of {ranks}: {name} after {steps} steps, {arrays} arrays, same bits: True"
                                         for name, arrays in (("momentum", 10), ("Adam", 14))], job.output


@pytest.mark.nightly
@needs_mpirun
def test_the_chief_may_save_a_model_alone_at_the_end(tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", "save-at-the-end", str(tmp_path)])
    assert job.of_rank(0) == ["returned True", "ends"], job.output
    assert job.code == 0, job.output
    assert (tmp_path / "model.keras").exists()
