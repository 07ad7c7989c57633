"""Jobs in which TensorFlow's own servers run, or an evaluator: their examples, and how all ranks end, whoever ends."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

from ..support.jobs import Finished, find_mpirun, job_environment, run_job

LIMIT_S = 200.0
SURVIVE = ["--with-ft", "ulfm"]


@functools.cache
def why_nobody_survives() -> str | None:
    """Why a job ends with its first process that is killed, or None."""
    mpirun = find_mpirun()
    assert mpirun is not None
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=job_environment("", {})).stdout
    found = re.search(r"\(Open MPI\) (\d+)", version)
    return None if found and int(found[1]) >= 5 else "only the mpirun of Open MPI 5 can keep the others"


def run(ranks: int, *command: str, survive: bool = False) -> Finished:
    """A script under mpirun; none of its processes may live on."""
    if survive and why_nobody_survives():
        pytest.skip(why_nobody_survives() or "")
    job = run_job(ranks, ["python", *command], limit_s=LIMIT_S, mpirun_args=SURVIVE if survive else [])
    assert job.left == (), job.output
    return job


# -- parameter servers ------------------------------------------------------------------------------------------------


def kill(rank: int, ranks: int, directory: Path, survive: bool = True) -> Finished:
    """The example of parameter servers, in which a rank is killed after the third epoch."""
    job = run(ranks, "tests/scripts/killed_rank.py", str(rank), "epoch 3", str(directory / "mark"),
              "examples/parameter_server.py", survive=survive)
    assert job.of_rank(rank) == ["is killed"], job.output
    return job


def accuracy_of(job: Finished, workers: int) -> float:
    found = re.search(rf"^test accuracy (\d\.\d{{3}}), \d+\.\d s, {workers} workers$", job.output, re.MULTILINE)
    assert found is not None, job.output
    return float(found[1])


def test_asynchronous_training_learns_and_all_processes_end_with_the_coordinator() -> None:
    job = run(4, "examples/parameter_server.py").well()
    assert "rror" not in job.said, job.output
    assert accuracy_of(job, 2) >= 0.93, job.output


@pytest.mark.nightly
def test_too_few_ranks_for_parameter_servers_are_told_so() -> None:
    job = run(2, "examples/parameter_server.py")
    assert job.code != 0
    assert job.output.count("3 ranks; there are 2 (mpirun -np 3)") == 2, job.output
    assert "Traceback" not in job.output, job.output


@pytest.mark.nightly
def test_a_killed_worker_is_survived(tmp_path: Path) -> None:
    job = kill(1, 4, tmp_path).well()
    assert re.search(r"rank 1 \(worker 0, on .*\) has died; the chief runs on", job.output), job.output
    assert accuracy_of(job, 2) >= 0.93, job.output
    assert "Traceback" not in job.output, job.output


@pytest.mark.nightly
def test_those_that_survive_do_not_wait_for_the_dead_in_mpi_finalize() -> None:
    """Which takes for ever, one time in ten."""
    job = run(4, "tests/scripts/worker_dies.py", survive=True).well()
    for rank in (0, 2, 3):
        assert job.of_rank(rank) == ["ends", "MPI_Finalize does not wait"], job.output


@pytest.mark.nightly
def test_without_the_option_of_mpirun_a_killed_worker_ends_the_job(tmp_path: Path) -> None:
    assert kill(1, 4, tmp_path, survive=False).code != 0


@pytest.mark.nightly
def test_without_any_worker_left_the_job_ends(tmp_path: Path) -> None:
    job = kill(1, 3, tmp_path)
    assert job.code != 0, job.output
    assert "RankDiedError: no worker is left" in job.output, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["chief", "ps"])
def test_a_job_ends_when_the_chief_or_the_parameter_server_is_killed(role: str, tmp_path: Path) -> None:
    job = kill(0 if role == "chief" else 3, 4, tmp_path)
    assert job.code != 0, job.output
    assert ("rank 0, the chief, has died" if role == "chief" else "UnavailableError") in job.output, job.output


# -- how a chief may end ----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("way, ranks", [("ends", 2), ("closes", 3), ("shuts down", 3)])
def test_the_others_return_when_the_chief_is_done(way: str, ranks: int) -> None:
    job = run(ranks, "tests/scripts/cluster_ends.py", way).well()
    assert job.of_rank(0) == ["ends"], job.output
    for rank in range(1, ranks):
        assert job.of_rank(rank) == ["returned False", "returned True", "ends"], job.output


@pytest.mark.nightly
def test_a_collective_that_needs_ranks_that_wait_is_an_error() -> None:
    job = run(3, "tests/scripts/cluster_ends.py", "calls a barrier").well()
    assert job.of_rank(0)[0].startswith("ShutdownError: lonely: ranks [0] "), job.output
    assert " for ranks [1, 2], which have already shut down" in job.of_rank(0)[0], job.output
    assert job.of_rank(1)[-2:] == ["returned True", "ends"], job.output


@pytest.mark.nightly
def test_an_exit_code_of_the_chief_is_the_jobs_and_the_others_end_well() -> None:
    job = run(3, "tests/scripts/cluster_ends.py", "exits with 3")
    assert job.code == 3, job.output
    assert job.of_rank(2) == ["returned False", "returned True", "ends"], job.output


@pytest.mark.nightly
def test_an_exception_on_the_chief_ends_the_job_with_its_traceback_alone() -> None:
    job = run(3, "tests/scripts/cluster_ends.py", "raises")
    assert job.code != 0, job.output
    assert "RuntimeError: failed on purpose\n" in job.output, job.output
    assert job.output.count("Traceback") == 1, job.output


@pytest.mark.nightly
def test_when_the_chief_is_killed_all_that_survive_end_with_an_error() -> None:
    job = run(3, "tests/scripts/cluster_ends.py", "gets SIGKILL", survive=True)
    assert job.code != 0, job.output
    assert "ends" not in job.of_rank(0), job.output


# -- no server of ours ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_tensorflows_own_multi_worker_strategy_needs_no_tf_config() -> None:
    job = run(3, "tests/scripts/stock_multi_worker.py").well()
    assert [job.of_rank(rank) for rank in range(3)] == [["sum 6.0 of 3, variable 0.0"]] * 3, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resolver_before_init_is_an_error_on_every_rank(ranks: int) -> None:
    job = run(ranks, "tests/scripts/no_init.py")
    for rank in range(ranks):
        assert job.of_rank(rank) == ["NotInitializedError: mpistrat has not been initialized; use hvd.init()."], \
            job.output


# -- an evaluator -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_evaluator_follows_the_checkpoints_to_the_last_one(ranks: int, tmp_path: Path) -> None:
    job = run(ranks, "examples/evaluator.py", "--directory", str(tmp_path)).well()
    evaluated = re.findall(r"^evaluator: checkpoint (\d+), test accuracy (\d\.\d{3})$", job.output, re.MULTILINE)
    numbers = [int(number) for number, _ in evaluated]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 8, job.output
    trained = re.search(rf"^chief: trained on {ranks - 1} ranks, test accuracy (.*)$", job.output, re.MULTILINE)
    assert trained is not None and evaluated[-1][1] == trained[1], job.output
    assert float(trained[1]) >= 0.93, job.output


@pytest.mark.nightly
def test_an_evaluator_alone_is_told_that_it_needs_a_chief() -> None:
    job = run(1, "examples/evaluator.py")
    assert job.code != 0
    assert job.output.count("a chief and an evaluator are 2 ranks; there is one (mpirun -np 2)") == 1, job.output
