"""The functions and constants that `mpistrat`, `mpistrat.tensorflow` and `mpistrat.keras` all export.

This module defines the queries (ranks, sizes, hosts, roles) and the functions that change process sets. Any thread may
call these functions after init(). They are local, except add_process_set and remove_process_set, which are collective.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..core import forked
from ..core.errors import MissingDependencyError, MpistratError
from ..core.install import pip_extra
from ..core.request import Adasum, Average, Max, Min, Product, Sum
from ..core.roles import Role, assign_roles
from ..core.roles import cluster_spec as _cluster_spec
from ..transport.mpi import mpi_library
from . import runtime
from .array_ops import allgather_object, broadcast_object
from .process_sets import ProcessSet, global_process_set
from .runtime import init, is_initialized, shutdown
from .sharding import shard
from .tensors import why_no_cupy

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "allgather_object",
    "broadcast_object", "ccl_built", "cluster_spec", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_built", "gloo_enabled", "gpu_available", "hosts", "init", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "rank", "remove_process_set", "rocm_built", "role", "shard", "shutdown", "size", "start_timeline", "stop_timeline",
]

logger = logging.getLogger(__name__)


def rank() -> int:
    """Return the rank of this process, from 0 to size() - 1."""
    return runtime.current().topology.rank


def size() -> int:
    """Return the number of ranks."""
    return runtime.current().topology.size


def local_rank() -> int:
    """Return this rank's index among the ranks of its host, from 0."""
    return runtime.current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this rank's host."""
    return runtime.current().topology.local_size


def cross_rank() -> int:
    """Return this rank's index, from 0, among all ranks that have the same local_rank()."""
    return runtime.current().topology.cross_rank


def cross_size() -> int:
    """Return the number of hosts on which a rank has the same local_rank() as this rank."""
    return runtime.current().topology.cross_size


def hosts() -> tuple[str, ...]:
    """Return the names of the hosts, sorted by the lowest rank on each host."""
    return runtime.current().topology.hosts


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return runtime.current().topology.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start a timeline: rank 0 writes the operations of all ranks to a file. Local.

    Calls on ranks other than 0 have no effect. `mpistrat timeline FILE` summarizes the file. If the path cannot be
    written, the disk is full, or rank 0 is already writing a timeline, rank 0 logs a warning.

    Args:
        file_path: The file to write, in Chrome's trace format, for https://ui.perfetto.dev. An old file is replaced.
        mark_cycles: Whether to mark the start of each engine cycle, which executes operations that all ranks called.
    """
    forked.require_rank()
    tracer = runtime.current().tracer
    if tracer is None:
        logger.warning("mpistrat: there is no timeline, because MPISTRAT_RECORDER=0.")
    else:
        tracer.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline that start_timeline() or MPISTRAT_TIMELINE began, if any, and complete its file. Local.

    Calls on ranks other than 0 have no effect. shutdown() calls stop_timeline().
    """
    forked.require_rank()
    tracer = runtime.current().tracer
    if tracer is not None:
        tracer.stop_timeline()


def role(jobs: dict[str, int] | None = None) -> Role:
    """Return this rank's role in a TensorFlow cluster.

    Args:
        jobs: The number of ranks for each role, in rank order, for example
            `{"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}`. Default: rank 0 is the chief, all others are workers.

    Raises:
        ValueError: A role is unknown, `jobs` does not begin with one chief, or the counts do not add up to size().
    """
    topology = runtime.current().topology
    return assign_roles(topology.size, jobs)[topology.rank][0]


