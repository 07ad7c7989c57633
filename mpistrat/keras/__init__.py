"""mpistrat for Keras 3 and Keras 2 on TensorFlow, with the names of horovod.keras: `import mpistrat.keras as hvd`."""

import os as _os

from ..core.errors import MissingDependencyError
from ..core.install import pip_extra as _pip_extra
from ..core.install import require_version as _require_version

try:
    import keras as _keras
    import tensorflow as _tf  # noqa: F401
except ImportError as _error:
    # Keras imports the package of its backend, which may not be installed.
    if _os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        raise MissingDependencyError("mpistrat.keras needs KERAS_BACKEND=tensorflow. "
                                     f"Received: {_os.environ['KERAS_BACKEND']!r}") from _error
    raise MissingDependencyError(
        f"mpistrat.keras needs TensorFlow and Keras 3 ({_pip_extra('tensorflow')}).") from _error
else:
    _require_version("mpistrat.keras", "keras", _keras.__version__)
if _keras.backend.backend() != "tensorflow":
    raise MissingDependencyError("mpistrat.keras needs KERAS_BACKEND=tensorflow. The backend of Keras comes from this "
                                 f"variable or ~/.keras/keras.json. Received: {_keras.backend.backend()!r}")

from ..api import common, missing_names
from ..api.common import *  # noqa: F403
from ..process.launch_env import freeze_libraries as _freeze_libraries
from ..tensorflow.compression import Compression
from ..tensorflow.kerases import is_keras2_in_use as _is_keras2_in_use
from ..tensorflow.ops import allgather_object as allgather_object  # type: ignore[assignment]
from ..tensorflow.ops import barrier, broadcast_variables
from ..tensorflow.ops import broadcast_object as broadcast_object  # type: ignore[assignment]
from ..tensorflow.pin_gpu import init as init  # these three replace those of api.common
from ..tensorflow.sessions import broadcast_global_variables
from . import callbacks, elastic
from .bridge import patches as _patches
from .optimizers.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    ShardedOptimizer,
    allgather,
    allreduce,
    broadcast,
    load_model,
    reducescatter,
)

if _is_keras2_in_use():
    from .keras2 import SyncBatchNormalization
else:
    from .sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "ShardedOptimizer",
    "SyncBatchNormalization", "allgather",
    "allreduce", "barrier", "broadcast", "broadcast_global_variables", "broadcast_variables", "callbacks", "elastic",
    "load_model", "reducescatter",
]
__all__ += common.__all__

__getattr__ = missing_names.explain(__name__, missing_names.KERAS)
_patches.apply(only="fit")
_freeze_libraries()
