"""A job of workers and a job that trains: every element arrives once, and the workers end by themselves."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..support.jobs import ROOT, Finished, needs_mpirun, run_job

pytestmark = needs_mpirun
WORKER = ["python", "-m", "mpistrat.tensorflow.data.compute_worker"]
ELEMENTS = 60
ALL = [value * value for value in range(ELEMENTS)]


def run_both(config: Path, workers: int, training: list[str],
             options: tuple[str, ...] = ()) -> tuple[Finished, Finished]:
    """The job of the workers, and the job of two ranks that trains, at the same time."""
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(run_job, workers, [*WORKER, str(config), *options], limit_s=200)
        trained = run_job(2, training, limit_s=200)
        return serving.result(), trained


def elements_of(trained: Finished) -> list[list[list[int]]]:
    """What each rank has got, one list for each dataset."""
    assert trained.code == 0, trained.output
    return [[ast.literal_eval(line) for line in trained.of_rank(rank)] for rank in range(2)]


def assert_ended(served: Finished, config: Path) -> None:
    assert served.code == 0, served.output
    assert not served.left
    assert "Traceback" not in served.output
    assert list(config.parent.iterdir()) == [], "the file with the key is removed"


@pytest.mark.nightly
@pytest.mark.horovod("data-service")
@pytest.mark.parametrize(("side", "workers"), [("compute", 2), ("training", 1)])
def test_each_element_arrives_once(side: str, workers: int, tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served, trained = run_both(config, workers, ["python", "tests/scripts/data_service.py", str(config), str(ELEMENTS)],
                               ("--dispatcher-side", side))
    for first, second in zip(*elements_of(trained), strict=True):
        assert sorted(first + second) == ALL
    assert_ended(served, config)


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["compute", "training"])
def test_with_a_dispatcher_for_each_rank_each_gets_all_elements(side: str, tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served, trained = run_both(config, 2, ["python", "tests/scripts/data_service.py", str(config), str(ELEMENTS)],
                               ("--dispatcher-side", side, "--dispatchers", "2"))
    assert all(got == ALL for rank in elements_of(trained) for got in rank)
    assert_ended(served, config)


@pytest.mark.nightly
def test_ranks_that_do_not_share_the_dataset_each_get_all_elements(tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served, trained = run_both(config, 2, [
        "python", "tests/scripts/data_service.py", str(config), str(ELEMENTS), "independent"])
    assert elements_of(trained) == [[ALL, ALL]] * 2
    assert_ended(served, config)


@pytest.mark.nightly
@pytest.mark.horovod("data-service")
def test_ranks_take_turns(tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served, trained = run_both(config, 1, [
        "python", "tests/scripts/data_service.py", str(config), str(ELEMENTS), "turns"])
    [[even], [odd]] = elements_of(trained)
    assert sorted([even, odd]) == [[0, 4, 16], [1, 9, 25]]
    assert_ended(served, config)


@pytest.mark.nightly
def test_workers_without_a_dispatcher_end_with_an_error_that_names_it(tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served = run_job(1, [*WORKER, str(config), "--dispatcher-side", "training", "--timeout", "1"], limit_s=100)
    assert served.code != 0
    assert "this rank has waited 1 s for dispatcher 0 of 1. Has the other job started" in served.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_ranks_without_workers_end_with_an_error_that_names_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, mpistrat.tensorflow.data.compute_service as service\n"
                      "service.TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True, timeout=1)\n")
    trained = run_job(2, ["python", str(script), str(tmp_path / "no.json")], limit_s=100)
    assert trained.code != 0
    assert "no.json is not there after 1 s. Has the job of the workers started?" in trained.output


@pytest.mark.nightly
def test_the_example_learns_the_same_on_all_ranks(tmp_path: Path) -> None:
    config = tmp_path / "service.json"
    served, trained = run_both(config, 1, [
        "python", str(ROOT / "examples" / "data_service_digits.py"), str(config), "--epochs", "4"])
    assert trained.code == 0, trained.output
    [line] = [line for line in trained.output.splitlines() if line.startswith("test accuracy ")]
    assert float(line.split()[2].rstrip(",")) > 0.7
    assert line.endswith("the same on all ranks (2)")
    assert_ended(served, config)
