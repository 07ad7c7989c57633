"""MPIStrategy in whole programs: its examples on any number of ranks, and a rank that leaves its loop."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, Finished, needs_mpirun, run_job, run_limited

# What trains on any number of ranks as it does on one.
EXAMPLES = ["strategy_fit", "strategy_fit --input dataset", "strategy_custom_loop"]
# The statistics of BatchNormalization are those of a rank's rows, so the results differ; the arguments make it quick.
# The number of steps is that of one process, for fewer are too few for the running statistics. Rows of all ranks:
OTHERS = {"strategy_mobilenet --epochs 3": 64, "strategy_resnet56 --depth 8 --images 512": 32}
LAST_LINE = re.compile(r"test accuracy (\d\.\d+), norm of the weights (\d+\.\d+), (\d) ranks")
_alone: dict[str, re.Match[str]] = {}


def last_line(job: Finished) -> re.Match[str]:
    assert job.code == 0, job.output
    found = [match for line in job.output.splitlines() if (match := LAST_LINE.fullmatch(line))]
    assert len(found) == 1, job.output
    return found[0]


def trained_alone_job(example: str) -> Finished:
    return run_limited([sys.executable, *command(example)[1:]], limit_s=300)


def trained_alone(example: str) -> re.Match[str]:
    if example not in _alone:
        _alone[example] = last_line(trained_alone_job(example))
    return _alone[example]


def command(example: str) -> list[str]:
    """The words that start an example, which is given by its name and arguments."""
    name, *arguments = example.split()
    return ["python", f"examples/{name}.py", *arguments]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("strategy_*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_without_mpirun(example: str) -> None:
    line = trained_alone(example)
    assert float(line[1]) > 0.8
    assert line[3] == "1"


@needs_mpirun
@pytest.mark.parametrize("example, ranks", [pytest.param(EXAMPLES[0], 2, marks=pytest.mark.quick),
                                            *((example, 2) for example in EXAMPLES[1:]), (EXAMPLES[-1], 3)])
def test_an_example_trains_as_one_process_does(example: str, ranks: int) -> None:
    line = last_line(run_job(ranks, command(example), limit_s=300))
    expected = trained_alone(example)
    assert float(line[2]) == pytest.approx(float(expected[2]), abs=0.01)
    assert float(line[1]) == pytest.approx(float(expected[1]), abs=0.006)
    assert int(line[3]) == ranks


@needs_mpirun
def test_all_ranks_have_the_same_bits_and_one_process_almost(tmp_path: Path) -> None:
    def results(ranks: int) -> list[dict[str, np.ndarray]]:
        file = tmp_path / str(ranks)
        job = run_job(ranks, ["python", "tests/scripts/strategy_trains.py", file])
        assert job.code == 0, job.output
        return [dict(np.load(f"{file}.{rank}.npz")) for rank in range(ranks)]
    [expected] = results(1)
    for ranks in (2, 3):
        first, *others = results(ranks)
        for name, value in first.items():
            for other in others:
                np.testing.assert_array_equal(other[name], value, err_msg=f"{name}, {ranks} ranks")
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 if "weights" in name else 1e-6,
                                       err_msg=f"{name}, {ranks} ranks")


@needs_mpirun
@pytest.mark.parametrize("example", OTHERS)
def test_an_example_with_statistics_of_its_rows_learns(example: str) -> None:
    line = last_line(run_job(2, command(f"{example} --batch-size {OTHERS[example] // 2}"), limit_s=300))
    assert float(line[1]) > 0.7
    assert int(line[3]) == 2


@needs_mpirun
def test_the_whole_resnet_56_takes_a_step() -> None:
    job = run_job(2, command("strategy_resnet56 --images 16 --batch-size 16 --epochs 1"), limit_s=300)
    assert int(last_line(job)[3]) == 2


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=needs_mpirun)])
def test_a_dataset_function_gives_each_rank_its_points(ranks: int) -> None:
    job = trained_alone_job("strategy_dataset_fn") if ranks == 1 else run_job(ranks, command("strategy_dataset_fn"))
    assert job.code == 0, job.output
    assert job.output.splitlines()[-1] == f"weights [1.0, -2.0, 0.5], {ranks} ranks"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpirun)])
def test_an_interrupted_training_goes_on_where_it_was(ranks: int, tmp_path: Path) -> None:
    def trained(arguments: str) -> Finished:
        example = f"strategy_resume --directory {tmp_path} --epochs 4 {arguments}"
        return trained_alone_job(example) if ranks == 1 else run_job(ranks, command(example), limit_s=300)
    first = trained("--interrupt-after 2")
    assert "interrupted after epoch 2" in first.output, first.output
    assert first.code != 0
    second = trained("")
    assert re.findall(r"^Epoch (\d)/4", second.output, re.MULTILINE) == ["3", "4"], second.output
    assert float(last_line(second)[1]) > 0.8


@needs_mpirun
def test_a_rank_that_leaves_the_loop_is_named() -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_left_early.py"])
    assert job.code != 0
    assert job.of_rank(0) == ["done"]
    assert "ranks [1] wait for ranks [0], which have already shut down" in job.output, job.output


@needs_mpirun
@pytest.mark.parametrize("what", ["metric", "variable", "checkpoint", "save"])
def test_what_one_rank_calls_alone_is_named_with_its_cause(what: str, tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", what, str(tmp_path)],
                  env={"MPISTRAT_DEADLOCK_CHECK_DISABLE": "1"})  # It would come before the limit.
    for rank in range(2):
        error = job.of_rank(rank)[0]
        assert error.startswith("StallError: "), job.output
        assert "look for one under `if rank == 0`" in error
        assert "strategy/" in error
        assert "Ended after 3 s (CommunicationOptions.timeout_seconds)" in error


@needs_mpirun
def test_the_chief_may_save_a_model_alone_at_the_end(tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", "save-at-the-end", str(tmp_path)])
    assert job.of_rank(0) == ["returned True", "ends"], job.output
    assert job.code == 0, job.output
    assert (tmp_path / "model.keras").exists()
