"""mpistrat for Keras 3 on TensorFlow, with the names of horovod.keras: `import mpistrat.keras as hvd`."""

from ..errors import MissingDependencyError

try:
    import keras as _keras
    import tensorflow as _tf  # noqa: F401
except ImportError as _error:
    raise MissingDependencyError("mpistrat.keras needs TensorFlow and Keras 3 (pip install 'mpistrat[tensorflow]').") \
        from _error
if _keras.__version__.startswith("2."):
    raise MissingDependencyError(f"mpistrat.keras needs Keras 3, and this is {_keras.__version__} "
                                 "(pip install -U keras 'tensorflow>=2.16').")
if _keras.backend.backend() != "tensorflow":
    raise MissingDependencyError(f"mpistrat.keras needs Keras' TensorFlow backend, and this is "
                                 f"{_keras.backend.backend()!r} (KERAS_BACKEND=tensorflow).")

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
from ..tensorflow import Compression, broadcast_variables
from . import callbacks
from .optimizer import DistributedOptimizer
from .values import allgather, allreduce, broadcast, load_model

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "allgather",
    "allgather_object", "allreduce", "broadcast", "broadcast_object", "broadcast_variables", "callbacks",
    "cluster_spec", "cross_rank", "cross_size", "global_process_set", "gloo_built", "gloo_enabled", "hosts", "init",
    "is_homogeneous", "is_initialized", "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "role", "shutdown", "size",
]
