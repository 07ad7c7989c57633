"""The timeline of a job: which rank was late, and what is left of it when the job is killed, or fails."""

import json
import re
import sys
from pathlib import Path

import pytest

from mpistrat.cli.main import main
from mpistrat.core.topology import rank_list
from mpistrat.trace.timeline import records_in

from ..support.jobs import ROOT, Finished, run_job, run_limited
from ..support.levels import sample


@pytest.mark.horovod("timeline")
def test_a_rank_that_is_50_ms_late_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    run_job(2, ["python", "tests/scripts/timeline_steps.py", str(path), "10"]).well()
    assert json.loads(path.read_text())
    records = records_in(str(path))[0]
    assert sorted({(each.rank, each.step, each.name) for each in records}) == [
        (rank, step, f"gradient/{place}") for rank in range(2) for step in range(10) for place in range(2)]
    assert {each.backend for each in records} == {"shared_memory"}
    assert main(["timeline", str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Rank 1 came last"))
    late_ms = float(line.split(" ms after")[0].rpartition(" ")[2])
    assert 40 < late_ms < 500, line


@pytest.mark.nightly
def test_a_job_that_is_killed_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    job = run_job(2, ["python", "tests/scripts/timeline_steps.py", str(path), "20", "killed"])
    assert job.code != 0, job.output
    records = records_in(str(path))[0]
    # What came in the last moment may be missing: 20 steps take a second or more.
    for rank in range(2):
        assert {each.step for each in records if each.rank == rank} >= set(range(8)), job.output


def fail(directory: Path, how: str, *settings: str) -> tuple[Finished, list[Path]]:
    """Run tests/scripts/failing_steps.py in a directory. Returns what the job left, and its files."""
    job = run_limited([
        "env", "-C", str(directory), "MPISTRAT_RECORDER=all", *settings, sys.executable, "-m", "mpistrat", "run",
        "-np", "4", "--oversubscribe", str(ROOT / "tests" / "scripts" / "failing_steps.py"), how], limit_s=90)
    return job, list(directory.glob(".mpistrat/*.json"))


# mpirun soon ends the ranks beside one that was killed, which may come before those of the other host can tell theirs.
@sample(("how", "surely", "perhaps", "said"), [
    ("raised", (0, 1, 2, 3), (), ", and ranks [1] had not called it."),
    ("killed", (0,), (2, 3), "; the file has nothing of "),
    ("slept", (0, 1, 2, 3), (), ", and ranks [1] had not called it.")])
def test_a_job_that_fails_leaves_what_its_ranks_did_last(
        tmp_path: Path, how: str, surely: tuple[int, ...], perhaps: tuple[int, ...], said: str,
        capsys: pytest.CaptureFixture[str]) -> None:
    job, (path, *more) = fail(tmp_path, how, "MPISTRAT_STALL_CHECK_TIME_SECONDS=1",
                              "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS=2")
    assert job.code != 0 and more == [], job.output
    *_, named, last = job.output.splitlines()
    assert named.endswith(f": mpistrat timeline .mpistrat/{path.name}"), job.output
    assert "the job has ended with exit code" in last, job.output
    records = records_in(str(path))[0]
    ranks = {each.rank for each in records}
    assert set(surely) <= ranks <= {*surely, *perhaps}
    for rank in ranks:
        assert sorted(each.number for each in records if each.rank == rank and each.is_complete) == list(range(20))
    assert main(["timeline", str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gradient/0 was not complete"))
    assert f"ranks {rank_list(ranks - {1})} had waited for " in line and said in line, line


@pytest.mark.nightly
def test_a_job_that_ends_well_or_may_not_leaves_no_file(tmp_path: Path) -> None:
    for how, setting, code in ("none", "MPISTRAT_RECORDER=all", 0), ("raised", "MPISTRAT_RECORDER=status", 1):
        job, found = fail(tmp_path, how, setting)
        assert job.code == code and found == [], job.output
        assert "mpistrat timeline" not in job.output


@pytest.mark.nightly
def test_a_job_without_fit_ends_with_a_line_on_its_speed_and_the_slowest_rank() -> None:
    job = run_job(2, ["python", "tests/scripts/late_rank.py"]).well()
    line, = (line for line in job.output.splitlines() if line.startswith("mpistrat: 2 ranks have done "))
    assert re.search(r" collectives per second; collectives took .*; the slowest was rank 1 on \S+, for which the "
                     r"others waited \d+% of", line), line
