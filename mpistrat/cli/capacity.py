"""Whether a machine can run so many ranks: a warning for many, an error for what cannot be meant. Pure."""

from ..core.errors import LaunchError
from .mpirun import Job, Machine, is_local
from .text import counted

MANY_PER_SLOT = 4
MOST_PER_SLOT = 100


def check_count(job: Job, machine: Machine, is_forced: bool) -> str:
    """Compare the number of ranks with the cores of this host, or with the slots of the hosts.

    Returns:
        A warning, or "".

    Raises:
        LaunchError: There are more than MOST_PER_SLOT ranks for each, and `is_forced` is False.
    """
    if is_local(job, machine):
        slots, found = machine.cores, f"{counted(machine.cores, 'core')} of this host"
    elif job.hosts is not None and job.hosts.slots is not None:
        slots, found = job.hosts.slots, f"{job.hosts.slots} slots of the hosts"
    else:
        return ""  # The batch system, or mpirun, knows the number of slots.
    if job.ranks > MOST_PER_SLOT * slots and not is_forced:
        raise LaunchError(f"-np {job.ranks} is more than {MOST_PER_SLOT} ranks for each slot; there are {slots} slots "
                          f"(the {found}). Lower -np, name more hosts (-H node1:4,node2:4), or add --force.")
    if job.ranks > MANY_PER_SLOT * slots:
        return (f"-np {job.ranks} is more than {MANY_PER_SLOT} ranks for each of the {found}. They take turns on them, "
                "and each takes memory of its own.")
    return ""
