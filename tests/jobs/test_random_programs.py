"""Random programs of collectives against numpy, and random training scripts against one process.

A few of them; any number is run by hand, as the scripts say.
"""

import pytest

from ..support.jobs import needs_mpirun, run_job


@needs_mpirun
@pytest.mark.parametrize("ranks, options", [
    pytest.param(2, ["30"], marks=pytest.mark.quick), (3, ["20", "1000"]), (4, ["10", "2000", "hosts"]),
    (2, ["10", "3000", "tensorflow"])])
def test_programs_of_arrays(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_arrays.py", *options], limit_s=300)
    assert job.code == 0, job.output
    for rank in range(ranks):
        assert f"rank {rank}: {options[0]} programs of " in job.output, job.output


@needs_mpirun
def test_programs_of_all_collectives_that_hypothesis_draws() -> None:
    job = run_job(3, ["python", "tests/scripts/hypothesis_programs.py", "60", "0", "12", "1"], limit_s=600)
    assert job.code == 0, job.output
    for rank in range(3):
        for programs in ("60 programs", "12 nested programs"):
            assert f"rank {rank}: {programs} are right" in job.output, job.output


@needs_mpirun
@pytest.mark.parametrize("ranks, options", [(3, []), (2, ["gpu"])], ids=["CPU", "stand-in for a GPU"])
def test_gradients_of_programs_under_a_strategy(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_programs.py", "5", "gradients", *options], limit_s=300)
    assert job.code == 0, job.output
    for rank in range(ranks):
        assert f"rank {rank}: 5 programs are right" in job.output, job.output


@needs_mpirun
@pytest.mark.parametrize("options", [["4", "1000"], ["3", "3000", "gradients"], ["6", "6000", "gpu"]],
                         ids=["values", "gradients", "stand-in for a GPU"])
def test_programs_that_xla_compiles(options: list[str]) -> None:
    pytest.importorskip("tensorflow")
    if pytest.importorskip("mpistrat.tensorflow.xla.ffi").api() is None:
        pytest.skip("this TensorFlow does not export XLA's FFI")
    job = run_job(2, ["python", "tests/scripts/random_programs.py", *options, "compiled"], limit_s=300)
    assert job.code == 0, job.output
    for rank in range(2):
        assert f"rank {rank}: {options[0]} programs are right" in job.output, job.output


@needs_mpirun
@pytest.mark.parametrize("ranks, options", [(2, ["0"]), (3, ["200"]), (3, ["400", "local"])])
def test_whole_scripts(ranks: int, options: list[str]) -> None:
    job = run_job(ranks, ["python", "tests/scripts/random_scripts.py", "6", *options], limit_s=600)
    assert job.code == 0, job.output
    assert job.output.count("6 of 6 scripts are right") == ranks, job.output
