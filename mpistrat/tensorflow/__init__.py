"""mpistrat for TensorFlow, with the names of horovod.tensorflow: `import mpistrat.tensorflow as hvd`.

Collectives on tensors (eager, in tf.function, differentiable), DistributedGradientTape and broadcast_variables; and
MPIStrategy, for programs that are written for tf.distribute.
"""

from typing import Any

from ..errors import MissingDependencyError

try:
    import tensorflow as _tf  # noqa: F401
except ImportError as _error:
    raise MissingDependencyError("mpistrat.tensorflow needs TensorFlow (pip install 'mpistrat[tensorflow]').") \
        from _error

from .. import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    broadcast_object,
    cluster_spec,
    cross_rank,
    cross_size,
    gloo_built,
    gloo_enabled,
    hosts,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    role,
    shutdown,
    size,
)
from ..process_sets import global_process_set
from .cluster_resolver import MPIClusterResolver
from .compression import Compression
from .distribute import MPIStrategy
from .distribute.names import strategy
from .gradient_tape import DistributedGradientTape
from .ops import allgather, allreduce, barrier, broadcast, broadcast_variables, grouped_allreduce
from .pinning import pin_gpu

__all__ = [
    "Adasum", "Average", "Compression", "DistributedGradientTape", "DistributedOptimizer", "MPIClusterResolver",
    "MPIStrategy", "Max", "Min", "Product", "Sum", "allgather", "allgather_object", "allreduce", "barrier", "broadcast",
    "broadcast_object",
    "broadcast_variables", "cluster_spec", "cross_rank", "cross_size", "global_process_set", "gloo_built",
    "gloo_enabled", "grouped_allreduce", "hosts", "init", "is_homogeneous", "is_initialized", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "pin_gpu", "rank", "role",
    "shutdown", "size", "strategy",
]


def __getattr__(name: str) -> Any:
    # Horovod has DistributedOptimizer here too. It is a Keras optimizer, so Keras is loaded only when it is asked for.
    if name == "DistributedOptimizer":
        from importlib import import_module
        return import_module("mpistrat.keras").DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
