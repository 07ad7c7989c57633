"""The private functions and classes of TensorFlow that MPIStrategy uses.

They were run with all versions of TensorFlow that `import mpistrat.tensorflow` accepts: TensorFlow's own variables,
containers and input pipeline, so that checkpoints, functions, aggregation and rebatching treat this strategy like any
other. bridge._private has the names that all of mpistrat.tensorflow uses.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf
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
from tensorflow.python.eager.context import context, global_seed
from tensorflow.python.saved_model import save as saved_models

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


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions of a dataset, as TensorFlow wraps them."""
    return list(dataset._functions())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    return list(dataset._inputs())


__all__ = [
    "Call", "DistributedVariable", "InputWorkers", "MirroredVariable", "SyncOnReadVariable", "UpdateContext", "context",
    "create_mirrored_variable", "functions_of", "get_distributed_dataset", "get_distributed_datasets_from_function",
    "global_seed", "inputs_of", "is_mirrored", "is_sync_on_read", "regroup", "rejected", "saved_models",
    "select_replica", "unsupported", "update_regroup", "validate_colocate_distributed_variable", "value_container",
]
