"""MPIStrategy in whole programs: its examples on any number of ranks, and a rank that leaves its loop."""

import re
import sys
from pathlib import Path

import pytest

from .jobs import ROOT, Finished, needs_mpirun, run_job, run_limited

EXAMPLES = ["strategy_fit", "strategy_custom_loop"]
LAST_LINE = re.compile(r"test accuracy (\d\.\d+), norm of the weights (\d+\.\d+), (\d) ranks")
_alone: dict[str, re.Match[str]] = {}


def last_line(job: Finished) -> re.Match[str]:
    assert job.code == 0, job.output
    found = [match for line in job.output.splitlines() if (match := LAST_LINE.fullmatch(line))]
    assert len(found) == 1, job.output
    return found[0]


def trained_alone(example: str) -> re.Match[str]:
    if example not in _alone:
        _alone[example] = last_line(run_limited([sys.executable, str(ROOT / "examples" / f"{example}.py")],
                                                limit_s=300))
    return _alone[example]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short_and_runs_without_mpirun(example: str) -> None:
    assert len(Path(ROOT / "examples" / f"{example}.py").read_text().splitlines()) < 80
    line = trained_alone(example)
    assert float(line[1]) > 0.8
    assert line[3] == "1"


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_as_one_process_does(example: str, ranks: int) -> None:
    line = last_line(run_job(ranks, ["python", f"examples/{example}.py"], limit_s=300))
    expected = trained_alone(example)
    assert float(line[2]) == pytest.approx(float(expected[2]), abs=0.01)
    assert float(line[1]) == pytest.approx(float(expected[1]), abs=0.006)
    assert int(line[3]) == ranks


@needs_mpirun
def test_a_rank_that_leaves_the_loop_is_named() -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_left_early.py"])
    assert job.code != 0
    assert job.of_rank(0) == ["done"]
    assert "ranks [1] wait for ranks [0], which have already shut down" in job.output, job.output


@needs_mpirun
@pytest.mark.parametrize("what", ["metric", "checkpoint", "save"])
def test_what_one_rank_calls_alone_is_named_with_its_cause(what: str, tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", what, str(tmp_path)])
    for rank in range(2):
        error = job.of_rank(rank)[0]
        assert error.startswith("StallError: "), job.output
        assert "look for one under `if rank == 0`" in error
        assert "strategy/" in error
        assert "Ended after 3 s" in error


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_chief_may_save_a_model_alone_at_the_end(ranks: int, tmp_path: Path) -> None:
    job = run_job(ranks, ["python", "tests/scripts/strategy_under_one_rank.py", "save-at-the-end", str(tmp_path)])
    assert job.of_rank(0) == ["returned True", "ends"], job.output
    assert job.code == 0, job.output
    assert (tmp_path / "model.keras").exists()
