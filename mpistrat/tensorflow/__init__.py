"""mpistrat for TensorFlow, with the names of horovod.tensorflow: `import mpistrat.tensorflow as hvd`.

Collectives on tensors (eager, in tf.function, differentiable), DistributedGradientTape and broadcast_variables; and
MPIStrategy, for programs that are written for tf.distribute.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from ..core.errors import MissingDependencyError
from ..core.install import pip_extra as _pip_extra
from ..core.install import require_version as _require_version

try:
    import tensorflow as _tf
except ImportError as _error:
    raise MissingDependencyError(f"mpistrat.tensorflow needs TensorFlow ({_pip_extra('tensorflow')}).") from _error
else:
    _require_version("mpistrat.tensorflow", "tensorflow", _tf.__version__)

from ..api import common, missing_names
from ..api.common import *  # noqa: F403
from ..core import annotations as _annotations
from ..process.launch_env import freeze_libraries as _freeze_libraries
from . import (  # noqa: F401  (the second acts by its import)
    elastic,
    iterator_ends,
    ops,
)
from .bridge.private_names import autograph_config as _autograph
from .bridge.private_names import is_profiled as _is_profiled
from .bridge.program_order import session_graph as _session_graph
from .compression import Compression
from .gradients import DistributedGradientTape, PartialDistributedGradientTape
from .ops import *  # type: ignore[assignment]  # noqa: F403  (it replaces two functions of api.common)
from .pin_gpu import init as init  # It replaces that of api.common.
from .pin_gpu import pin_gpu
from .sessions import BroadcastGlobalVariablesHook, broadcast_global_variables
from .sessions import DistributedOptimizer as _OfSessions
from .sessions import for_sessions_too as _for_sessions_too

if TYPE_CHECKING:  # For __getattr__ below, type checkers would take Any.
    from ..cluster import MPIClusterResolver
    from ..strategy import MPIStrategy, strategy

__all__ = [
    "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",  # noqa: F405
    "MPIClusterResolver", "MPIStrategy", "PartialDistributedGradientTape",
    "PartialDistributedOptimizer", "SyncBatchNormalization", "broadcast_global_variables", "elastic",  # noqa: F405
    "pin_gpu", "strategy",
]
__all__ += common.__all__
__all__ += [name for name in ops.__all__ if name not in common.__all__]

# There is nothing to convert in mpistrat, and AutoGraph needs seconds at the first trace to find that out. TensorFlow
# itself makes AutoGraph convert the user's functions for `run` or `merge_call`.
_autograph.CONVERSION_RULES = (_autograph.DoNotConvert("mpistrat"), *_autograph.CONVERSION_RULES)
_annotations.add(_tf.profiler.experimental.Trace, _is_profiled)  # Shows reductions in TensorFlow's profiler.
_freeze_libraries()
_absent = missing_names.explain(__name__, missing_names.TENSORFLOW)


def __getattr__(name: str) -> Any:
    # Horovod has these here too. They need Keras, which is imported on first access only, and not in the graph of a
    # session: what Keras makes then would stay in that graph.
    if name == "DistributedOptimizer" and _session_graph() is not None:
        return _OfSessions
    if name in ("DistributedOptimizer", "PartialDistributedOptimizer", "SyncBatchNormalization"):
        found = getattr(_import_module("mpistrat.keras"), name)
        return _for_sessions_too(found) if name == "DistributedOptimizer" else found
    if name in ("MPIStrategy", "strategy"):  # It needs Keras where there is Keras.
        return getattr(_import_module("mpistrat.strategy"), name)
    if name == "MPIClusterResolver":
        return _import_module("mpistrat.cluster").MPIClusterResolver
    return _absent(name)
