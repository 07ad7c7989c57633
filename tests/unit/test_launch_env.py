"""The number of processes and the launcher, as read from the environment."""

import pytest

from mpistrat.process.launch_env import launched_size


def test_without_a_launcher_there_is_one_process() -> None:
    assert launched_size({"PATH": "/bin", "HOME": "/root"}) == (1, "")


@pytest.mark.parametrize(("environ", "size", "launcher"), [
    ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, 4, "Open MPI's mpirun"),
    ({"PMI_SIZE": "3", "PMI_RANK": "2"}, 3, "an MPICH-like mpirun or srun"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, 2, "MVAPICH's mpirun"),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, 8, "srun")])
def test_the_size_is_read_for_each_launcher(environ: dict[str, str], size: int, launcher: str) -> None:
    assert launched_size(environ) == (size, launcher)


def test_a_launcher_of_one_process_is_a_launcher() -> None:
    assert launched_size({"OMPI_COMM_WORLD_SIZE": "1"}) == (1, "Open MPI's mpirun")


def test_mpirun_inside_an_allocation_counts_and_not_the_allocation() -> None:
    assert launched_size({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == (
        2, "Open MPI's mpirun")


@pytest.mark.parametrize("environ", [
    {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # salloc's shell
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
    {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}])  # what a shell may have kept from a step
def test_a_script_in_a_slurm_allocation_without_srun_is_one_process(environ: dict[str, str]) -> None:
    assert launched_size(environ) == (1, "")


@pytest.mark.parametrize("text", ["", "0", "-2", "two", "2.0"])
def test_a_value_that_is_not_a_size_is_ignored(text: str) -> None:
    assert launched_size({"PMI_SIZE": text}) == (1, "")


def test_under_pmix_alone_the_size_is_unknown() -> None:
    size, launcher = launched_size({"PMIX_RANK": "0"})
    assert size == 0
    assert "PMIx" in launcher
