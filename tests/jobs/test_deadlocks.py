"""Ranks that all wait for each other fail after MPISTRAT_DEADLOCK_S. Ranks that are merely slow do not."""

import pytest

from ..support.jobs import Finished, run_job
from ..support.levels import sample

CROSSED = "left: ranks [0] wait for ranks [1], which wait for right instead."
# What each case of deadlocks.py comes to on two ranks: the text of the error, or the result.
ARRAYS = {
    "crossed_names": CROSSED,
    "crossed_names_with_idle_threads": CROSSED,
    "crossed_handles": CROSSED,
    "a_rank_that_sleeps": "returned 4.0",
    "a_rank_with_nothing_in_flight": "returned 4.0",
    "orders_of_their_own": "returned 4.0",
    "a_thread_that_sleeps_first": "returned 4.0",
    "a_thread_that_waits_with_a_limit_first": "returned 4.0",
    "a_thread_that_reads_first": "returned 4.0",
    "ranks_that_have_ended_and_one_that_works": "returned shut down",
}
TENSORFLOW = {
    "uneven_parts_of_the_data":
        "optimizer1/metric_average.heads: ranks [0] wait for ranks [1], which wait for optimizer1 instead.",
    "a_graph_and_an_eager_call": "in_a_graph: ranks [0] wait for ranks [1], which wait for eager instead.",
    "compiled_functions_of_other_orders": CROSSED,
    "runs_of_other_orders": CROSSED,
    "a_graph_with_one_collective_more": "session()/allreduce of extra: ranks [0] wait for ranks [1], which wait for "
                                        "session()/allreduce of wanted",
    "a_graph_that_computes": "returned 4.0",
    "a_graph_that_waits_for_a_file": "returned 4.0",
    "a_graph_that_calls_python": "returned 4.0",
    "a_graph_that_reads_data": "returned 4.0",
    "graphs_of_other_orders": "returned 4.0",
    "evaluation_on_rank_0_only": "returned 4.0",
}


def cases_of(job: Finished, rank: int) -> dict[str, str]:
    """What a rank said that each case came to."""
    *lines, end = job.of_rank(rank)
    assert end == "ends", job.output
    return dict(zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.horovod("names-differ")
@sample(("kind", "expected"), [("arrays", ARRAYS), ("tensorflow", TENSORFLOW)],
                         ids=["arrays", "tensorflow"])
def test_all_ranks_that_wait_for_each_other_fail_soon_and_no_others(kind: str, expected: dict[str, str]) -> None:
    # Without the check of fit, which finds uneven parts of the data before they become a deadlock.
    job = run_job(2, ["python", "tests/scripts/deadlocks.py", kind], limit_s=300,
                  env={"MPISTRAT_CHECK_ACTION": "off", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "90"}).well()
    for rank in range(2):
        cases = cases_of(job, rank)
        assert list(cases) == list(expected), job.output
        for case, result in cases.items():
            if expected[case].startswith("returned "):
                assert result == expected[case], f"{case}: {job.output}"
                continue
            assert "DeadlockError: This is a deadlock: every rank waits for" in result, f"{case}: {job.output}"
            assert expected[case] in result, f"{case}: {job.output}"
            assert "hvd.shard(x, y)" in result, f"{case}: {job.output}"
