"""The token: a variable that makes TensorFlow submit collectives in program order.

TensorFlow runs independent nodes in any order, and at the same time. Its automatic control dependencies keep program
order among nodes that write to the same variable. That includes calls of functions, branches and loops, because a graph
that captures the variable has it as an input. Callbacks are in an order of their own. So each submit is between two
nodes that count as writes of the token: submits, and calls, branches and loops with submits, are one chain.

A call ends when its collectives are complete, since TensorFlow waits for the stateful nodes of a function, and the
dequeue that awaits a collective is one of them. A submit does not wait.

A function that XLA compiles may touch only variables of the device that it runs on. So compiled functions on a GPU have
a separate token. They need no order with nodes that are not compiled, in which no thread waits on a GPU.

The gradient of a function has no token. TensorFlow adds no control dependencies there, and where such a function is
called, as part of the gradient of a branch or a loop, nothing can be captured. There the names of collectives contain
the number of an execution, see `Execution`.

The gradient of a branch or a loop inside a function can capture tensors only of the graph directly around it. So a
capture goes from graph to graph.
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
    """Return `submit()`, which makes one node, so that the node has its place in the program order of a device."""
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
    """A context whose nodes run after earlier results of `complete_in_order`. The nodes do not wait for each other."""
    handle = _token(HOST)
    return nullcontext() if handle is None else tf.control_dependencies([_write(handle, HOST)])


def _write(handle: tf.Tensor, device: str) -> tf.Operation:
    with tf.device(device):
        # The cheapest operation that counts as a write.
        return tf.raw_ops.VarIsInitializedOp(resource=handle).op


def _token(device: str) -> tf.Tensor | None:
    """The token's handle as a tensor of the current graph; None in the gradient of a function."""
    return None if in_gradient() else capture_in_order(_token_on(device))


def resource_of_name(device: str, name: str) -> list[tf.Tensor]:
    """The resource of the nodes of a name on a device, in the current graph; [] in the gradient of a function.

    Nothing ever reads or writes the resource. Nodes that have it as an input run one after the other.
    """
    if in_gradient():
        return []
    handle = _resources.get((device, name))
    if handle is None:
        handle = _resources[device, name] = _variable(device, tf.float32)
    return [capture_in_order(handle)]


def zero_on(device: str) -> tf.Tensor:
    """The handle of a new variable with an int64 zero, which ends with its last handle."""
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
    """The handle of a variable as a tensor of the current graph, which is not in the gradient of a function."""
    for graph in _path_from_function(tf.compat.v1.get_default_graph()):
        handle = graph.capture(handle)
    return handle


def enclosing_function(graph: tf.Graph | None = None) -> tf.Graph:
    """The graph of the function around `graph` (None: the traced one); `graph` itself if it is no branch or loop."""
    return _path_from_function(tf.compat.v1.get_default_graph() if graph is None else graph)[0]


def captured_in_function(tensor: tf.Tensor | None) -> tf.Tensor | None:
    """A tensor of the function that is being traced, in the current branch or loop of it; None for other tensors.

    Eagerly: the tensor itself, if it is eager too.
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
    """The graphs from the function's to this one, from the outside in."""
    path = [graph]
    while getattr(path[0], "is_control_flow_graph", False):
        path.insert(0, path[0].outer_graph)
    return path


def in_gradient() -> bool:
    """Whether the function that is being traced is the gradient of a function."""
    return getattr(enclosing_function(), "name", "").startswith("__backward_")


def session_graph() -> tf.Graph | None:
    """Return the session's graph that is being traced, also inside of its branches, loops and functions.

    None: nothing is being traced, or a tf.function that Python calls is being traced.
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
    """The execution of a function that the collectives being traced belong to.

    If a function is called several times, its gradient is too, and the collectives in all calls have the same names.
    TensorFlow runs the calls of the function in program order, but those of the gradient in any order. So a collective
    in a graph that has a gradient returns the number of its execution. The number is the same on all ranks, because
    they run the executions in the same order. The names of the gradient's collectives end with the number, which is
    never reused: any number of executions of a gradient may be in flight, and the ranks may start them in different
    orders.
    """

    # A tensor of this graph, or of the graph that this is the gradient of. None until the first collective creates it.
    number: tf.Tensor | None = None
    is_past: bool = False  # Whether the collectives are the gradient of the execution with this number.


# The execution of the collectives that are being traced; None if its number is not needed.
current_execution: ContextVar[Execution | None] = ContextVar("mpistrat_execution", default=None)
