"""The token: a variable by which TensorFlow sees what has to happen in the order of the program.

TensorFlow runs what does not depend on each other in any order, and also at once. Its automatic control dependencies
keep the program's order among nodes that write to the same variable, also when they stand in functions, branches or
loops, for what captures the variable there has it for an input. Callbacks are kept in order too, but a call of a
function that uses variables is not kept in order with another call of it, and both have the same collectives, by the
same names.

The gradient of a function has no token. TensorFlow adds no control dependencies there, and where such a function is
called, as part of the gradient of a branch or a loop, nothing can be captured. Executions are told apart by name, see
`executions`. The gradient of a branch or a loop, in a function of which it is a part, can capture a tensor only of the
graph just around it. So a capture goes from graph to graph.
"""

import weakref
from functools import cache

import tensorflow as tf

_with_call_order: "weakref.WeakSet[tf.Graph]" = weakref.WeakSet()


def token() -> tf.Tensor | None:
    """The token's handle as a tensor of the current graph; None in the gradient of a function."""
    path = _path_from_function(tf.compat.v1.get_default_graph())
    if _is_gradient(path[0]):
        return None
    seen = _handle()
    for graph in path:
        seen = graph.capture(seen)
    return seen


def calls_in_order() -> None:
    """Let calls of the function that is being traced be executed one after the other, in the order of the program."""
    function = current_function()
    if function in _with_call_order or _is_gradient(function):
        return
    _with_call_order.add(function)
    with function.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
        tf.raw_ops.VarIsInitializedOp(resource=token())  # Of all that counts as writing to a variable the cheapest.


def current_function() -> tf.Graph:
    """The graph of the function that is being traced, also while one of its branches or loops is."""
    return function_of(tf.compat.v1.get_default_graph())


def function_of(graph: tf.Graph) -> tf.Graph:
    """The graph of the function of which this one is a branch or loop, or which it is."""
    return _path_from_function(graph)[0]


def _path_from_function(graph: tf.Graph) -> list[tf.Graph]:
    path = [graph]
    while getattr(path[0], "is_control_flow_graph", False):
        path.insert(0, path[0].outer_graph)
    return path


def _is_gradient(function: tf.Graph) -> bool:
    return getattr(function, "name", "").startswith("__backward_")


@cache
def _handle() -> tf.Tensor:
    # Not a tf.Variable: in a strategy's scope it would become a variable of that strategy.
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], container="", shared_name="mpistrat_token")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
    return handle
