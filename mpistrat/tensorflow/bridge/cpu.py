"""The bridge between TensorFlow's tensors and the engine's arrays, eager and in tf.function.

Eagerly a tensor's memory is handed to the engine as it is, and the thread waits. In a graph a collective becomes three
nodes, none of which holds a TensorFlow thread until other ranks are ready:

1. *submit*, a callback that gives the engine views of the tensors and returns a ticket. It is stateful, for a stateless
   one would be pruned, and so runs in program order.
2. *await*, the dequeue of a queue that the engine's completion hook writes to (wakeups.py). It is an asynchronous
   kernel: with one inter-op thread, and other orders on every rank, nothing can block what others wait for.
3. *fetch*, a callback that returns the results without a copy, or raises. It is stateless, so that TensorFlow does not
   put it in line with the submit of the next collective, which would make a loop of collectives wait one by one.

After the last submit of a list, or of a graph, there is nothing to submit: that callback may as well wait, for ten
milliseconds at most. A small list is complete by then, and its results leave by the same callback; the other two nodes
stand in a branch that is not taken. (Each change of threads costs as much as reducing a megabyte.)
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ...api import runtime
from ...core.errors import (
    DuplicateNameError,
    EngineError,
    InvalidRequestError,
    MismatchError,
    MpistratError,
    NotInitializedError,
)
from ...core.request import Request
from ...core.tuning import SUBMIT_WAIT_BRANCHES, SUBMIT_WAIT_S
from . import executions, gpu_eager
from .completion import COMPLETIONS, TICKET, awaited, execution_of, is_done, queue_of
from .executions import Execution
from .program_order import calls_in_order
from .python_op import host_call, keep_thread_state

# Given this rank's arrays (GpuInputs, if they are on a GPU), the request to submit; the same for the same shapes.
MakeRequest = Callable[[list[Any]], Request]

_TF_ERRORS: list[tuple[type[MpistratError], type[tf.errors.OpError]]] = [
    (MismatchError, tf.errors.FailedPreconditionError),
    (NotInitializedError, tf.errors.FailedPreconditionError),
    (DuplicateNameError, tf.errors.InvalidArgumentError),
    (InvalidRequestError, tf.errors.InvalidArgumentError),
    (EngineError, tf.errors.UnknownError),
]
_merged: dict[type[MpistratError], type[Exception]] = {}


class Wait(Enum):
    """Whether the submit of a collective in a graph waits for a moment."""

    NEVER = 0
    IF_LAST = 1  # of the collectives in its graph, which when it is traced is not known
    ALWAYS = 2


class _CollectiveCounter:
    """How many collectives stand in a graph, so far."""

    def __init__(self) -> None:
        self.length = 0


_lines: "weakref.WeakKeyDictionary[tf.Graph, _CollectiveCounter]" = weakref.WeakKeyDictionary()


def run(make_request: MakeRequest, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape],
        wait: Wait = Wait.NEVER) -> list[tf.Tensor]:
    """Run one collective on `tensors` and return as many results, of the same dtypes. Collective.

    Args:
        make_request: Called with the arrays when they are ready; eagerly now, in a graph when their shapes are new.
        tensors: At least one.
        shapes: The static shape of each result, as far as it is known.
        wait: In a graph, whether to wait in the submit for a moment.

    Raises:
        The classes of mpistrat.core.errors that are also the classes of tf.errors that Horovod raises. In a graph,
        TensorFlow's own exception with the same text.
    """
    if tf.executing_eagerly():
        return _run_eagerly(make_request, tensors)
    require_function()
    dtypes = [t.dtype for t in tensors]
    line = _lines.setdefault(tf.compat.v1.get_default_graph(), _CollectiveCounter())
    execution = executions.current() or Execution()
    site = _CallSite(make_request, dtypes, line, wait, execution)
    past = [execution.number] if execution.is_past else []
    calls_in_order()
    COMPLETIONS.prepare()

    def shaped(results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return list(results)

    def fetched(ticket: list[tf.Tensor], queue: tf.Tensor) -> list[tf.Tensor]:
        return shaped(host_call(site.fetch, [awaited(ticket, queue)], dtypes, stateful=False))

    with tf.device("CPU:0"):
        if wait is Wait.NEVER or (wait is Wait.IF_LAST and line.length > SUBMIT_WAIT_BRANCHES):
            ticket = scalars(host_call(site.submit, [*tensors, *past], TICKET, stateful=True))
            results = fetched(ticket, queue_of(ticket))
        else:
            returned = host_call(site.submit_and_wait, [*tensors, *past], [*TICKET, *dtypes], stateful=True)
            ticket, ready = scalars(returned[:len(TICKET)]), returned[len(TICKET):]
            queue = queue_of(ticket)
            # Bare Switch and Merge nodes are no quicker, and what stands in line behind the dequeue would be dead with
            # it.
            results = list(tf.cond(is_done(ticket), lambda: shaped([tf.identity(result) for result in ready]),
                                   lambda: fetched(ticket, queue)))
        if execution.number is None:
            execution.number = execution_of(ticket)
    return results


def scalars(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, which are known to have no dimensions."""
    for tensor in tensors:
        tensor.set_shape([])
    return tensors


