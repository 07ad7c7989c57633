"""Names that distinguish the executions of one node within a run of a session.

TensorFlow starts iterations of a loop, and calls of one function, before earlier ones are complete, in another order on
each rank. TensorFlow tells the kernel the iteration. A function gets the number of its call, which is created when the
call is added to the graph, and passed on to the functions that it calls in turn. Iteration and number are the same on
all ranks, and become a part of the name.
"""

import functools
import itertools
import weakref
from typing import TYPE_CHECKING

import tensorflow as tf

from ...core.errors import InvalidRequestError
from ..bridge.private_names import WHILE_GRAPHS, at_each_call
from ..bridge.program_order import captured_in_function, enclosing_function
from ..bridge.session_graph import session_graph

if TYPE_CHECKING:
    from .kernel import Call

# Iterations that differ by as much are never under way together: each loop has at most parallel_iterations of them, 10
# by default. Names without a limit would fill the memory of requests.
_MOST_PARALLEL = 1024
_PRIME = 1_000_003  # of which the numbers of calls in calls are multiples

_numbers: "weakref.WeakKeyDictionary[tf.Graph, tf.Tensor]" = weakref.WeakKeyDictionary()
_counts: "weakref.WeakKeyDictionary[tf.Graph, itertools.count]" = weakref.WeakKeyDictionary()


def call_number() -> tf.Tensor | None:
    """The number of this call of the function that is being traced, in the current graph; None outside of functions.

    In the graph of a session only.
    """
    function = enclosing_function()
    if not function.building_function:
        return None
    if function not in _numbers:
        # A function of its own, as it gets an attribute.
        _numbers[function] = at_each_call(function, functools.partial(_next_call), tf.TensorSpec([], tf.int64))
    return captured_in_function(_numbers[function])


def _next_call() -> tf.Tensor:
    """The number of a call that is being added to the current graph; in a loop, a new number for each iteration.

    TensorFlow may not inline the function into the graph. Then it does not tell the function's kernels the iteration.

    Raises:
        InvalidRequestError: The call is in a loop of TensorFlow 1, whose iterations are not known.
    """
    graph = tf.compat.v1.get_default_graph()
    parts = [tf.constant(next(_counts.setdefault(session_graph(), itertools.count(1))), tf.int64)]
    while True:
        if _loops_of_v1(graph):
            raise InvalidRequestError("a tf.function with a collective cannot be called in a loop of TensorFlow 1's "
                                      "control flow. Call a plain function there, or leave out tf.compat.v1."
                                      "disable_control_flow_v2() and disable_v2_behavior().")
        if isinstance(graph, WHILE_GRAPHS):
            counter = captured_in_function(graph.get_operations()[0].outputs[0])  # its first argument
            assert counter is not None
            parts.append(tf.cast(counter % _MOST_PARALLEL, tf.int64))
        if not getattr(graph, "is_control_flow_graph", False):
            break
        graph = graph.outer_graph
    outer = call_number()
    number = tf.zeros([], tf.int64) if outer is None else outer
    for part in parts:
        number = number * _PRIME + part
    return number


def _loops_of_v1(graph: tf.Graph) -> int:
    """The number of loops of TensorFlow 1's control flow around an operation that is being added to a graph."""
    context, count = graph._get_control_flow_context(), 0
    while context is not None:
        count += context.IsWhileContext()
        context = context.outer_context
    return count


class Executions:
    """The executions of a node that is being made in the current graph.

    `seen`: The suffixes of the executions so far.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._loops, self._is_in_function = 0, False
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            self._loops += _loops_of_v1(graph)
            if not graph.building_function:
                break
            self._loops += isinstance(graph, WHILE_GRAPHS)
            self._is_in_function |= not getattr(graph, "is_control_flow_graph", False)
            graph = graph.outer_graph

    def suffix(self, call: "Call") -> str:
        """The suffix of the name of this execution; "" if a run executes the node once."""
        parts = [str(call.number(1))] if self._is_in_function else []
        loop, iteration = call.iteration if self._loops or self._is_in_function else (0, 0)
        if loop:
            # A loop in another one, or in a function that a loop may call, is another loop in each iteration of that.
            parts += [f"{loop:x}"] if self._loops > 1 or self._is_in_function else []
            parts.append(str(iteration % _MOST_PARALLEL))
        found = ".".join(parts)
        if found:
            self.seen.add(found)
        return found
