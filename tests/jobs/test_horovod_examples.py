"""Those examples after Horovod's own that test_examples.py does not run: one job for each number of ranks runs all."""

import re

import pytest

from ..support.jobs import Finished, needs_mpirun, run_job

SCRIPTS = [
    "examples/synthetic_benchmark.py --model MobileNet --image-size 32 --batch-size 2 --warmup-steps 1 --steps 2 "
    "--measurements 2 --compression fp16",
    "examples/keras_digits_advanced.py --directory run --epochs 2 --warmup-epochs 2",
    "examples/keras_digits_advanced.py --directory run --epochs 5 --warmup-epochs 2",
]
pytestmark = needs_mpirun


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks the job has."""
    return request.param


@pytest.fixture(scope="module")
def job(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What all examples have left, one after the other."""
    directory = tmp_path_factory.mktemp("examples")
    return run_job(ranks, ["python", "tests/scripts/one_after_other.py", directory, *SCRIPTS], limit_s=600)


def printed(job: Finished, pattern: str) -> list[re.Match[str]]:
    """The lines that fit the pattern."""
    assert job.code == 0, job.output
    return [match for line in job.output.splitlines() if (match := re.fullmatch(pattern, line))]


def test_the_benchmark_prints_what_each_rank_and_all_together_do(ranks: int, job: Finished) -> None:
    measured = printed(job, r"measurement \d: \d+\.\d images/s on this rank")
    assert len(measured) == 2, job.output
    [each], [total] = (printed(job, rf"(\d+\.\d) \+- \d+\.\d images/s {what}")
                       for what in ("per rank", f"in total on {ranks} ranks"))
    assert float(total[1]) == pytest.approx(ranks * float(each[1]), abs=0.06 * ranks)


def test_the_others_learn_the_same_on_all_ranks(ranks: int, job: Finished) -> None:
    lines = printed(job, rf"test accuracy (\d\.\d+), .* weights \w+, the same on all ranks \({ranks}\)")
    begun, resumed = (float(line[1]) for line in lines)
    assert resumed > max(begun, 0.6), job.output


def test_training_goes_on_after_the_last_epoch_of_the_job_before(job: Finished) -> None:
    epochs = [line[1] for line in printed(job, r"Epoch (\d)/[25]")]
    assert epochs == ["1", "2", "3", "4", "5"], job.output


def test_only_the_chief_shows_progress(job: Finished) -> None:
    assert "has printed" not in job.output
