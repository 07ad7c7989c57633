"""mpistrat: data-parallel training over MPI. This module is the door without a framework: collectives on arrays.

    import numpy, mpistrat
    mpistrat.init()
    print(mpistrat.allreduce(numpy.arange(3.0), op=mpistrat.Sum))

Importing it loads neither TensorFlow nor an MPI library. `mpistrat.tensorflow` and `mpistrat.keras` stand on it.
"""

from .array_ops import (
    AsyncResult,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    grouped_allreduce,
    grouped_allreduce_async,
)
from .basics import (
    cluster_spec,
    cross_rank,
    cross_size,
    gloo_built,
    gloo_enabled,
    hosts,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    role,
    size,
)
from .errors import (
    ClusterError,
    CollectiveError,
    DuplicateNameError,
    EngineError,
    InvalidRequestError,
    MismatchError,
    MissingDependencyError,
    MpistratError,
    NotInitializedError,
    RankDiedError,
    SettingsError,
    ShutdownError,
    StallError,
)
from .messages import ReduceOp
from .requests import Adasum, Average, Max, Min, Product, Sum
from .runtime import init, is_initialized, shutdown
from .topology import Role

__version__ = "0.1.0"
__all__ = [
    "Adasum", "AsyncResult", "Average", "ClusterError", "CollectiveError", "DuplicateNameError", "EngineError",
    "InvalidRequestError", "Max", "Min", "MismatchError", "MissingDependencyError", "MpistratError",
    "NotInitializedError", "Product", "RankDiedError", "ReduceOp", "Role", "SettingsError", "ShutdownError",
    "StallError", "Sum", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_async", "barrier",
    "broadcast", "broadcast_async", "broadcast_object",
    "cluster_spec", "cross_rank", "cross_size", "gloo_built", "gloo_enabled", "grouped_allreduce",
    "grouped_allreduce_async", "hosts", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "role", "shutdown", "size",
]
