"""The measurements for a GPU run to their end, on a stand-in; their figures say nothing."""


from ..support.jobs import needs_mpirun, run_job
from ..support.levels import sample


@needs_mpirun
@sample("ranks", [1, 2])
def test_every_figure_is_printed(ranks: int) -> None:
    job = run_job(ranks, ["python", "tests/scripts/gpu_figures.py", "--stand-in"])
    assert job.code == 0, job.output
    rows = [line for line in job.output.splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows] == [*["pack"] * 5, *["step"] * 2, "a" if ranks == 1 else "overhead",
                                                "staged"], job.output
    steps = [row for row in rows if row.startswith("| step of")]
    assert not any("record 0" in row or "batched_copy 0" in row for row in steps), "calls were not counted"
    assert all("scratch 0, pinned 0" in row for row in steps)
