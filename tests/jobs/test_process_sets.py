"""Process sets whose ranks are on several hosts."""


from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample


@needs_mpirun
@sample("backend", ["auto", "mpi"])
def test_sets_that_overlap_run_between_hosts_in_any_order(backend: str) -> None:
    job = run_job(4, ["python", "tests/scripts/process_sets.py"], env={"MPISTRAT_CPU_OPERATIONS": backend})
    assert job.code == 0, job.output
    assert [job.of_rank(rank) for rank in range(4)] == [["all sets were right"]] * 4, job.output
