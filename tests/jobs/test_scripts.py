"""Programs of tests/scripts on several ranks, and what they print: orders of collectives, chunks, process sets,
sessions, 8-bit numbers, join() and MPIStrategy.
"""

import json
from pathlib import Path

import pytest

from ..support.jobs import run_job
from ..support.levels import sample


def test_tensors_on_a_gpu_in_another_order_on_each_rank() -> None:
    job = run_job(2, ["python", "tests/scripts/shuffled_order.py", "10", "20", "gpu"])
    job.assert_each_says(2, lambda rank: f"rank {rank}: 10 steps of 20 tensors are right, 0 errors")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_while_tensorflow_executes_in_the_background(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/asynchronous.py"], limit_s=180)
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: trained")


# Over TCP a large message needs calls of MPI by its sender; and with one child each, rank 1 sends to another host.
@pytest.mark.nightly
@pytest.mark.parametrize("rounds, tree, mpi", [("300", [], {}), ("100", ["1"], {
    "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"})], ids=["flat", "line over TCP"])
def test_large_decisions_behind_others_while_votes_are_open_between_hosts(rounds: str, tree: list[str],
                                                                          mpi: dict[str, str]) -> None:
    limits = {"MPISTRAT_STALL_CHECK_TIME_SECONDS": "30", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "60"}
    job = run_job(4, ["python", "tests/scripts/overtaken_decisions.py", rounds, "2", *tree], limit_s=600,
                  env=limits | mpi).well()
    for rank in range(4):
        assert job.of_rank(rank) == [f"{rounds} rounds are right"], job.output


@pytest.mark.nightly
def test_compiled_functions_touch_no_variable_of_another_device() -> None:
    job = run_job(2, ["python", "tests/scripts/second_device.py"], limit_s=1200).well()
    for rank in range(2):
        assert job.of_rank(rank) == [f"{way} right" for way in (
            "horovod", "accumulated", "scaled", "strategy", "tape", "embedding", "functions")], job.output


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_repeat_are_added_in_one_order_by_all_ranks(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/repeated_rows.py", "10"], limit_s=300,
                  env={"TF_NUM_INTRAOP_THREADS": "4", "MPISTRAT_BIND": "gpu"})
    job.assert_each_says(ranks, lambda rank: f"rank {rank}: 36 trainings of 10 steps have the same bits")


# Chunks so small that small models have several, and a choice that is made again at every step.
ALWAYS_TRYING = ["SHM_CHUNK_BYTES=4096", "SHM_LARGER_CHUNKS=(8192,32768)", "SHM_CHOICE_BYTES=1", "CHUNK_KEPT_LEAST=9",
                 "CHUNK_KEPT_MOST=9"]


@pytest.mark.nightly
def test_training_has_the_same_bits_whatever_the_bytes_of_the_chunks() -> None:
    job = run_job(2, ["python", "-m", "tests.tuned", *ALWAYS_TRYING, "tests/programs/random_scripts.py", "3", "7"],
                  env={"TF_NUM_INTEROP_THREADS": "1"}, limit_s=300).well()
    assert job.output.count("3 of 3 scripts are right") == 2, job.output


@sample("backend", ["auto", "mpi"])
def test_sets_that_overlap_run_between_hosts_in_any_order(backend: str) -> None:
    job = run_job(4, ["python", "tests/scripts/process_sets.py"], env={"MPISTRAT_CPU_OPERATIONS": backend}).well()
    assert [job.of_rank(rank) for rank in range(4)] == [["all sets were right"]] * 4, job.output


@sample("ranks", [2, 1, 3])
def test_a_script_of_tensorflow_1(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/session_v1.py"], limit_s=200).well()
    assert job.output.count("ends\n") == ranks, job.output


@pytest.mark.nightly
def test_three_models_learn_as_well_with_8_bit_numbers_between_hosts() -> None:
    job = run_job(4, ["python", "tests/scripts/quantised_convergence.py"], limit_s=400).well()
    models = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"model"')]
    assert [model["model"] for model in models] == ["dense", "convolutional", "text"], job.output
    for model in models:
        print(model)
        assert model["none"] < 0.7  # It has learned: chance is 2.08.
        assert abs(model["int8"] - model["none"]) < 0.1 * model["none"] + 0.01, model


SUM_AND_AVERAGES = """
import numpy, mpistrat
mpistrat.init()
if mpistrat.rank() == 1:
    total = mpistrat.allreduce(numpy.full(3, 8.0), op=mpistrat.Sum)
    print(total, mpistrat.allreduce(numpy.full(3, 8.0)), flush=True)
mpistrat.join()
"""


@pytest.mark.horovod("join")
@sample(("average", "expected"), [("active", "[8. 8. 8.] [8. 8. 8.]"), ("all", "[8. 8. 8.] [4. 4. 4.]")])
def test_what_an_average_divides_by_is_a_setting(average: str, expected: str) -> None:
    job = run_job(2, ["python", "-c", SUM_AND_AVERAGES], env={"MPISTRAT_JOIN_AVERAGE": average}).well()
    assert expected in job.output


@pytest.mark.nightly
def test_a_rank_that_ends_instead_of_joining_ends_the_job() -> None:
    script = "import sys, mpistrat; mpistrat.init(); mpistrat.join() if mpistrat.rank() == 0 else sys.exit()"
    job = run_job(2, ["python", "-c", script])
    assert job.code != 0
    assert "join(): ranks [0] wait for ranks [1], which have already shut down" in job.output


def test_a_rank_that_leaves_the_loop_is_named() -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_left_early.py"])
    assert job.code != 0
    assert job.of_rank(0) == ["done"]
    assert "ranks [1] wait for ranks [0], which have already shut down" in job.output, job.output


@sample("what", ["metric", "variable", "checkpoint", "save", "evaluate"])
def test_what_one_rank_calls_alone_is_named_with_its_cause(what: str, tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", what, str(tmp_path)],
                  env={"MPISTRAT_DEADLOCK_S": "0"})  # It would come before the limit.
    for rank in range(2):
        error = job.of_rank(rank)[0]
        assert error.startswith("StallError: "), job.output
        assert "look for one under `if rank == 0`" in error
        assert "strategy/" in error
        assert "The engines have ended after 3 s (CommunicationOptions.timeout_seconds)" in error


@pytest.mark.nightly
def test_sharded_slots_go_on_from_a_file_with_fewer_ranks(tmp_path: Path) -> None:
    for jobs_before, ranks in enumerate((3, 2, 1)):
        job = run_job(ranks, ["python", "tests/scripts/strategy_goes_on.py", str(tmp_path)])
        steps = 4 * (jobs_before + 1)
        for rank in range(ranks):
            assert job.of_rank(rank) == [f"of {ranks}: {name} after {steps} steps, {arrays} arrays, same bits: True"
                                         for name, arrays in (("momentum", 10), ("Adam", 14))], job.output


@pytest.mark.nightly
def test_the_chief_may_save_a_model_alone_at_the_end(tmp_path: Path) -> None:
    job = run_job(2, ["python", "tests/scripts/strategy_under_one_rank.py", "save-at-the-end", str(tmp_path)]).well()
    assert job.of_rank(0) == ["returned True", "ends"], job.output
    assert (tmp_path / "model.keras").exists()
