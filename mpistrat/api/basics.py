"""Ranks and sizes: getters that read the Runtime's topology. None of them communicates."""

from ..core.roles import Role, assign_roles
from ..core.roles import cluster_spec as _cluster_spec
from . import runtime


def rank() -> int:
    """This process' rank, 0 to size() - 1."""
    return runtime.current().topology.rank


def size() -> int:
    """How many ranks there are."""
    return runtime.current().topology.size


def local_rank() -> int:
    """This rank's position among the ranks of its host."""
    return runtime.current().topology.local_rank


def local_size() -> int:
    """How many ranks this rank's host has."""
    return runtime.current().topology.local_size


def cross_rank() -> int:
    """This rank's position among the ranks of the same local_rank() on all hosts."""
    return runtime.current().topology.cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this local_rank()."""
    return runtime.current().topology.cross_size


def hosts() -> tuple[str, ...]:
    """The different hosts, in the order of their lowest rank."""
    return runtime.current().topology.hosts


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return runtime.current().topology.is_homogeneous


def role(jobs: dict[str, int] | None = None) -> Role:
    """What this rank does: chief (rank 0) or worker, or as `jobs` says (see `topology.assign_roles`)."""
    topology = runtime.current().topology
    return assign_roles(topology.size, jobs)[topology.rank][0]


def cluster_spec(ports: list[int], jobs: dict[str, int] | None = None) -> dict:
    """The content of TF_CONFIG for this rank (see `topology.cluster_spec`). `ports` holds one for each rank."""
    return _cluster_spec(runtime.current().topology, ports, jobs)


def mpi_threads_supported() -> bool:
    """Whether the MPI library may be called by several threads at once (THREAD_MULTIPLE)."""
    if runtime.current().comm is None:
        return False
    from mpi4py import MPI
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether this run communicates over MPI."""
    return runtime.current().comm is not None


def mpi_built() -> bool:
    """True: mpistrat always can use MPI, through mpi4py."""
    return True


def nccl_built() -> int:
    """NCCL's version code (22805 is 2.28.5), or 0 where it cannot be used. Imports cupy, if it is there."""
    try:
        from ..gpu.device import Device
    except ImportError:
        return 0
    return Device.nccl_version()


def gloo_built() -> bool:
    """False: there is no Gloo backend."""
    return False


def gloo_enabled() -> bool:
    """False: there is no Gloo backend."""
    return False
