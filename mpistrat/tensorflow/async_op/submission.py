"""What a node of a graph submits to the engine in each execution: a collective, its name and its arrays."""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...api.group import Group
from ...core.errors import InvalidRequestError
from ...core.handle import Handle
from ...core.request import Request
from ...gpu.arrays import GpuTensors
from ..bridge.calls import CallSite
from ..bridge.private_names import WHILE_GRAPHS, at_each_call
from ..bridge.program_order import Execution, captured_in_function, enclosing_function, session_graph
from ..bridge.tf_errors import described
from .kernel import Call, Dims

# This rank's tensors, on the host or on its GPU.
Submitted = Sequence[np.ndarray] | GpuTensors
# Makes the request from this rank's tensors. Equal for equal shapes.
MakeRequest = Callable[[Submitted], Request]
# Called when a collective of a graph runs, before its arrays are submitted: with the arrays of this rank, and with the
# part of names that stands for the thread that runs the graph. Returns whether it wants to be called again. An
# exception becomes the error of the graph. It must not refer to the graph, and must not change the arrays or keep them.
Observer = Callable[[Sequence[np.ndarray], str], bool]

_SHAPE = attrgetter("shape")


class Submission(NamedTuple):
    """A collective that is ready to be submitted."""

    group: Group
    request: Request
    arrays: Submitted
    number: int  # The number of the execution of the graph; 0 if it is not needed.


class CollectiveCallSite(CallSite):
    """A node with a collective: makes a Submission for each execution. Several executions may be in flight at once.

    Args:
        make_request: Makes the engine's request from the arrays. It must not refer to the graph.
        execution: The execution whose number is a part of names in the gradient; None: no number is needed.
        in_session: Makes a suffix of the name for each execution in a session's graph; None in other graphs.
    """

    def __init__(self, name: str, process_set: int, make_request: MakeRequest,
                 execution: Execution | None, observer: Observer | None, in_session: "Executions | None" = None):
        super().__init__(name, process_set)
        self._in_session, self.is_in_order = in_session, in_session is None
        self._make_request, self._observer = make_request, observer
        self._has_past = execution is not None and execution.is_past
        self._counts = execution is not None and execution.number is None
        self._latest: tuple[list[tuple[int, ...]], str, Request] | None = None

    def all_names(self) -> set[str]:
        own = self.thread + self.name
        return {own, *(f"{own}#{suffix}" for suffix in self._in_session.seen)} if self._in_session else {own}

    def host_submission(self, inputs: Sequence[np.ndarray]) -> Submission:
        """Return the collective of a CPU node. In a gradient the last input is the number of the forward execution."""
        arrays = list(map(np.asarray, inputs))  # TensorFlow passes scalars of numpy too.
        return self.submission(arrays, int(arrays.pop()) if self._has_past else None)

    def before_run(self, session: object) -> None:
        if (prepare := getattr(self._observer, "before_run", None)) is not None:
            prepare(session)

    def submission(self, arrays: Submitted, past: int | str | None,
                   fetched: Callable[[], Sequence[np.ndarray]] | None = None) -> Submission:
        """Return the collective to submit.

        Args:
            past: In a gradient, the number of the forward function's execution; in a session, the name's suffix.
            fetched: Copies the arrays to the host for the observer; None: the arrays are on the host.
        """
        thread = self.thread
        if self._observer is not None:
            on_host = fetched() if fetched is not None else cast("Sequence[np.ndarray]", arrays)
            if not self._observer(on_host, thread):
                self._observer = None
        shapes = list(arrays.shapes if isinstance(arrays, GpuTensors) else map(_SHAPE, arrays))
        latest = self._latest
        if latest is None or latest[0] != shapes or latest[1] != thread:
            request = dataclasses.replace(self._make_request(arrays), name=thread + self.name, in_graph=True)
            latest = self._latest = shapes, thread, request
        request, group = latest[2], runtime.group_of(self.name, self.process_set)
        number = group.next_number(("execution", request.name)) if self._counts else 0
        if past is not None:
            request = dataclasses.replace(request, name=f"{request.name}#{past}")
        return Submission(group, request, arrays, number)


