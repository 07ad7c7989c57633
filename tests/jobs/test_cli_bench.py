"""`mpistrat bench` under mpirun and alone: the table, the picture, the file of points, and training."""

import json
import re
import sys
from pathlib import Path

import pytest

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
    assert [(p["case"], p["ranks"]) for p in json.loads(points.read_text())] == [
        (case, ranks) for case in ("1KB", "64KB", "400x1KB", "reducescatter-64KB", "alltoall-64KB")]


@pytest.mark.nightly
def test_training_with_and_without_averaging() -> None:
    job = run_job(2, ["python", "-m", "mpistrat", "bench", "--train", "--models", "mlp", "--repeats", "3"])
    assert job.code == 0, job.output
    averaged, alone = [line for line in job.output.splitlines() if line.startswith("mlp: ")]
    assert "ms per step with averaging" in averaged
    assert "on 2 ranks; efficiency" in averaged
    # Both numbers come from one comparison: the batch of the one process is that of two ranks.
    found = re.search(r"([\d.]+) samples per second in one process on \d+ CPUs?, in batches of 16; 2 ranks train "
                      r"([\d.]+) times as fast", alone)
    assert found is not None and float(found[1]) > 0, alone
    samples = float(re.search(r"([\d.]+) samples per second", averaged)[1])
    assert float(found[2]) == pytest.approx(samples / float(found[1]), abs=0.006)


@pytest.mark.nightly
def test_a_process_that_fails_alone_ends_the_benchmark_on_every_rank() -> None:
    code = ("import mpistrat; mpistrat.init()\nfrom mpistrat.cli.bench.train import measure_one_process\n"
            "try: measure_one_process('no such model', 32, 1, 1)\n"
            "except RuntimeError as error: print(f'rank {mpistrat.rank()}: {error}')")
    job = run_job(2, ["python", "-c", code])
    job.assert_each_says(
        2, lambda rank: f"rank {rank}: the process that trains no such model alone has ended with exit code 1")


def test_one_rank_without_mpirun_has_nothing_to_compare_with() -> None:
    job = run_limited([sys.executable, "-m", "mpistrat", "bench", "1KB", "reducescatter-1KB", "alltoall-1KB",
                       "--repeats", "3"])
    assert job.code == 0, job.output
    assert [line.split()[4::3] for line in job.output.splitlines()[-3:]] == [["-", "-"]] * 3, job.output
