"""mpistrat for TensorFlow, with the names of horovod.tensorflow: `import mpistrat.tensorflow as hvd`.

Collectives on tensors (eager, in tf.function, differentiable), DistributedGradientTape and broadcast_variables; and
MPIStrategy, for programs that are written for tf.distribute.
"""

from typing import Any

from ..core.errors import MissingDependencyError
from ..core.install import pip_extra as _pip_extra

try:
    import tensorflow as _tf  # noqa: F401
except ImportError as _error:
    raise MissingDependencyError(f"mpistrat.tensorflow needs TensorFlow ({_pip_extra('tensorflow')}).") from _error

from ..api import common
from ..api.common import *  # noqa: F403
from .cluster.resolver import MPIClusterResolver
from .compression import Compression
from .distribute import MPIStrategy
from .distribute.strategies import strategy
from .gradient_tape import DistributedGradientTape
from .ops import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
)
from .pin_gpu import init as init  # in place of that of api.common
from .pin_gpu import pin_gpu
from .scatter_ops import alltoall, grouped_reducescatter, reducescatter

__all__ = [
    "Compression", "DistributedGradientTape", "DistributedOptimizer", "MPIClusterResolver", "MPIStrategy",  # noqa: F405
    "SyncBatchNormalization",  # noqa: F405
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "broadcast_variables",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "pin_gpu", "reducescatter", "strategy",
]
__all__ += common.__all__


def __getattr__(name: str) -> Any:
    # Horovod has these here too. They need Keras, which is imported on first access only.
    if name in ("DistributedOptimizer", "SyncBatchNormalization"):
        from importlib import import_module
        return getattr(import_module("mpistrat.keras"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
