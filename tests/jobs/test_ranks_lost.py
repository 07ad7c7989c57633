"""Ranks that end in the middle of a job: the others learn of it, and recover if the job was started so."""

import json
import re
import sys

import pytest

from ..support.jobs import Finished, run_job
from ..support.levels import sample

TOLERANT = ["--with-ft", "ulfm"]
# By kind: the number of ranks, and those that are killed.
KINDS = {"eager": (3, "1"), "negotiated": (3, "0"), "gathered": (4, "0,2"), "sets": (4, "0,3"), "joined": (3, "0"),
         "recovery": (4, "1,2"), "function": (3, "0"), "session": (3, "1"), "fit": (3, "2"), "strategy": (3, "1"),
         "compiled_function": (3, "0"), "compiled_fit": (3, "2"), "compiled_strategy": (3, "1")}


@pytest.fixture(scope="module", autouse=True)
def ulfm() -> None:
    """Skip the tests without an Open MPI that has ULFM."""
    probe = run_job(1, ["true"], mpirun_args=TOLERANT)
    if probe.code:
        pytest.skip(f"mpirun does not know --with-ft ulfm: {probe.output}")


def run(ranks: int, *command: str) -> Finished:
    """A script under ULFM, of which nothing is left."""
    job = run_job(ranks, ["python", *command], mpirun_args=TOLERANT)
    assert job.left == (), job.output
    return job


@sample("kind", KINDS)
def test_the_ranks_that_are_left_go_on_with_right_results(kind: str) -> None:
    ranks, victims = KINDS[kind]
    job = run(ranks, "tests/scripts/ranks_lost.py", kind, victims, "0.2").well()
    print(job.said)
    assert len(re.findall("went on as rank", job.output)) == ranks - len(victims.split(",")), job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "report"), [
    ("raises", "rank 1 on {host} ends: KeyError: 'a mistake'"), ("exits", "rank 1 on {host} ends with exit code 3: "
                                                                          "sys.exit(3)"), ("is killed", "")])
def test_a_rank_that_fails_ends_alone(way: str, report: str) -> None:
    job = run(3, "tests/scripts/one_ends.py", way, "0")
    for rank in (0, 2):
        assert job.of_rank(rank) == ["lost [1]", "sum 2.0"], job.output
    assert re.search(re.escape(report).replace(r"\{host\}", r"\S+"), job.output), job.output
    assert job.code == {"raises": 1, "exits": 3, "is killed": 0}[way], job.output
    assert job.output.count("the first handler has run") == 2 + (way == "exits"), job.output


@pytest.mark.nightly
def test_the_exit_code_after_a_loss_is_that_of_the_script() -> None:
    assert run(3, "tests/scripts/one_ends.py", "is killed", "7").code == 7


@pytest.mark.nightly
def test_a_recovery_leaves_nothing_behind() -> None:
    job = run(3, "tests/scripts/recover_often.py").well()
    for rank in range(3):
        early, late = json.loads(job.of_rank(rank)[0])
        megabytes = late.pop("MiB") - early.pop("MiB")
        assert late == early, job.output
        assert megabytes < 100, job.output  # Each of 17 recoveries has 33 MiB of shared memory.


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["shared_memory", "mpi"])
def test_every_wait_ends_when_ranks_are_lost(backend: str) -> None:
    job = run_job(3, ["python", "tests/scripts/lose_ends_waits.py"], env={"MPISTRAT_CPU_OPERATIONS": backend}).well()
    kinds = [line for line in job.of_rank(0) if ":" in line]
    assert len(kinds) == 9, job.output
    for line in kinds:
        kind, rest = line.split(": ")
        assert rest == ("no error soon" if kind == "in_shutdown" else "RanksLostError soon; later RanksLostError"), line
    assert [job.of_rank(rank)[-1] for rank in range(3)] == ["done"] * 3, job.output


@pytest.mark.nightly
def test_a_job_that_cannot_go_on_ends_even_if_mpirun_does_not_see_the_end_of_a_rank() -> None:
    # The shell lives on, and mpirun knows only that.
    job = run_job(2, ["sh", "-c", f"{sys.executable} tests/scripts/one_ends.py 'is killed' 0; sleep 60"], limit_s=50)
    assert re.search(r"rank 0 on \S+ ends the job: this rank has lost rank 1 on \S+ \(process \d+ has died\), without",
                     job.output), job.output
    assert job.code == 1, job.output
