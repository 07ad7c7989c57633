"""MPIStrategy in whole programs: its examples on any number of ranks, and a rank that leaves its loop."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..support.jobs import ROOT, needs_mpirun, run_job
from ..support.levels import sample
from ..support.scripts import Line, Ran

# What trains on any number of ranks as it does on one.
EXAMPLES = ["strategy_fit", "strategy_fit --input dataset", "strategy_custom_loop"]
# The statistics of BatchNormalization are those of a rank's rows, so the results differ; the arguments make it quick.
# The number of steps is that of one process, for fewer are too few for the running statistics. Rows of all ranks:
OTHERS = {"strategy_mobilenet --epochs 3": 64, "strategy_resnet56 --depth 8 --images 512": 32}
LAST_LINE = re.compile(r"^test accuracy (\d\.\d+), norm of the weights (\d+\.\d+), (\d) ranks$", re.MULTILINE)


def line(example: str, ranks: int) -> Line:
    """An example, which is given by its name and arguments."""
    name, *arguments = example.split()
    return Line(ranks, " ".join([f"examples/{name}.py", *arguments]))


def last_line(ran: Ran) -> re.Match[str]:
    """What the chief has printed at the end, taken apart."""
    found = list(LAST_LINE.finditer(ran.well))
    assert len(found) == 1, ran
    return found[0]


@pytest.mark.nightly
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("strategy_*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [line(example, 1) for example in EXAMPLES], ids=str)
def test_an_example_runs_without_mpirun(needed: Line, ran: Callable[[Line], Ran]) -> None:
    said = last_line(ran(needed))
    assert float(said[1]) > 0.8
    assert said[3] == "1"


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [(line(example, ranks), line(example, 1)) for example, ranks in [
    *((example, 2) for example in EXAMPLES), (EXAMPLES[-1], 3)]], ids=lambda lines: str(lines[0]))
def test_an_example_trains_as_one_process_does(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    said, expected = (last_line(ran(line)) for line in needed)
    assert float(said[2]) == pytest.approx(float(expected[2]), abs=0.01)
    assert float(said[1]) == pytest.approx(float(expected[1]), abs=0.006)
    assert int(said[3]) == needed[0].ranks


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [tuple(
    Line(ranks, f"tests/scripts/strategy_trains.py trained.{ranks}") for ranks in (1, 2, 3))], ids=["all"])
def test_all_ranks_have_the_same_bits_and_one_process_almost(needed: tuple[Line, ...],
                                                             ran: Callable[[Line], Ran]) -> None:
    def results(line: Line) -> list[dict[str, np.ndarray]]:
        assert not any(ran(line).error), ran(line)
        return [dict(np.load(ran(line).directory / f"trained.{line.ranks}.{rank}.npz")) for rank in range(line.ranks)]
    [expected] = results(needed[0])
    for line in needed[1:]:
        first, *others = results(line)
        for name, value in first.items():
            for other in others:
                np.testing.assert_array_equal(other[name], value, err_msg=f"{name}, {line.ranks} ranks")
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 if "weights" in name else 1e-6,
                                       err_msg=f"{name}, {line.ranks} ranks")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [line(f"{example} --batch-size {rows // 2}", 2) for example, rows in OTHERS.items()],
                         ids=str)
def test_an_example_with_statistics_of_its_rows_learns(needed: Line, ran: Callable[[Line], Ran]) -> None:
    said = last_line(ran(needed))
    assert float(said[1]) > 0.7
    assert int(said[3]) == 2


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [line("strategy_resnet56 --images 16 --batch-size 16 --epochs 1", 2)], ids=str)
def test_the_whole_resnet_56_takes_a_step(needed: Line, ran: Callable[[Line], Ran]) -> None:
    assert int(last_line(ran(needed))[3]) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [line("strategy_dataset_fn", 1),
                                    pytest.param(line("strategy_dataset_fn", 3), marks=needs_mpirun)], ids=str)
def test_a_dataset_function_gives_each_rank_its_points(needed: Line, ran: Callable[[Line], Ran]) -> None:
    assert ran(needed).well.splitlines()[-1] == f"weights [1.0, -2.0, 0.5], {needed.ranks} ranks"


def interrupted(ranks: int) -> tuple[Line, ...]:
    """An example that ends after two epochs, and goes on."""
    return tuple(line(f"strategy_resume --directory resume --epochs 4{more}", ranks)
                 for more in (" --interrupt-after 2", ""))


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [interrupted(1), pytest.param(interrupted(2), marks=needs_mpirun)], ids=["1", "2"])
def test_an_interrupted_training_goes_on_where_it_was(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    first, second = (ran(line) for line in needed)
    assert first.error == ("interrupted after epoch 2",) * needed[0].ranks
    assert re.findall(r"^Epoch (\d)/4", second.well, re.MULTILINE) == ["3", "4"], second
    assert float(last_line(second)[1]) > 0.8


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
