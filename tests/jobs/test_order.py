"""Ranks that build their collectives in different orders, on a stand-in for a GPU and in the background, and between
hosts: no deadlock, right sums. And the order in which several threads of each rank add.
"""

import pytest

from ..support.jobs import needs_mpirun, run_job


@needs_mpirun
def test_tensors_on_a_gpu_in_another_order_on_each_rank() -> None:
    job = run_job(2, ["python", "tests/scripts/shuffled_order.py", "10", "20", "gpu"])
    job.assert_each_says(2, lambda rank: f"rank {rank}: 10 steps of 20 tensors are right, 0 errors")


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_while_tensorflow_executes_in_the_background(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/asynchronous.py"], limit_s=180)
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: trained")


# Over TCP a large message needs calls of MPI by its sender; and with one child each, rank 1 sends to another host.
@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("rounds, tree, mpi", [("300", [], {}), ("100", ["1"], {
    "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"})], ids=["flat", "line over TCP"])
def test_large_decisions_behind_others_while_votes_are_open_between_hosts(rounds: str, tree: list[str],
                                                                          mpi: dict[str, str]) -> None:
    limits = {"MPISTRAT_STALL_CHECK_TIME_SECONDS": "30", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "60"}
    job = run_job(4, ["python", "tests/scripts/overtaken_decisions.py", rounds, "2", *tree], limit_s=600,
                  env=limits | mpi)
    assert job.code == 0, job.output
    for rank in range(4):
        assert job.of_rank(rank) == [f"{rounds} rounds are right"], job.output


@pytest.mark.nightly
@needs_mpirun
def test_compiled_functions_touch_no_variable_of_another_device() -> None:
    job = run_job(2, ["python", "tests/scripts/second_device.py"], limit_s=1200)
    assert job.code == 0, job.output
    for rank in range(2):
        assert job.of_rank(rank) == [f"{way} right" for way in (
            "horovod", "accumulated", "scaled", "strategy", "tape", "embedding", "functions")], job.output


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_repeat_are_added_in_one_order_by_all_ranks(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/repeated_rows.py", "10"], limit_s=300,
                  env={"TF_NUM_INTRAOP_THREADS": "4", "MPISTRAT_BIND": "gpu"})
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: 36 trainings of 10 steps have the same bits")
