"""The token: a variable that makes TensorFlow submit collectives in program order.

TensorFlow runs independent nodes in any order, and at the same time. Its automatic control dependencies keep program
order among nodes that write to the same variable. That includes calls of functions, branches and loops, because a graph
that captures the variable has it as an input. Callbacks are in an order of their own. So each submit is between two
nodes that count as writes of the token: submits, and calls, branches and loops with submits, are one chain.

A call ends when its collectives are complete, since TensorFlow waits for the stateful nodes of a function, and the
dequeue that awaits a collective is one of them. A submit does not wait.

The gradient of a function has no token. TensorFlow adds no control dependencies there, and where such a function is
called, as part of the gradient of a branch or a loop, nothing can be captured. There the names of collectives contain
the number of the execution, see `executions`.

The gradient of a branch or a loop inside a function can capture tensors only of the graph directly around it. So a
capture goes from graph to graph.
"""

from collections.abc import Callable
from functools import cache

import tensorflow as tf


def in_order(submit: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Return `submit()`, which makes one node, so that the node has its place in the program order."""
    handle = _token()
    if handle is None:
        return submit()
    with tf.control_dependencies([_write(handle)]):
        outputs = submit()
    with tf.control_dependencies([outputs[0].op]):
        _write(handle)
    return outputs


def complete_in_order(results: list[tf.Tensor]) -> None:
    """Make all later collectives of the program run after these results are there."""
    handle = _token()
    if handle is not None:
        with tf.control_dependencies(results):
            _write(handle)


def _write(handle: tf.Tensor) -> tf.Operation:
    with tf.device("CPU:0"):
        # The cheapest operation that counts as a write.
        return tf.raw_ops.VarIsInitializedOp(resource=handle).op


def _token() -> tf.Tensor | None:
    """The token's handle as a tensor of the current graph; None in the gradient of a function."""
    return None if is_gradient(current_function()) else capture_in_order(_handle())


def capture_in_order(handle: tf.Tensor) -> tf.Tensor:
    """The handle of a variable as a tensor of the current graph, which is not in the gradient of a function."""
    for graph in _path_from_function(tf.compat.v1.get_default_graph()):
        handle = graph.capture(handle)
    return handle


def current_function() -> tf.Graph:
    """The graph of the function that is being traced, also inside of its branches and loops."""
    return function_of(tf.compat.v1.get_default_graph())


def function_of(graph: tf.Graph) -> tf.Graph:
    """The graph of the function that contains this graph as a branch or loop; the graph itself if it is a function."""
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def captured_in_function(tensor: tf.Tensor | None) -> tf.Tensor | None:
    """A tensor of the function that is being traced, in the current branch or loop of it; None for other tensors.

    Eagerly: the tensor itself, if it is eager too.
    """
    if tensor is None or tf.executing_eagerly() or hasattr(tensor, "numpy"):
        return tensor if tensor is not None and tf.executing_eagerly() and hasattr(tensor, "numpy") else None
    path = _path_from_function(tf.compat.v1.get_default_graph())
    if tensor.graph not in path:
        return None
    for graph in path[path.index(tensor.graph) + 1:]:
        tensor = graph.capture(tensor)
    return tensor


def _path_from_function(graph: tf.Graph) -> list[tf.Graph]:
    """The graphs from the function's to this one, from the outside in."""
    path = [graph]
    while getattr(path[0], "is_control_flow_graph", False):
        path.insert(0, path[0].outer_graph)
    return path


def is_gradient(function: tf.Graph) -> bool:
    """Whether a function is the gradient of a function."""
    return getattr(function, "name", "").startswith("__backward_")


@cache
def _handle() -> tf.Tensor:
    # Not a tf.Variable: in a strategy's scope that would be a variable of the strategy.
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], container="", shared_name="mpistrat_token")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
    return handle
