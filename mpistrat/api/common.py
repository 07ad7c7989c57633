"""The names that `mpistrat`, `mpistrat.tensorflow` and `mpistrat.keras` share: Horovod's, and `shard`.

Only these three modules import it.
"""

from ..core.request import Adasum, Average, Max, Min, Product, Sum
from .array_ops import allgather_object, broadcast_object
from .basics import (
    add_process_set,
    ccl_built,
    cluster_spec,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    hosts,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    role,
    size,
    start_timeline,
    stop_timeline,
)
from .process_sets import ProcessSet, global_process_set
from .runtime import init, is_initialized, shutdown
from .sharding import shard

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "allgather_object",
    "broadcast_object", "ccl_built", "cluster_spec", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_built", "gloo_enabled", "gpu_available", "hosts", "init", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "rank", "remove_process_set", "rocm_built", "role", "shard", "shutdown", "size", "start_timeline", "stop_timeline",
]
