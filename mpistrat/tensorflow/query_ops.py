"""Ranks and sizes as tensors, which are read when a graph runs. Names and semantics are Horovod's.

The Python numbers of rank() and size() become constants of a graph. The tensors of these functions do not: a graph that
was traced before init(), or before another init(), reads the values when it runs. All functions are local. For users.
"""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from ..api import runtime
from ..core.errors import InvalidRequestError, MpistratError
from .bridge.tf_errors import as_tf_error
from .graph import cpu

# Results of process_set_included_op other than 0 and 1; Horovod's numbers.
_NOT_INITIALIZED = -1
_UNKNOWN_SET = -3


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, an int32 scalar. Local.

    Args:
        process_set_id: The id of a registered process set, which need not contain this rank; 0 is the set of all ranks.
        name: A name for the result in a graph.

    Raises:
        NotInitializedError: Before init(). In a graph, a tf.errors.InvalidArgumentError when the graph runs.
        InvalidRequestError: No process set has this id. In a graph, a tf.errors.InvalidArgumentError when it runs.
    """
    return _scalar(partial(_size, process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is in a process set and 0 if not, an int32 scalar. Local.

    The result is -1 before init(), and -3 if no process set has this id.
    """
    return _scalar(partial(_included, process_set_id), name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return rank() as an int32 scalar. Local; raises as size_op."""
    return _scalar(lambda: runtime.current().topology.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return local_rank() as an int32 scalar. Local; raises as size_op."""
    return _scalar(lambda: runtime.current().topology.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return local_size() as an int32 scalar. Local; raises as size_op."""
    return _scalar(lambda: runtime.current().topology.local_size, name)


def _size(process_set_id: int) -> int:
    found = runtime.current().registry.find(process_set_id)
    size = None if found is None else found.size()
    if size is None:
        raise InvalidRequestError(f"size_op: no process set with the id {process_set_id} is registered. "
                                  "Pass the process_set_id of a registered ProcessSet.")
    return size


def _included(process_set_id: int) -> int:
    if not runtime.is_initialized():
        return _NOT_INITIALIZED
    found = runtime.current().registry.find(process_set_id)
    return _UNKNOWN_SET if found is None else int(bool(found.included()))


def _scalar(read: Callable[[], int], name: str | None) -> tf.Tensor:
    """Call `read` now, or in a graph when the graph runs. Return the result as an int32 scalar."""
    if tf.executing_eagerly():
        try:
            return tf.constant(read(), tf.int32, name=name)
        except MpistratError as error:
            raise as_tf_error(error) from error

    result, = cpu.read_in_graph(lambda: [read()], 1)
    with tf.device("CPU:0"):
        return tf.identity(result, name=name)
