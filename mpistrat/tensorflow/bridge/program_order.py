"""The token: a variable that makes TensorFlow submit collectives in program order.

TensorFlow runs independent nodes in any order, and at the same time. Its automatic control dependencies keep program
order among all nodes that write to one variable. A function call, a branch or a loop is such a node if its graph
captures the variable. A callback is not. So each callback that submits a collective is placed between two nodes that
count as writes of the token. Thus all submits, and all calls, branches and loops with submits, are one chain.

A submit does not wait for its collective. A call of a function ends when its collectives are complete, because
TensorFlow waits for the stateful nodes of a function, and the dequeue that awaits a collective is stateful.

A function that XLA compiles may use only variables of its own device. So compiled functions on a GPU have a separate
token. They need no order with GPU nodes outside of compiled functions, because no thread waits in such nodes.

The gradient of a function has no token. TensorFlow adds no control dependencies there. And if the gradient of a branch
or a loop calls the gradient of a function, the latter cannot capture anything. Instead, the names of the collectives in
the gradient contain the number of an execution, see `Execution`.

The gradient of a branch or a loop in a function can capture only tensors of the graph directly around it. So each graph
captures the token from the next outer graph.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import tensorflow as tf

HOST = "CPU:0"
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's name of resources that end with their handles
_resources: "weakref.WeakValueDictionary[tuple[str, str], tf.Tensor]" = weakref.WeakValueDictionary()
_is_inside: "weakref.WeakKeyDictionary[tf.Graph, bool]" = weakref.WeakKeyDictionary()


def in_order(submit: Callable[[], list[tf.Tensor]], device: str = HOST) -> list[tf.Tensor]:
    """Return `submit()`, and put the one node that it makes into the program order of `device`."""
    handle = _token(device)
    if handle is None:
        return submit()
    with tf.control_dependencies([_write(handle, device)]):
        outputs = submit()
    with tf.control_dependencies([outputs[0].op]):
        _write(handle, device)
    return outputs


def complete_in_order(results: list[tf.Tensor], device: str = HOST) -> None:
    """Make all later collectives of the program run after these results are complete."""
    handle = _token(device)
    if handle is not None:
        with tf.control_dependencies(results):
            _write(handle, device)


def after_completed() -> AbstractContextManager[None]:
    """Return a context. Nodes made in it wait for the results that `complete_in_order` got, but not for each other."""
    handle = _token(HOST)
    return nullcontext() if handle is None else tf.control_dependencies([_write(handle, HOST)])


def _write(handle: tf.Tensor, device: str) -> tf.Operation:
    with tf.device(device):
        # The cheapest operation that counts as a write.
        return tf.raw_ops.VarIsInitializedOp(resource=handle).op


def _token(device: str) -> tf.Tensor | None:
    """Return the handle, in this graph, of the variable that orders submits; None in the gradient of a function."""
    return None if in_gradient() else capture_in_order(_token_on(device))


def resource_of_name(device: str, name: str) -> list[tf.Tensor]:
    """Return [a resource] that is an input of all nodes of this name on a device; [] in the gradient of a function.

    Nothing reads or writes the resource. TensorFlow runs nodes with a common resource one after the other.
    """
    if in_gradient():
        return []
    handle = _resources.get((device, name))
    if handle is None:
        handle = _resources[device, name] = _variable(device, tf.float32)
    return [capture_in_order(handle)]


def zero_on(device: str) -> tf.Tensor:
    """Return the handle of a new int64 variable with the value 0. The variable is freed with its last handle."""
    with tf.init_scope(), tf.device(device):
        handle = _variable(device, tf.int64)  # int32 is not for GPUs.
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0, tf.int64))
    return handle


_token_on = cache(zero_on)


def _variable(device: str, dtype: tf.DType) -> tf.Tensor:
    # Not a tf.Variable: in a strategy's scope that would be a variable of the strategy. And without a name, which each
    # write would look up.
    with tf.init_scope(), tf.device(device):
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], container="", shared_name=_ANONYMOUS)


# -- what is being traced ----------------------------------------------------------------------------------------------


def capture_in_order(handle: tf.Tensor) -> tf.Tensor:
    """Return the handle of a variable as a tensor of the current graph. Not for the gradient of a function."""
    for graph in _path_from_function(tf.compat.v1.get_default_graph()):
        handle = graph.capture(handle)
    return handle


def enclosing_function(graph: tf.Graph | None = None) -> tf.Graph:
    """Return the function that contains `graph` (None: the current graph) if it is a branch or loop, else `graph`."""
    return _path_from_function(tf.compat.v1.get_default_graph() if graph is None else graph)[0]


def captured_in_function(tensor: tf.Tensor | None) -> tf.Tensor | None:
    """Return a traced function's tensor in the form that the current branch or loop can use; None for other tensors.

    In eager code, return eager tensors unchanged, and None for tensors of graphs.
    """
    is_eager = hasattr(tensor, "numpy")
    if tensor is None or is_eager or tf.executing_eagerly():
        return tensor if is_eager and tf.executing_eagerly() else None
    path = _path_from_function(tf.compat.v1.get_default_graph())
    if tensor.graph not in path:
        return None
    for graph in path[path.index(tensor.graph) + 1:]:
        tensor = graph.capture(tensor)
    return tensor


def _path_from_function(graph: tf.Graph) -> list[tf.Graph]:
    """Return the graphs from the enclosing function to `graph`, from the outside in."""
    path = [graph]
    while getattr(path[0], "is_control_flow_graph", False):
        path.insert(0, path[0].outer_graph)
    return path


def in_gradient() -> bool:
    """Return whether the function that is being traced is the gradient of a function."""
    return getattr(enclosing_function(), "name", "").startswith("__backward_")


def session_graph() -> tf.Graph | None:
    """Return the tf.compat.v1 graph that the caller adds nodes to, directly or in a branch, loop or function in it.

    None in eager code, and in a tf.function that eager code calls, because no session runs its graph.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    is_inside = _is_inside.get(graph)
    if is_inside is None:
        with tf.init_scope():  # the context around all functions that are being traced
            is_inside = _is_inside[graph] = not tf.executing_eagerly()
    if not is_inside:
        return None
    while graph.building_function:
        graph = graph.outer_graph
    return graph


@dataclass
class Execution:
    """An execution of the traced function. Its number becomes a part of the names of collectives in the gradient.

    If a function is called several times, its gradient is too, and the collectives of all calls would have the same
    names. TensorFlow runs the calls of the function in program order, but the calls of the gradient in any order, which
    may differ between ranks. So a differentiable collective in a graph also returns the number of the execution, and
    the collectives in the gradient have this number at the end of their names. The number is the same on all ranks,
    because the ranks run the executions in the same order. Numbers are never reused, so any number of gradients may be
    in flight.
    """

    # A tensor of this graph, or of the graph that this is the gradient of. None until the first collective creates it.
    number: tf.Tensor | None = None
    is_past: bool = False  # Whether the collectives are the gradient of the execution with this number.


# The execution of the collectives that are being traced; None if its number is not needed.
current_execution: ContextVar[Execution | None] = ContextVar("mpistrat_execution", default=None)
