"""What a launcher (mpirun, srun) has put into the environment of this process."""

from collections.abc import Mapping

# Variables that hold the number of processes of the job, by what sets them.
_SIZE_NAMES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an MPICH-like mpirun or srun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


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