def require_function() -> None:
    """Raise InvalidRequestError where a graph is built that a collective cannot stand in."""
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise InvalidRequestError(
            "a collective cannot be compiled by XLA. Write model.compile(..., jit_compile=False), or leave jit_compile "
            "out of the tf.function that averages.")
    if not tf.inside_function():
        raise InvalidRequestError("collectives work eagerly and in tf.function, not in a tf.compat.v1 graph that a "
                                  "session runs. Put the step into a tf.function.")


def _run_eagerly(make_request: MakeRequest, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    try:
        if gpu_eager.are_on_gpu(tensors):
            return gpu_eager.run(make_request, tensors)
        arrays = [to_array(tensor) for tensor in tensors]
        results = runtime.current().engine.run(make_request(arrays), arrays).wait()
    except MpistratError as error:
        raise as_tf_error(error) from error
    return [to_tensor(result) for result in results]


class _CallSite:
    """Where in a graph a collective stands. It may be executed many times, also before earlier ones end.

    It lives as long as the graph, see host_call, and so must not refer to it: `make_request` must not.
    """

    def __init__(self, make_request: MakeRequest, dtypes: Sequence[tf.DType], line: _CollectiveCounter, wait: Wait,
                 execution: Execution):
        self._make_request, self._line, self._wait = make_request, line, wait
        self._has_past, self._counts = execution.is_past, execution.number is None
        line.length += 1
        self._position = line.length
        self._nothing = [np.empty(0, dtype.as_numpy_dtype) for dtype in dtypes]
        self._latest: tuple[list[tuple[int, ...]], Request] | None = None

    def submit(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """A ticket for the result."""
        keep_thread_state()
        request, arrays, number = self._prepared(inputs)
        return COMPLETIONS.ticket_for(runtime.current().engine.submit(request, arrays), number)

    def submit_and_wait(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """What stands for a ticket and the results, or a ticket and empty arrays."""
        keep_thread_state()
        engine, (request, arrays, number) = runtime.current().engine, self._prepared(inputs)
        if self._wait is Wait.ALWAYS or self._position == self._line.length:
            handle = engine.run(request, arrays, SUBMIT_WAIT_S)
            if handle.done():
                return [*COMPLETIONS.done_ticket(number), *handle.wait()]
        else:
            handle = engine.submit(request, arrays)
        return [*COMPLETIONS.ticket_for(handle, number), *self._nothing]

    def fetch(self, ticket: np.int64) -> list[np.ndarray]:
        """The results."""
        keep_thread_state()
        return COMPLETIONS.redeem(int(ticket)).wait()

    def _prepared(self, inputs: Sequence[np.ndarray]) -> tuple[Request, list[np.ndarray], int]:
        arrays = [np.asarray(array) for array in inputs]
        past = int(arrays.pop()) if self._has_past else None
        shapes = [array.shape for array in arrays]
        if self._latest is None or self._latest[0] != shapes:
            self._latest = shapes, dataclasses.replace(self._make_request(arrays), in_graph=True)
        request = self._latest[1]
        if past is not None:
            request = dataclasses.replace(request, name=request.name + executions.suffix(past))
        return request, arrays, executions.next_number(request.name) if self._counts else 0


def as_tf_error(error: MpistratError) -> Exception:
    """`error` as an instance of its own class and of the class of tf.errors that Horovod raises."""
    for ours, theirs in _TF_ERRORS:
        if isinstance(error, ours):
            kind = _merged.get(type(error))
            if kind is None:
                def initialise(self: Any, text: str, theirs: Any = theirs) -> None:
                    theirs.__init__(self, None, None, text)
                kind = type(type(error).__name__, (type(error), theirs), {"__init__": initialise,
                                                                          "__module__": __name__})
                _merged[type(error)] = kind
            return kind(str(error))
    return error


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager CPU tensor as an array, without a copy where numpy knows the dtype."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, BufferError, ValueError, RuntimeError, tf.errors.OpError):
        return np.asarray(tensor.numpy())


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """An eager tensor over the array's memory, without a copy where TensorFlow's DLPack knows the dtype."""
    if array.dtype.kind in "iufc" and array.size and array.dtype.itemsize <= 16:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)