class AsyncCallSite(CollectiveCallSite):
    """The Python object that a node of the asynchronous operation calls: its target (see kernel.py)."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, execution: Execution | None,
                 observer: Observer | None, in_session: "Executions | None", tensors: Sequence[tf.Tensor], first: int):
        super().__init__(name, process_set, make_request, execution, observer, in_session)
        self._first, self._dtypes = first, [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]
        self._dims = [Dims(tuple(tensor.shape)) if tensor.shape.is_fully_defined() else None for tensor in tensors]

    def submit(self, call: Call, arrays: Submitted, fetched: Callable[[], Sequence[np.ndarray]] | None = None,
               kinds: Sequence[int] = ()) -> None:
        """Submit the collective of `call`, and return. When the collective is complete, the engine completes `call`.

        Args:
            arrays, fetched: As for `submission`.
            kinds: TensorFlow's number for the dtype of each result, if they are on the host. (): they are on a GPU.
        """
        past: int | str | None = call.number(1) if self._has_past else None  # Never in a session.
        if self._in_session is not None:
            past = self._in_session.suffix(call) or None
        its = self.submission(arrays, past, fetched)
        if self._counts:
            call.write_number(len(arrays), its.number)
        handle = its.group.engine.submit(its.request, its.arrays, self.origin)
        handle.when_done(_end, (call, handle, kinds))


def _end(ended: Sequence[tuple[Call, Handle, Sequence[int]]]) -> None:
    """Complete the calls whose collectives have ended, or fail them. The engine's thread calls this function."""
    for call, handle, kinds in ended:
        try:
            results = handle.wait()
            for index, kind in enumerate(kinds):
                call.give(index, results[index], kind)
        except Exception as error:
            call.fail(*described(error))
        else:
            call.complete()


# -- the executions of a node in one run of a session ------------------------------------------------------------------

# Iterations that differ by as much are never under way together: each loop has at most parallel_iterations of them, 10
# by default. Names without a limit would fill the memory of requests.
_MOST_PARALLEL = 1024
_PRIME = 1_000_003  # of which the numbers of calls in calls are multiples

_numbers: "weakref.WeakKeyDictionary[tf.Graph, tf.Tensor]" = weakref.WeakKeyDictionary()
_counts: "weakref.WeakKeyDictionary[tf.Graph, itertools.count]" = weakref.WeakKeyDictionary()


def call_number() -> tf.Tensor | None:
    """Return, as a tensor, the number of the current call of the traced function; None outside of functions.

    Only for functions in the graph of a session.
    """
    function = enclosing_function()
    if not function.building_function:
        return None
    if function not in _numbers:
        # A function of its own, as it gets an attribute.
        _numbers[function] = at_each_call(function, functools.partial(_next_call), tf.TensorSpec([], tf.int64))
    return captured_in_function(_numbers[function])


def _next_call() -> tf.Tensor:
    """Return the number of a function call that is being added to the current graph.

    In a loop each iteration has its own number, because a kernel in a function that is not inlined into the graph
    cannot ask TensorFlow for the iteration. Raises InvalidRequestError: The call is in a loop of TensorFlow 1.
    """
    graph = tf.compat.v1.get_default_graph()
    parts = [tf.constant(next(_counts.setdefault(session_graph(), itertools.count(1))), tf.int64)]
    while True:
        if _loops_of_v1(graph):
            raise InvalidRequestError("a tf.function with a collective cannot be called in a loop of TensorFlow 1's "
                                      "control flow. Call a function without @tf.function there, or leave out "
                                      "tf.compat.v1.disable_control_flow_v2() and disable_v2_behavior().")
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
    """Return how many loops of TensorFlow 1's control flow are around an operation that is being added to a graph."""
    context, count = graph._get_control_flow_context(), 0
    while context is not None:
        count += context.IsWhileContext()
        context = context.outer_context
    return count


class Executions:
    """Distinguishes the executions of a node in a session's graph. `seen`: The suffixes of its executions so far.

    TensorFlow may start an iteration of a loop, or a call of a function, before earlier ones are complete, and the
    order may differ between ranks. So the name of an execution ends with the iteration and with the number of the call.
    TensorFlow tells the kernel the iteration. A call gets its number when it is added to the graph, and passes it to
    the function. Iteration and number are the same on all ranks.
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

    def suffix(self, call: Call) -> str:
        """Return the suffix for the name of this execution; "" if a run of the session executes the node only once."""
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
