"""strategy(name) in whole programs: one script under every name, and the example of central storage."""

import functools
import re
import sys

import pytest

from ..support.jobs import ROOT, Finished, needs_mpirun, run_job, run_limited

SCRIPT = "tests/scripts/strategy_by_name.py"
EXAMPLE = "examples/central_storage.py"


@functools.cache
def without_mpirun(name: str) -> str:
    """What the script says on one rank."""
    job = run_limited([sys.executable, str(ROOT / SCRIPT), name])
    assert job.code == 0, job.output
    return job.of_rank(0)[0]


@pytest.mark.parametrize("name", ["mirrored", "central_storage", "default"])
def test_the_same_script_gives_the_same_numbers_on_one_rank(name: str) -> None:
    assert re.fullmatch(r"returned \d\.\d{5} \d\.\d{5}", without_mpirun(name))
    assert without_mpirun(name) == without_mpirun("one_device")


@needs_mpirun
@pytest.mark.parametrize("name, ranks", [("multi_worker_mirrored", 2), ("central_storage", 3)])
def test_the_same_script_gives_the_same_numbers_on_several_ranks(name: str, ranks: int) -> None:
    job = run_job(ranks, ["python", SCRIPT, name])
    assert job.code == 0, job.output
    expected = [float(number) for number in without_mpirun("one_device").split()[1:]]
    for rank in range(ranks):
        assert [float(number) for number in job.of_rank(rank)[0].split()[1:]] == pytest.approx(expected, abs=2e-5)


# -- parameter servers ------------------------------------------------------------------------------------------------


@needs_mpirun
def test_two_ranks_are_too_few_for_parameter_servers() -> None:
    job = run_job(2, ["python", SCRIPT, "parameter_server"])
    for rank in range(2):
        assert job.of_rank(rank) == ["InvalidRequestError: a coordinator, a worker and a parameter server are 3 ranks; "
                                     "there are 2 (mpirun -np 3)."], job.output


@needs_mpirun
def test_jobs_that_do_not_fit_the_ranks_are_an_error_on_every_rank() -> None:
    job = run_job(2, ["python", SCRIPT, "parameter_server", "chief=1", "worker=2", "ps=1"])
    for rank in range(2):
        said = job.of_rank(rank)
        assert said[0].startswith("ClusterError: ") and "need 4 ranks, but there are 2" in said[0], job.output


# -- the example ------------------------------------------------------------------------------------------------------


def last_lines(job: Finished) -> tuple[list[int], float, int, str]:
    """Bytes of each rank's optimizer, the accuracy, the number of ranks and the digest of the weights."""
    assert job.code == 0, job.output
    found = re.search(r"^test accuracy (\d\.\d+), norm of the weights \d+\.\d+, (\d) ranks\n"
                      r"sha256 of the weights: ([0-9a-f]{64})$", job.output, re.MULTILINE)
    assert found is not None, job.output
    slots = re.findall(r"^rank \d: (\d+) bytes for the optimizer$", job.output, re.MULTILINE)
    return [int(nbytes) for nbytes in slots], float(found[1]), int(found[2]), found[3]


def test_the_example_is_short_and_runs_without_mpirun() -> None:
    assert len((ROOT / EXAMPLE).read_text().splitlines()) < 80
    slots, accuracy, ranks, _ = last_lines(run_limited([sys.executable, str(ROOT / EXAMPLE), "--epochs", "4"]))
    assert accuracy > 0.8
    assert (len(slots), ranks) == (1, 1)


@needs_mpirun
def test_the_example_keeps_slots_once_and_gives_the_bits_of_mirrored() -> None:
    ranks = 3
    central = last_lines(run_job(ranks, ["python", EXAMPLE, "--epochs", "2"]))
    mirrored = last_lines(run_job(ranks, ["python", EXAMPLE, "--epochs", "2", "--strategy", "mirrored"]))
    assert central[3] == mirrored[3]
    assert mirrored[0] == [central[0][0]] * ranks
    assert all(nbytes < 20 for nbytes in central[0][1:])
