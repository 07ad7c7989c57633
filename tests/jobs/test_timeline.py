"""The timeline of a job: which rank was late, and what is left of it when the job is killed."""

import json
from pathlib import Path

import pytest

from mpistrat.cli.main import main
from mpistrat.trace import files
from mpistrat.trace.timeline import records_in

from ..support.jobs import needs_mpirun, run_job

pytestmark = needs_mpirun


@pytest.mark.quick
@pytest.mark.horovod("timeline")
def test_a_rank_that_is_50_ms_late_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    job = run_job(2, ["python", "tests/scripts/timeline_steps.py", str(path), "10"])
    assert job.code == 0, job.output
    assert json.loads(path.read_text())
    records = records_in(files.spans_in(str(path))[0])
    assert sorted({(each.rank, each.step, each.name) for each in records}) == [
        (rank, step, f"gradient/{place}") for rank in range(2) for step in range(10) for place in range(2)]
    assert {each.backend for each in records} == {"shared_memory"}
    assert main(["timeline", str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Rank 1 came last"))
    late_ms = float(line.split(" ms after")[0].rpartition(" ")[2])
    assert 40 < late_ms < 500, line


@pytest.mark.parametrize("ending", ["json", "pftrace"])
def test_a_job_that_is_killed_leaves_a_file_that_can_be_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.{ending}"
    job = run_job(2, ["python", "tests/scripts/timeline_steps.py", str(path), "20", "killed"])
    assert job.code != 0, job.output
    records = records_in(files.spans_in(str(path))[0])
    # What came in the last moment may be missing: 20 steps take a second or more.
    for rank in range(2):
        assert {each.step for each in records if each.rank == rank} >= set(range(8)), job.output
