"""Random programs of collectives against numpy, and random training scripts against one process.

A few of them; any number is run by hand, as the scripts say.
"""

import pytest

from ..support.jobs import needs_mpirun, run_job


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("ranks, options", [
    (2, ["10"]), (3, ["20", "1000"]), (4, ["10", "2000", "hosts"]),
    (2, ["10", "3000", "background"]), (3, ["50", "4000", "tensors"])])
def test_programs_of_all_collectives(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_calls.py", *options], limit_s=400)
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: {options[0]} programs of ")


@pytest.mark.nightly
@needs_mpirun
def test_programs_in_functions_some_of_which_fail() -> None:
    job = run_job(3, ["python", "tests/scripts/random_functions.py", "12"], limit_s=400)
    job.assert_each_says(3, lambda rank: f"rank {rank}: 12 programs are right")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("ranks, options", [(3, []), (2, ["gpu"])], ids=["CPU", "stand-in for a GPU"])
def test_gradients_of_programs_under_a_strategy(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_programs.py", "5", "gradients", *options], limit_s=300)
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: 5 programs are right")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("options", [["4", "1000"], ["3", "3000", "gradients"], ["6", "6000", "gpu"]],
                         ids=["values", "gradients", "stand-in for a GPU"])
def test_programs_that_xla_compiles(options: list[str]) -> None:
    pytest.importorskip("tensorflow")
    if pytest.importorskip("mpistrat.tensorflow.xla.ffi").api() is None:
        pytest.skip("this TensorFlow does not export XLA's FFI")
    job = run_job(2, ["python", "tests/scripts/random_programs.py", *options, "compiled"], limit_s=300)
    job.assert_each_says(2, lambda rank: f"rank {rank}: {options[0]} programs are right")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("ranks, options", [(2, ["0"]), (3, ["200"]), (3, ["400", "local"])])
def test_whole_scripts(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_scripts.py", "6", *options], limit_s=600)
    assert job.code == 0, job.output
    assert job.output.count("6 of 6 scripts are right") == ranks, job.output
