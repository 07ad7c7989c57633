"""The cores of this rank: init() gives each rank of a host an equal share, unless the launcher has bound the ranks."""

import logging
import os
from collections.abc import Sequence

from ..core.topology import Topology
from ..process import cores
from .job import log_step

logger = logging.getLogger(__name__)


def bind(topology: Topology, cpus_of: Sequence[Sequence[int]], wanted: str) -> None:
    """Bind this rank to an equal, disjoint share of the cores that the ranks of this host may use. Local.

    If the ranks of the host may use different CPUs, the launcher, the user or the start-up code of `mpistrat run` has
    bound them, and this function only logs the CPUs. Existing threads are bound too. TensorFlow makes a thread for each
    CPU when it runs its first operation.

    Args:
        cpus_of: The CPUs that each rank of the job may use.
        wanted: MPISTRAT_BIND.
    """
    local = [cpus_of[rank] for rank in range(topology.size) if topology.host_of[rank] == topology.host]
    own = frozenset(cpus_of[topology.rank])
    if not own or len(local) == 1:
        return
    if wanted not in ("all", "cores"):
        _log(topology, own, f"as it was started: MPISTRAT_BIND={wanted}")
        return
    if any(frozenset(cpus) != own for cpus in local):
        _log(topology, own, "as it was started")
        if topology.rank == 0:
            _warn_of_single_cores(local)
        return
    gpus = cores.gpu_cpus() if "CUDA_VISIBLE_DEVICES" not in os.environ else []
    chosen = cores.share(own, topology.local_rank, topology.local_size, gpus)
    if chosen is None:
        _log(topology, own, f"because the host has fewer cores than its {len(local)} ranks")
        return
    try:
        cores.take(chosen)
    except OSError as error:
        _log(topology, own, f"because it cannot be bound: {error}")
        return
    _log(topology, chosen, "its share")


def _log(topology: Topology, cpus: frozenset[int], why: str) -> None:
    log_step(topology.rank, "runs on %d CPUs of %s, %s: %s", len(cpus), topology.host, why,
             ",".join(map(str, sorted(cpus))))


def _warn_of_single_cores(local: Sequence[Sequence[int]]) -> None:
    """Warn if the launcher has bound each rank to one core of many, as Open MPI's mpirun does for two ranks."""
    try:
        all_cores = cores.physical_cores(os.sched_getaffinity(os.getppid()))  # The launcher's own process is not bound.
    except OSError:
        return
    if len(all_cores) >= 2 * len(local) and all(len(cores.physical_cores(cpus)) == 1 for cpus in local):
        each = len(all_cores) // len(local)
        logger.warning(
            "mpistrat: the launcher has bound each rank to one of %d cores, and the threads of TensorFlow with it. "
            "Start the job with `mpistrat run`, or give mpirun `--bind-to none` (Open MPI: `--map-by slot:PE=%d`): "
            "then each rank has %d cores.", len(all_cores), each, each)
