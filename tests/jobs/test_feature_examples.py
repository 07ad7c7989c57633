"""The examples of single features: each as its user starts it, and what its last line says."""

import re
import sys

import pytest

from ..support.jobs import ROOT, Finished, needs_mpirun, run_job, run_limited

LIMIT_S = 300.0


def run(example: str, ranks: int, *arguments: str) -> Finished:
    command = ["python", str(ROOT / "examples" / f"{example}.py"), *arguments]
    return run_job(ranks, command, limit_s=LIMIT_S)


def last_line(job: Finished, pattern: str) -> re.Match[str]:
    """The last line that an example has printed, which the chief does."""
    assert job.code == 0, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("test accuracy ")]
    assert len(lines) == 1, job.output
    match = re.fullmatch(pattern, lines[0])
    assert match is not None, lines
    return match


@pytest.mark.quick
@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_adasum_learns_the_same_on_all_ranks(ranks: int) -> None:
    line = last_line(run("adasum_digits", ranks),
                     rf"test accuracy (\d\.\d+) with adasum, weights (\w+), the same on all ranks \({ranks}\)")
    assert float(line[1]) >= 0.93, line[0]


@needs_mpirun
def test_adasum_is_not_the_average() -> None:
    pattern = r"test accuracy (\d\.\d+) with \w+, weights (\w+), the same on all ranks \(2\)"
    adasum, average = (last_line(run("adasum_digits", 2, "--op", op, "--epochs", "1"), pattern)
                       for op in ("adasum", "average"))
    assert adasum[2] != average[2]


@pytest.mark.quick
@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_process_sets_train_two_models(ranks: int) -> None:
    line = last_line(run("process_sets", ranks),
                     rf"test accuracy (\d\.\d+) and (\d\.\d+) of the models on {ranks // 2} and {ranks - ranks // 2} "
                     r"ranks, (\d\.\d+) together")
    assert min(float(line[number]) for number in (1, 2, 3)) >= 0.9, line[0]
    assert line[1] != line[2]


def test_process_sets_on_one_rank_say_what_they_need() -> None:
    job = run_limited([sys.executable, str(ROOT / "examples" / "process_sets.py")], limit_s=LIMIT_S)
    assert job.code != 0
    assert job.output.splitlines()[-1].startswith("Two models need two ranks or more: mpirun -np 2")
