"""The private names of TensorFlow that mpistrat uses; every other module imports them from here.

They were run with TensorFlow 2.16.1 to 2.21. At import this module checks that they exist and accept the calls that
mpistrat makes. There are two groups:

- The bridge needs the first one. Where a name is missing, the import of mpistrat.tensorflow fails.
- MPIStrategy needs the second one: TensorFlow's own variables, containers and input pipeline, so that checkpoints,
  functions, aggregation and rebatching treat this strategy like any other. Where a name is missing,
  `require_for_strategy` raises when a strategy is created, and the rest of mpistrat works.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from ..core.errors import MissingDependencyError


class Call(NamedTuple):
    """A call of a private function: the number of positional arguments (`self` included) and the keywords."""

    function: Callable[..., object]
    positional: int
    keywords: tuple[str, ...] = ()


def rejected(calls: Iterable[Call]) -> list[str]:
    """A description of each call that the function's signature does not accept."""
    found = []
    for function, positional, keywords in calls:
        signature = inspect.signature(function)
        try:
            signature.bind(*range(positional), **dict.fromkeys(keywords))
        except TypeError as error:
            found.append(f"{function.__qualname__}{signature} has changed ({error})")
    return found


def unsupported(user: str, what: object, advice: str = "") -> MissingDependencyError:
    """The error of `user`, a part of mpistrat, for something that this version of TensorFlow lacks."""
    return MissingDependencyError(f"{user} does not support TensorFlow {tf.__version__}: {what}. It was run with "
                                  f"TensorFlow 2.16.1 to 2.21.{advice}")


def strategy_unsupported(what: object) -> MissingDependencyError:
    """The error of MPIStrategy for something that this version of TensorFlow lacks."""
    return unsupported("MPIStrategy", what, " DistributedOptimizer and DistributedGradientTape work without it.")


# -- the bridge -------------------------------------------------------------------------------------------------------

try:
    from tensorflow.python.eager.context import context
    from tensorflow.python.eager.record import could_possibly_record, record_operation
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    from tensorflow.python.ops.script_ops import EagerFunc, _py_funcs
    from tensorflow.python.pywrap_tfe import (  # C functions, which have no signature to check
        TFE_ContextGetExecutorForThread,
        TFE_ContextSetExecutorForThread,
        TFE_DeleteExecutor,
        TFE_ExecutorIsAsync,
        TFE_NewExecutor,
    )

    _changed = rejected([
        Call(context, 0), Call(could_possibly_record, 0), Call(record_operation, 4),
        Call(GraphOrParentsInXlaContext, 1), Call(EagerFunc, 2, ("is_grad_func",)), Call(_py_funcs.insert, 1),
    ])
    if _changed:
        raise ImportError("; ".join(_changed))
except ImportError as _error:
    raise unsupported("mpistrat.tensorflow", _error) from _error

# -- MPIStrategy ------------------------------------------------------------------------------------------------------

_missing_for_strategy: ImportError | None = None
try:
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
    from tensorflow.python.distribute.values import DistributedVariable, MirroredVariable, SyncOnReadVariable
    from tensorflow.python.eager.context import global_seed

    _changed = rejected([
        Call(UpdateContext, 1), Call(create_mirrored_variable, 4), Call(is_mirrored, 1), Call(is_sync_on_read, 1),
        Call(regroup, 1, ("always_wrap",)), Call(select_replica, 2), Call(update_regroup, 3),
        Call(validate_colocate_distributed_variable, 2), Call(value_container, 1), Call(InputWorkers, 1),
        Call(get_distributed_dataset, 3, ("num_replicas_in_sync", "input_context", "options")),
        Call(get_distributed_datasets_from_function, 5), Call(global_seed, 0),
        Call(DistributedVariable._get_replica, 2), Call(MirroredVariable._update_replica, 3),
        Call(SyncOnReadVariable._get_cross_replica, 1), Call(SyncOnReadVariable.assign, 4, ("read_value",)),
        Call(tf.train.Checkpoint._write, 3), Call(tf.train.Checkpoint._async_checkpointer, 1),
        Call(tf.train.CheckpointManager.save, 4),
    ])
    if _changed:
        raise ImportError("; ".join(_changed))
except (ImportError, AttributeError) as _error:
    _missing_for_strategy = ImportError(str(_error))


def require_for_strategy() -> None:
    """Raise MissingDependencyError where this TensorFlow lacks a name that MPIStrategy needs.

    Call it before the import of a module that needs one of those names.
    """
    if _missing_for_strategy is not None:
        raise strategy_unsupported(_missing_for_strategy) from _missing_for_strategy


__all__ = [
    "Call", "DistributedVariable", "EagerFunc", "GraphOrParentsInXlaContext", "InputWorkers", "MirroredVariable",
    "SyncOnReadVariable", "TFE_ContextGetExecutorForThread", "TFE_ContextSetExecutorForThread", "TFE_DeleteExecutor",
    "TFE_ExecutorIsAsync", "TFE_NewExecutor", "UpdateContext", "_py_funcs", "context", "could_possibly_record",
    "create_mirrored_variable", "get_distributed_dataset", "get_distributed_datasets_from_function", "global_seed",
    "is_mirrored", "is_sync_on_read", "record_operation", "regroup", "rejected", "require_for_strategy",
    "select_replica", "strategy_unsupported", "unsupported", "update_regroup",
    "validate_colocate_distributed_variable", "value_container",
]
