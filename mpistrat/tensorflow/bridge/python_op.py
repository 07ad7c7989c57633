"""A node of a graph that calls Python with arrays: what tf.numpy_function is, without what that does on top.

On the way into the function and out of it, tf.numpy_function switches AutoGraph off and on, compares versions of numpy
by regular expressions, once or twice for each result, and converts results that may be anything. That takes 75 us for
a node with two results, when the node itself takes 25.

A node knows its function by a token. TensorFlow keeps the functions behind tokens by weak references only, so that
somebody must keep a function for as long as the node can run. tf.numpy_function keeps it for as long as the process
lives. Here it lives as long as the Python object of the graph that the node was made in, or of one around that.
Whatever runs the node later keeps that object: a ConcreteFunction, a function or a gradient that calls it, a branch or
a loop that was made of it. A function must not refer to the graph, or both would live for ever.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

from .own_executor import is_asynchronous

# By graph object, and not as an attribute of it: TensorFlow takes all attributes from the graph of a ConcreteFunction
# that is deleted, also when other functions still call it.
_functions: "weakref.WeakKeyDictionary[tf.Graph, list[Any]]" = weakref.WeakKeyDictionary()

# In asynchronous execution a function may be deleted, with its graph, that was called and has not run yet.
_kept: list[Any] = []


class _Direct(script_ops.EagerFunc):
    """Registered as what TensorFlow calls without conversions, which for a PyFunc node is with numpy arrays."""

    def __init__(self, function: Callable[..., list[np.ndarray]]):
        self._function = function

    def __call__(self, device: Any, token: Any, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._function(*args)


def host_call(function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType],
              stateful: bool) -> list[tf.Tensor]:
    """Call `function` when the graph is executed. Its results are not copied if their memory is aligned to 64 bytes.

    Args:
        function: Given an array for each of `inputs`, or a numpy scalar where there are no dimensions, returns a
            C-contiguous array, and not a scalar, for each of `dtypes`. What it raises is a TensorFlow error with the
            same text. It must not refer to the graph or to tensors of it.
        inputs: Tensors on the CPU.
        dtypes: Of the results, whose shapes are not known.
        stateful: As for tf.numpy_function: it is called once, in program order, and also if nobody uses the results.
    """
    op = tf.raw_ops.PyFunc if stateful else tf.raw_ops.PyFuncStateless
    return list(op(input=list(inputs), token=_kept_by_graph(_Direct(function)), Tout=list(dtypes)))


def tensor_call(function: Callable[..., list[tf.Tensor]], inputs: Sequence[tf.Tensor],
                dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """As a stateful `host_call`, with eager tensors on the current device in place of arrays: tf.py_function."""
    called = script_ops.EagerFunc(function, list(dtypes), is_grad_func=False)
    return list(tf.raw_ops.EagerPyFunc(input=list(inputs), token=_kept_by_graph(called), Tout=list(dtypes),
                                       is_async=is_asynchronous()))


def _kept_by_graph(function: Any) -> str:
    """A token for the function, which lives as long as the current graph or one of those around it."""
    if is_asynchronous():
        _kept.append(function)
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph.building_function:
        _functions.setdefault(graph, []).append(function)
        graph = graph.outer_graph
    return script_ops._py_funcs.insert(function)


_here = threading.local()


def keep_thread_state() -> None:
    """Let the thread that calls this callback keep what Python needs to run in it.

    TensorFlow's threads are unknown to Python. By default it makes a thread state, with a stack in fresh memory, when a
    callback begins, and frees it when it ends, which takes longer than most callbacks: about half of what a callback of
    a graph costs. One more PyGILState_Ensure than there are releases lets the state live as long as the thread.
    """
    if not hasattr(_here, "is_kept"):  # It is gone when the state is.
        ctypes.pythonapi.PyGILState_Ensure()
        _here.is_kept = True
