"""What the environment says about the launcher (mpirun, srun) of this process.

The functions are pure functions of the environment. Any process may call them, before init() too.
"""

from collections.abc import Mapping

SRUN = "srun"
# Variables with the number of processes of the job, and the launcher that sets each.
_SIZE_NAMES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an MPICH-like mpirun or srun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": SRUN,
}
# `mpistrat run` sets this for mpirun: its process number and a random text that is unique to the run. Not a setting.
RUN_NAME = "_MPISTRAT_RUN"
# `mpistrat run` sets this for the ranks on all hosts: how a rank that fails says why (`report`). Not a setting.
RUN_REPORTS = "_MPISTRAT_REPORTS"
# `mpistrat run` sets this for the ranks on all hosts if mpirun binds none of them: they share the cores when Python
# starts; with the value "report" each prints which. Not a setting.
RUN_CORES = "_MPISTRAT_CORES"
# `mpistrat run --elastic` sets this for the ranks on all hosts: the job, as JSON (elastic/job.py). Not a setting.
RUN_ELASTIC = "_MPISTRAT_ELASTIC"
# `mpistrat run --efficiency` sets this for the ranks on all hosts: after how many steps the script ends. Not a setting.
RUN_STEPS = "_MPISTRAT_STEPS"
# `mpistrat run --as-horovod=keras2` sets this for the ranks on all hosts: Keras 3 takes three words of Keras 2. Not a
# setting.
RUN_KERAS_2 = "_MPISTRAT_KERAS_2"

# The values of these variables together differ for every process that a launcher starts.
_RANK_NAMES = ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_FD", "MV2_COMM_WORLD_RANK",
               "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


def launched_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of processes that the launcher started, and the launcher's name.

    (1, "") means that there is no launcher. A size of 0 means that only the MPI library knows it.

    Only variables that a launcher sets for each process count. SLURM_NTASKS does not: a shell in a Slurm allocation has
    it too, and a script that is run there without srun is one process.
    """
    for name, launcher in _SIZE_NAMES.items():
        # Only a process that srun started has both. A batch script has SLURM_PROCID alone; a shell may have kept
        # SLURM_STEP_NUM_TASKS from a step.
        if name.startswith("SLURM") and "SLURM_PROCID" not in environ:
            continue
        value = environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value), launcher
    if "PMIX_RANK" in environ:
        return 0, "a PMIx launcher"  # A process gets the size from a PMIx library, not from the environment.
    return 1, ""


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process; 0 if it says none."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "PMIX_RANK")
    found = (environ.get(name, "") for name in names)
    return next((int(value) for value in found if value.isdigit()), 0)


def identity(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return values that differ for every process that the launcher started; () without a launcher.

    A rank, its child processes, and the shells and wrappers that a launcher runs to start the rank have the same
    identity.
    """
    if launched_size(environ) == (1, ""):
        return ()
    return tuple(environ.get(name, "") for name in _RANK_NAMES)
