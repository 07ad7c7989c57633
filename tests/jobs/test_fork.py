"""Processes that ranks fork or start: they end as others do, are no ranks, and do no harm to the job."""

import sys

import pytest

from ..support.jobs import run_job, run_limited

_SUMS = "sums [2.0, 2.0]"
_REFUSAL = "NotInitializedError: this process was forked from a rank (process "


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "code"), [("ends", 0), ("exits with 5", 5), ("raises", 1)])
def test_a_forked_process_ends_at_once_and_the_job_goes_on(way: str, code: int) -> None:
    job = run_job(2, ["python", "tests/scripts/forked.py", way]).well()
    for rank in range(2):
        assert job.of_rank(rank) == [f"the child ended with {code}", _SUMS], job.output
    assert job.output.count("RuntimeError: failed in the child") == (2 if way == "raises" else 0), job.output
    assert "ends the job" not in job.output, job.output


def test_a_forked_process_knows_its_rank_and_is_refused_everything_else() -> None:
    job = run_job(2, ["python", "tests/scripts/forked.py", "calls"]).well()
    for rank in range(2):
        own, size, is_initialized, *refusals, shutdown, end, sums = job.of_rank(rank)
        assert [own, size, is_initialized] == [f"returned {rank}", "returned 2", "returned True"], job.output
        assert len(refusals) == 11, job.output
        for refusal in refusals:
            assert refusal.startswith(_REFUSAL), job.output
            assert "multiprocessing.get_context('spawn')" in refusal, job.output
        assert [shutdown, end, sums] == ["returned None", "the child ended with 0", _SUMS], job.output


@pytest.mark.nightly
def test_a_forked_process_is_refused_collectives_on_tensors() -> None:
    job = run_job(2, ["python", "tests/scripts/forked.py", "calls on tensors"]).well()
    for rank in range(2):
        *answers, end, sums = job.of_rank(rank)
        assert len(answers) == 15 and all(answer.startswith(_REFUSAL) for answer in answers), job.output
        assert [end, sums] == ["the child ended with 0", _SUMS], job.output


@pytest.mark.nightly
def test_a_process_that_a_lone_rank_has_forked_is_no_rank_either() -> None:
    job = run_limited([sys.executable, "tests/scripts/forked.py", "calls"]).well()
    *calls, end, sums = job.of_rank(0)
    refused = sum(call.startswith(_REFUSAL) for call in calls)
    assert refused in (10, 11), job.output  # The pending result of a lone rank may have come before the fork.
    assert [end, sums] == ["the child ended with 0", "sums [1.0]"], job.output


@pytest.mark.nightly
def test_a_program_that_a_rank_starts_does_not_take_the_place_of_the_rank() -> None:
    job = run_job(2, ["python", "tests/scripts/started.py"], limit_s=200).well()
    for rank in range(2):
        refusal, query, end, total = job.of_rank(rank)
        assert refusal.startswith("NotInitializedError: this process was started by a rank (process "), job.output
        assert refusal.endswith("if __name__ == '__main__':"), job.output
        assert query.startswith("NotInitializedError: mpistrat has not been initialized"), job.output
        assert [end, total] == ["the worker ended with 4", "sum 2.0"], job.output


def test_data_may_come_from_worker_processes_and_threads() -> None:
    job = run_job(2, ["python", "tests/scripts/data_workers.py"], limit_s=300).well()
    expected = [f"{source}: the same weights on all ranks: True" for source in ("PyDataset", "tf.data", "a pool")]
    for rank in range(2):
        assert job.of_rank(rank) == expected * 2, job.output


@pytest.mark.nightly
def test_a_program_that_a_rank_starts_inherits_none_of_its_descriptors() -> None:
    job = run_job(2, ["python", "tests/scripts/inherited.py"]).well()
    for rank in range(2):
        assert job.of_rank(rank) == ["opened True, inherited []"], job.output
