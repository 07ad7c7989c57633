"""What a launcher (mpirun, srun) has put into the environment of this process."""

from collections.abc import Mapping

# Variables that hold the number of processes of the job, by what sets them.
_SIZE_NAMES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an MPICH-like mpirun or srun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
# What `mpistrat run` puts into the environment of mpirun: its process, and a text that no other run has. Not a setting.
RUN_NAME = "_MPISTRAT_RUN"

# Variables that together are different for each process that a launcher starts.
_RANK_NAMES = ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_FD", "MV2_COMM_WORLD_RANK",
               "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


def launched_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many processes the launcher started, and what launched them; (1, "") without a launcher.

    Only variables that a launcher sets for each process count: a shell in a Slurm allocation has SLURM_NTASKS too, but
    a script that is run there without srun is one process.
    """
    for name, launcher in _SIZE_NAMES.items():
        # A batch script is a step of one task, and has no SLURM_STEP_NUM_TASKS that speaks of srun's tasks.
        if name.startswith("SLURM") and "SLURM_PROCID" not in environ:
            continue
        value = environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value), launcher
    if "PMIX_RANK" in environ:
        return 0, "a PMIx launcher"  # PMIx tells the size only to a library that asks.
    return 1, ""


def identity(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What tells the processes apart that a launcher has started; () without a launcher.

    Equal for a rank and what it starts, and for the shells and other programs that were started in order to start it.
    """
    if launched_size(environ) == (1, ""):
        return ()
    return tuple(environ.get(name, "") for name in _RANK_NAMES)
