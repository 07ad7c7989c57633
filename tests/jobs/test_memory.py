"""Whole jobs: which backend reduces, how ranks agree, what is left of shared memory, and that memory does not grow."""

import os
import re
import signal
import time

import psutil
import pytest

from ..support.jobs import mpirun_line, processes_of, run_job, running

MANY = ["python", "tests/scripts/many_allreduces.py"]


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "mpistrat" in name}


@pytest.mark.nightly
def test_ten_thousand_steps_do_not_let_memory_grow() -> None:
    job = run_job(2, [*MANY, "2000"], limit_s=600).well()
    assert [job.of_rank(rank) for rank in range(2)] == [["shared_memory with votes stays"]] * 2, job.output


# For the requests that are kept, up to a number, and for blocks of results of other sizes. 16 MB were seen, and no more
# than 27 MB in 40,000 steps.
MOST_GROWTH_BYTES = 32 * 10**6


@pytest.mark.nightly
@pytest.mark.parametrize("operations", ["shared_memory", "mpi"])
def test_ten_thousand_collectives_of_other_sizes_leave_neither_memory_nor_descriptors(operations: str) -> None:
    job = run_job(2, ["python", "tests/scripts/varied_sizes.py", "10000"], limit_s=600,
                  env={"MPISTRAT_CPU_OPERATIONS": operations}).well()
    for rank in range(2):
        line, = job.of_rank(rank)
        grown = re.fullmatch(r"grown by (-?\d+) bytes, other descriptors: \[\]", line)
        assert grown and int(grown[1]) < MOST_GROWTH_BYTES, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("operations", "way"), [("shared_memory", "with votes"), ("mpi", "without votes")])
def test_either_backend_can_be_asked_for(ranks: int, operations: str, way: str) -> None:
    job = run_job(ranks, [*MANY, "3"], env={"MPISTRAT_CPU_OPERATIONS": operations}).well()
    assert [job.of_rank(rank) for rank in range(ranks)] == [[f"{operations} {way} stays"]] * ranks, job.output


# The number of ranks, how many of them a host has, and what then reduces.
HOSTS = {"one host": (2, 2, "shared_memory"), "two hosts of one rank": (2, 1, "hierarchical"),
         "two hosts of two ranks": (4, 2, "hierarchical")}


# On one host, the test above has ranks that vote.
@pytest.mark.nightly
@pytest.mark.parametrize(("disabled", "hosts", "ranks"), [
    (disabled, hosts, HOSTS[hosts][0]) for disabled in ("fast_path", "none") for hosts in HOSTS
    if (disabled, hosts) != ("none", "one host")])
def test_ranks_vote_unless_the_setting_says_no(disabled: str, hosts: str, ranks: int) -> None:
    _, ranks_per_host, operations = HOSTS[hosts]
    job = run_job(ranks, [*MANY, "3", str(ranks_per_host)], env={"MPISTRAT_DISABLE": disabled}).well()
    expected = f"{operations} {'with' if disabled == 'none' else 'without'} votes stays"
    assert [job.of_rank(rank) for rank in range(ranks)] == [[expected]] * ranks, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("fusion_bytes", ["0", "1000", "100000"])
def test_any_fusion_threshold_gives_the_same_results(fusion_bytes: str) -> None:
    run_job(3, [*MANY, "3"], env={"MPISTRAT_FUSION_THRESHOLD": fusion_bytes}).well()


# A limit on the size of files is one on memory that is shared as an anonymous file.
WITHOUT_MEMORY = ["sh", "-c", '[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 0 ] && ulimit -f 100; exec "$@"', "sh",
                  *MANY, "3"]


def test_without_room_for_shared_memory_mpi_serves_with_one_warning() -> None:
    job = run_job(3, WITHOUT_MEMORY).well()
    assert [job.of_rank(rank)[-1] for rank in range(3)] == ["mpi without votes stays"] * 3, job.output
    problem = re.findall(r"(?m)^(rank \d): [\d.]+ MiB of memory cannot be shared among the ranks of", job.output)
    assert problem == ["rank 0"], job.output
    assert job.output.count("MPI is used instead, which is slower") == 1, job.output


@pytest.mark.nightly
def test_with_little_room_for_shared_memory_the_chunks_are_small() -> None:
    little = [*WITHOUT_MEMORY[:2], WITHOUT_MEMORY[2].replace("ulimit -f 100", "ulimit -f 40000"), *WITHOUT_MEMORY[3:]]
    job = run_job(3, little, env={"MPISTRAT_LOG_LEVEL": "info"}).well()
    assert job.output.count("Smaller chunks of memory are tried.") == 2, job.output
    assert [job.of_rank(rank)[-1] for rank in range(3)] == ["shared_memory with votes stays"] * 3, job.output


@pytest.mark.nightly
def test_without_room_for_shared_memory_that_was_asked_for_every_rank_is_told() -> None:
    job = run_job(2, WITHOUT_MEMORY, env={"MPISTRAT_CPU_OPERATIONS": "shared_memory"})
    assert job.code != 0
    assert job.output.count("MpistratError: MPISTRAT_CPU_OPERATIONS=shared_memory: rank 0: ") >= 2, job.output


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    before = segments()
    with running(mpirun_line(2, ["python", "tests/scripts/many_allreduces.py", "1000000"])) as (process, job, _):
        ranks: list[psutil.Process] = []
        until = time.monotonic() + 60
        while not (len(ranks) == 2 and all(shares_memory(rank) for rank in ranks)):
            assert time.monotonic() < until, "the ranks do not come to share memory"
            time.sleep(0.05)
            ranks = [p for p in processes_of(job, "python") if "many" in " ".join(p.info["cmdline"] or ())]
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        assert process.wait(60) != 0
    assert segments() == before


def shares_memory(process: psutil.Process) -> bool:
    """Whether the process has the memory that ranks of a host share."""
    try:
        return any("memfd:mpistrat" in mapping.path for mapping in process.memory_maps())
    except psutil.Error:
        return False
