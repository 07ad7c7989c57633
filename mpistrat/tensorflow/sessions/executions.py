"""What tells the executions of one node apart within a run of a session.

TensorFlow starts iterations of a loop, and calls of one function, before earlier ones are complete, in another order on
each rank. What the kernel is told of the iteration, and of the calls around the node, is the same on all ranks. It
becomes a part of the name.
"""

import re
from typing import TYPE_CHECKING

import tensorflow as tf

from ...core.errors import InvalidRequestError
from ..bridge._private import WHILE_GRAPHS

if TYPE_CHECKING:
    from ..async_op.kernel import Call

# Iterations that differ by as much are never under way together: each loop has at most parallel_iterations of them, 10
# by default. Names without a limit would fill the memory of requests.
_MOST_PARALLEL = 1024
_NUMBERED_BY_PROCESS = re.compile(r"/_\d+(?=/)")  # TensorFlow numbers what it has lowered.


class Executions:
    """The executions of a node that is being made in the current graph.

    Attributes:
        seen: What the names of those so far end with.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._loops, self._is_in_function = 0, False
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            context = graph._get_control_flow_context()
            while context is not None:
                self._loops += context.IsWhileContext()
                context = context.outer_context
            if not graph.building_function:
                break
            self._loops += isinstance(graph, WHILE_GRAPHS)
            self._is_in_function |= not getattr(graph, "is_control_flow_graph", False)
            graph = graph.outer_graph

    def suffix(self, call: "Call", is_called_twice: bool) -> str:
        """What the name of this execution ends with; "" where a run executes the node once.

        Args:
            call: The execution.
            is_called_twice: Whether a function that contains the node is called at several places.

        Raises:
            InvalidRequestError: TensorFlow has not put the called function into the graph, and it is called twice.
        """
        if not self._loops and not self._is_in_function:
            return ""
        node, loop, iteration = call.place
        parts = []
        if self._is_in_function:
            calls = _NUMBERED_BY_PROCESS.sub("", node).rpartition("/")[0]
            if not calls and is_called_twice:
                raise InvalidRequestError(
                    "a tf.function with a collective is called at several places of a session's graph, and TensorFlow "
                    "keeps it apart from that graph, so that the ranks cannot tell the calls apart. Call a plain "
                    "function, or leave out tf.compat.v1.disable_control_flow_v2() and disable_v2_behavior().")
            parts.append(calls)
        if loop:
            parts += [f"{loop:x}"] if self._is_in_function or self._loops > 1 else []
            parts.append(str(iteration % _MOST_PARALLEL))
        found = ".".join(parts)
        self.seen.add(found)
        return found
