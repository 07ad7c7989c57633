"""`mpistrat bench` under mpirun and alone: the table, the picture and the file of points."""

import json
import sys
from pathlib import Path

from ..support.jobs import needs_mpirun, run_job, run_limited
from ..support.levels import sample

pytestmark = needs_mpirun


@sample("ranks", [2, 3])
def test_a_table_a_picture_and_a_file(ranks: int, tmp_path: Path) -> None:
    picture, points = tmp_path / "figure.png", tmp_path / "points.json"
    job = run_job(ranks, ["python", "-m", "mpistrat", "bench", "1KB", "64KB", "400x1KB", "reducescatter-64KB",
                          "alltoall-64KB", "--repeats", "3", "--plot", str(picture), "--json", str(points)])
    assert job.code == 0, job.output
    assert f"{ranks} ranks on 1 host, shared_memory" in job.output
    assert [line.split()[:3] for line in job.output.splitlines() if "KB " in line] == [
        ["1KB", "1", "1,024"], ["64KB", "1", "65,536"], ["400x1KB", "400", "409,600"],
        ["reducescatter-64KB", "1", "65,536"], ["alltoall-64KB", "1", "65,536"]], job.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in job.output  # Open MPI gives ranks a pty, but mpirun's output is a file here.
    assert [(p["case"], p["ranks"]) for p in json.loads(points.read_text()) if 0 <= p["hidden"] <= 1] == [
        (case, ranks) for case in ("1KB", "64KB", "400x1KB", "reducescatter-64KB", "alltoall-64KB")]


def test_one_rank_without_mpirun_has_nothing_to_compare_with() -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "bench", "1KB", "reducescatter-1KB", "alltoall-1KB",
                       "--repeats", "3"])
    assert job.code == 0, job.output
    rows = [line.split() for line in job.output.splitlines()[-3:]]
    assert [[*row[4:5], *row[7:]] for row in rows] == [["-"] * 3] * 3, job.output
