"""What the strategy needs of TensorFlow that is not public, in one place. Checked by a test; there in 2.16 to 2.21.

tf.distribute's own containers, policies and input pipeline are used as they are, so that what TensorFlow and Keras do
with them (checkpoints, capture in functions, aggregation, rebatching) is what they do with every other strategy.

Importing this module fails where TensorFlow has moved one of the names, and with it every module that needs one. So
these are imported when the first MPIStrategy is made, and the rest of mpistrat does without.
"""

import tensorflow as tf

from ..core.errors import MissingDependencyError

_RUN_WITH = "2.16 to 2.21"


def unknown(what: object) -> MissingDependencyError:
    """The error for something of TensorFlow that is not there."""
    return MissingDependencyError(
        f"MPIStrategy does not know TensorFlow {tf.__version__}: {what}. It was run with TensorFlow {_RUN_WITH}. "
        "DistributedOptimizer and DistributedGradientTape work without what is missing.")


try:
    from tensorflow.python.distribute.device_util import resolve
    from tensorflow.python.distribute.distribute_lib import UpdateContext
    from tensorflow.python.distribute.distribute_utils import (
        create_mirrored_variable,
        is_mirrored,
        is_sync_on_read,
        regroup,
        select_replica,
        update_regroup,
        validate_colocate_distributed_variable,
        value_container,
    )
    from tensorflow.python.distribute.input_lib import InputWorkers
    from tensorflow.python.distribute.input_util import (
        get_distributed_dataset,
        get_distributed_datasets_from_function,
    )
    from tensorflow.python.distribute.values import (
        DistributedValues,
        DistributedVariable,
        MirroredVariable,
        SyncOnReadVariable,
    )
    from tensorflow.python.eager.context import context, global_seed
    from tensorflow.python.framework.func_graph import FuncGraph
except ImportError as _error:
    raise unknown(_error) from _error

__all__ = [
    "DistributedValues", "DistributedVariable", "FuncGraph", "InputWorkers", "MirroredVariable", "SyncOnReadVariable",
    "UpdateContext", "context", "create_mirrored_variable", "get_distributed_dataset",
    "get_distributed_datasets_from_function", "global_seed", "is_mirrored", "is_sync_on_read", "regroup", "resolve",
    "select_replica", "unknown", "update_regroup", "validate_colocate_distributed_variable", "value_container",
]
