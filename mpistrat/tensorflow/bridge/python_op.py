"""Nodes of a graph that call Python functions with arrays: like tf.numpy_function, but faster and without its leak.

On each call tf.numpy_function switches AutoGraph off and on, compares numpy versions by regular expressions, once or
twice for each result, and converts results of any type. These steps take 75 us for a node with two results. The rest of
the call takes 25 us.

A node has a token, a string by which TensorFlow finds the Python function to call. TensorFlow holds only a weak
reference to the function, so something else must keep it alive while the node can run. tf.numpy_function keeps it until
the process ends. Here the function lives as long as the Python object of the node's graph, or of a graph around it.
Everything that can run the node later keeps such an object alive: a ConcreteFunction, a function or gradient that calls
it, a branch or loop made from it. The function must not refer to the graph, or neither would ever be freed.
"""

import ctypes
import itertools
import math
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from .private_names import EagerFunc, insert_function, is_asynchronous
from .program_order import session_graph
from .types import Arrays

T = TypeVar("T")

# By graph object, and not as an attribute of it: when a ConcreteFunction is deleted, TensorFlow removes all attributes
# of its graph, even if other functions still call it.
_called: "weakref.WeakKeyDictionary[tf.Graph, list[object]]" = weakref.WeakKeyDictionary()

# In asynchronous execution, a function that was called but has not run yet may be deleted together with its graph.
_kept: list[object] = []

_thread = threading.local()


class _Direct(EagerFunc):
    """The function of a PyFunc node. As it is an EagerFunc, TensorFlow converts neither its arguments nor results."""

    def __init__(self, function: Callable[..., Arrays]):
        self._function = function

    def __call__(self, device: str, token: str, args: Sequence[np.ndarray]) -> Arrays:
        if not hasattr(_thread, "is_kept"):  # Not by a call, as every callback comes here.
            keep_thread_state()
        return self._function(*args)


def host_call(function: Callable[..., Arrays], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType],
              stateful: bool) -> list[tf.Tensor]:
    """Add a node that calls `function` when the graph runs. Results with 64-byte aligned memory are not copied.

    Args:
        function: Called with an array for each of `inputs` (a numpy scalar if it has no dimensions). Returns a
            C-contiguous array, never a scalar, for each of `dtypes`. An exception becomes a TensorFlow error with the
            same text. The function must not refer to the graph or to its tensors.
        inputs: Tensors on the CPU.
        dtypes: The dtypes of the results. Their shapes are unknown.
        stateful: As for tf.numpy_function: the call happens once, in program order, even if no node uses the results.
    """
    op = tf.raw_ops.PyFunc if stateful else tf.raw_ops.PyFuncStateless
    called = _Direct(function)
    keep_in_graph(called)
    return list(op(input=list(inputs), token=insert_function(called), Tout=list(dtypes)))


def keep_in_graph(called: object) -> None:
    """Keep `called`, an object that a node calls, alive as long as the current graph or a graph around it exists."""
    if is_asynchronous():
        _kept.append(called)
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph.building_function:
        _called.setdefault(graph, []).append(called)
        graph = graph.outer_graph
    if session_graph() is not None:
        _called.setdefault(graph, []).append(called)


def array_at(address: int, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """Return the memory at an address as an array, without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def keep_thread_state() -> None:
    """Keep the Python thread state of a TensorFlow thread until the thread ends. A callback in the thread calls this.

    By default Python creates a thread state, with a stack in fresh memory, when a callback starts in a thread that
    Python did not create, and frees it when the callback ends. That is about half of the cost of a callback in a graph.
    This function calls PyGILState_Ensure without the matching PyGILState_Release.
    """
    if not hasattr(_thread, "is_kept"):  # A new thread state has no such attribute.
        ctypes.pythonapi.PyGILState_Ensure()
        _thread.is_kept = True


class Targets(weakref.WeakValueDictionary[int, T]):
    """The *targets* of one kind of node: the Python objects that the nodes call, by number. References are weak.

    The first number has `bits` bits and is random, so that a node of a graph that another process saved finds no target
    here. `register`: Registers the code that calls targets. Called once, before the first target is added.
    """

    def __init__(self, bits: int, register: Callable[[], None]):
        super().__init__()
        self._numbers = itertools.count(secrets.randbits(bits))
        self._lock, self._register, self._is_registered = threading.Lock(), register, False

    def prepare(self) -> None:
        """Call `register`, unless it has been called before. Any thread may call this."""
        with self._lock:
            if not self._is_registered:
                self._register()
                self._is_registered = True

    def add(self, target: T) -> int:
        """Add a target, and return its number. Any thread may call this."""
        self.prepare()
        number = next(self._numbers)
        self[number] = target
        return number