def cluster_spec(ports: list[int], jobs: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the content of TF_CONFIG for this rank: `{"cluster": {role: ["host:port", ...]}, "task": {...}}`.

    If all ranks are on one host, the addresses are `localhost`. An evaluator is a task but not part of the cluster.

    Args:
        ports: A TCP port for each rank, in rank order.
        jobs: The number of ranks for each role; see `role`.

    Raises:
        ValueError: `jobs` is invalid (see `role`), or `ports` does not have size() numbers.
    """
    return _cluster_spec(runtime.current().topology, ports, jobs)


def mpi_threads_supported() -> bool:
    """Return whether several threads may call the MPI library at once (THREAD_MULTIPLE). Loads that library."""
    runtime.current()
    try:
        mpi = mpi_library.load_mpi()
    except MissingDependencyError:
        return False
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether this job communicates over MPI."""
    return runtime.current().comm is not None


def mpi_built() -> bool:
    """Return True: mpistrat always supports MPI, through mpi4py."""
    return True


def nccl_built() -> int:
    """Return NCCL's version code (22805 is 2.28.5), or 0 if NCCL cannot be used. Imports cupy if it is installed."""
    if why_no_cupy():
        return 0
    from ..gpu.device import Device
    return Device.nccl_version()


def gloo_built() -> bool:
    """Return False: there is no Gloo backend."""
    return False


def gloo_enabled() -> bool:
    """Return False: there is no Gloo backend."""
    return False


def ddl_built() -> bool:
    """Return False: there is no DDL backend."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL backend."""
    return False


def rocm_built() -> bool:
    """Return False: there is no backend for AMD GPUs."""
    return False


def cuda_built() -> bool:
    """Return whether mpistrat can reduce tensors on CUDA GPUs, which needs cupy. Imports cupy if it is installed."""
    return not why_no_cupy()


def gpu_available(ext_base_name: str = "", verbose: bool = False) -> bool:
    """Return whether this process sees a CUDA GPU and can reduce tensors on it. Imports cupy if it is installed.

    Args:
        ext_base_name: Accepted for compatibility with Horovod, ignored. The result is the same for all frameworks.
        verbose: If the result is False, print the reason.
    """
    problem = why_no_cupy()
    if problem:
        reason = f"cupy is missing: {problem}"
    else:
        from ..gpu.device import gpu_count
        reason = "" if gpu_count() else "no GPU is visible"
    if reason and verbose:
        print(f"gpu_available: {reason}")
    return reason == ""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, and return it. Collective over all ranks of the job, even ranks that are not in the set.

    Args:
        process_set: A list of ranks, or a ProcessSet. All ranks must pass the same set. Only sets that are made from
            communicators may differ: each rank passes the set that it has made from its own communicator.

    Raises:
        InvalidRequestError: On all ranks, if the set is empty, has ranks that do not exist, or is registered already,
            or if the ranks pass different sets. Nothing is registered.
        MpistratError: On all ranks, if MPI was initialised with a thread level below MULTIPLE, or if any rank cannot
            connect to the other ranks of a set. Nothing is registered.
        NotInitializedError: Before init() or after shutdown().
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    runtime.current().registry.add([made])
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks of the job. Operations in flight in the set are completed first.

    Returns:
        Whether a set was removed: False if `process_set` is the set of all ranks, or is not registered.

    Raises:
        InvalidRequestError: On all ranks, if the ranks pass different sets.
        NotInitializedError: Before init() or after shutdown().
    """
    return runtime.current().registry.remove(process_set)


# -- which backends can run, for mpistrat doctor ----------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a table that `mpistrat doctor` prints. It describes one package, library or backend."""

    label: str  # The name of the item.
    text: str  # The version, or what is missing and how to install it. For a backend: "yes" or "no" with the reason.
    is_available: bool = True  # Whether the item can be used.
    needed: bool = False  # Whether training needs the item.


def backends() -> list[Row]:
    """Check whether each backend can be used, and return a row for each. Local. Loads MPI, and cupy if installed."""
    problems = {"local": "", "mpi": ""}
    try:
        mpi_library.require_thread_level(mpi_library.load_mpi())
    except MpistratError as error:
        problems["mpi"] = str(error)
    problems |= {"shared_memory": why_no_shared_memory(), "nccl": _why_no_nccl()}
    yes = {"local": "yes (one rank only)", "mpi": "yes", "nccl": "yes (tensors on GPUs)",
           "shared_memory": "yes (tensors of all sizes, among the ranks of a host)"}
    return [Row(name, f"no: {problem}" if problem else yes[name], is_available=not problem)
            for name, problem in problems.items()]


def why_no_shared_memory() -> str:
    """Return why processes of this host cannot share memory, or "" if they can. Local."""
    from ..transport.host_link import HostFile
    try:
        file = HostFile.make()
        try:
            file.map(4096)
        finally:
            file.close()
    except OSError as error:
        return str(error)
    return ""


def _why_no_nccl() -> str:
    problem = why_no_cupy()
    if problem:
        return f"cupy is missing: {problem}"
    from ..gpu.device import Device, gpu_count
    if not Device.nccl_version():
        return f"cupy finds no NCCL ({pip_extra('gpu')})"
    return "" if gpu_count() else "no GPU is visible"
