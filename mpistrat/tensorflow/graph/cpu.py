"""Collectives on tensors on the CPU, eager and in tf.function.

In eager code the engine gets the memory of the tensors without a copy, and the calling thread waits. In a graph, a
collective becomes three nodes. While other ranks are not ready, none of the nodes blocks a TensorFlow thread:

1. *submit*, a callback that gives the engine views of the tensors and returns a ticket. It is stateful, because
   TensorFlow may remove stateless nodes. Submits run in program order, see program_order.py.
2. *await*, which dequeues from a queue. The engine writes to the queue when the collective is complete (completion.py).
   The kernel of the await is asynchronous. So even with one inter-op thread, and a different order on every rank, it
   blocks no nodes that other ranks wait for.
3. *fetch*, a callback that returns the results without a copy, or raises. It is stateless. TensorFlow would run a
   stateful fetch before the next submit, so each collective of a loop would wait for the collective before it.

After the last submit of a list of tensors, or of a graph, nothing is left to submit. So the last submit may wait for
the result, for at most ten milliseconds. A small list is usually complete by then. Then the submit returns the results,
the await reads nothing from the queue, and the fetch passes the results on. This avoids a switch of threads, which
costs as much as reducing a megabyte. (A branch that skips await and fetch would take 7 us longer than these nodes.)

One asynchronous operation (async_op), as on GPUs and in sessions, could replace the three nodes. Both were measured in
turn, with two ranks on a host of two cores. Medians of three rounds, with the operation and with the nodes: 0.162 and
0.133 ms for one tensor of 1 KB, 0.177 and 0.152 ms for 64 KB, 1.2 and 1.35 ms for 400 tensors of 1 KB in one call, 31
and 26 ms for the gradients of ResNet-50. The nodes were chosen, because small models have mostly small tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...core.errors import MpistratError
from ...core.memory import ALIGNMENT
from ...core.tuning import SUBMIT_WAIT_S
from ..async_op import call_site, session_node
from ..async_op.submission import CollectiveCallSite, MakeRequest, Observer
from ..bridge.completion import COMPLETIONS, TICKET, awaited, execution_of
from ..bridge.program_order import Execution, current_execution, in_order, session_graph
from ..bridge.python_op import host_call
from ..bridge.tf_errors import as_tf_error
from ..bridge.types import Arrays
from ..xla import context as xla
from . import xla_collective


class Wait(Enum):
    """Whether the submit of a collective in a graph waits for the result."""

    NEVER = 0
    IF_LAST = 1  # If the collective is the last one of its graph, which is known only when the graph runs.
    ALWAYS = 2


class _CollectiveCounter:
    """Counts the collectives that have been added to a graph."""

    count = 0


_counters: "weakref.WeakKeyDictionary[tf.Graph, _CollectiveCounter]" = weakref.WeakKeyDictionary()


def run(name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape],
        process_set: int = 0, wait: Wait = Wait.NEVER, observer: Observer | None = None,
        times_rows: int = 1) -> list[tf.Tensor]:
    """Run one collective on `tensors` and return one result for each tensor, of the same dtype. Collective.

    Args:
        make_request: Called with the arrays: in eager code at once, in a graph when it runs with new shapes.
        tensors: At least one.
        shapes: The static shape of each result, as far as it is known.
        process_set: The id of the process set. `make_request` must put the same id into the request.
        wait, observer: Only for graphs: whether the submit waits for the result; a function to call before the submit.
        times_rows: Only for XLA, which must know all shapes: a result has this many times the rows of its tensor.
            0: a result has as many rows as in `shapes`.

    Raises:
        Eagerly, errors of mpistrat.core.errors, which are also instances of the class of tf.errors that Horovod raises.
        In a graph, TensorFlow's own exception with the same text.
    """
    if tf.executing_eagerly():
        return _run_eagerly(make_request, tensors, shapes, process_set)
    if session_graph() is not None:
        return session_node.run(name, make_request, tensors, shapes, process_set, observer)
    if xla.is_compiled():
        return xla_collective.run(name, make_request, tensors, shapes, process_set, observer, times_rows)
    dtypes = [t.dtype for t in tensors]
    counter = _counters.setdefault(tf.compat.v1.get_default_graph(), _CollectiveCounter())
    execution = current_execution.get() or Execution()
    site = _CpuCallSite(name, process_set, make_request, dtypes, counter, wait, execution, observer)
    past = [execution.number] if execution.is_past else []
    COMPLETIONS.prepare()

    with tf.device("CPU:0"):
        returned = in_order(lambda: host_call(
            site.submit, [*tensors, *past], TICKET if wait is Wait.NEVER else [*TICKET, *dtypes], stateful=True))
        ticket, ready = scalars(returned[:len(TICKET)]), returned[len(TICKET):]
        with tf.control_dependencies([awaited(ticket)]):
            results = host_call(site.fetch, [ticket[0], *ready], dtypes, stateful=False)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        if execution.number is None:
            execution.number = execution_of(ticket)
    site.belongs_to(ticket[0].op)
    return results


def scalars(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Set the static shape of tensors to that of a scalar, and return them."""
    for tensor in tensors:
        tensor.set_shape([])
    return tensors


def read_in_graph(read: Callable[[], Sequence[int]], count: int) -> list[tf.Tensor]:
    """Call `read` when the graph runs, and return its results as int32 scalars. Local."""
    if xla.is_compiled():
        return xla_collective.read_in_graph(read, count)

    def call() -> Arrays:
        return [np.array(value, np.int32) for value in read()]

    with tf.device("CPU:0"):
        # Stateful, since TensorFlow would compute a stateless node without inputs once, when it optimises the graph.
        return scalars(host_call(call, [], [tf.int32] * count, stateful=True))


def _run_eagerly(make_request: MakeRequest, tensors: Sequence[tf.Tensor],
                 shapes: Sequence[tf.TensorShape], process_set: int) -> list[tf.Tensor]:
    try:
        if call_site.are_on_gpu(tensors, process_set):
            keeps_shapes = all(shape.is_fully_defined() for shape in shapes)
            return call_site.run_eagerly(make_request, tensors, keeps_shapes, process_set)
        arrays = [to_array(tensor) for tensor in tensors]
        request = make_request(arrays)
        group = runtime.group_of(request.name, request.process_set)
        results = group.engine.run(request, arrays).wait()
    except MpistratError as error:
        raise as_tf_error(error) from error
    return [to_tensor(result) for result in results]


class _CpuCallSite(CollectiveCallSite):
    """The callbacks `submit` and `fetch` of one collective in a graph."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, dtypes: Sequence[tf.DType],
                 counter: _CollectiveCounter, wait: Wait, execution: Execution, observer: Observer | None):
        super().__init__(name, process_set, make_request, execution, observer)
        self._counter, self._wait = counter, wait
        counter.count += 1
        self._position = counter.count
        self._nothing = [] if wait is Wait.NEVER else [np.empty(0, dtype.as_numpy_dtype) for dtype in dtypes]

    def submit(self, *inputs: np.ndarray) -> Arrays:
        """Submit the collective; return a ticket, the arrays by which the graph waits for the result.

        If the submit may wait, it also returns the results, or empty arrays if the collective is not complete.
        """
        its = self.host_submission(inputs)
        if self._wait is Wait.ALWAYS or (self._wait is Wait.IF_LAST and self._position == self._counter.count):
            handle = its.group.engine.run(its.request, its.arrays, SUBMIT_WAIT_S, self.origin)
            if handle.is_done:
                return [*COMPLETIONS.done_ticket(its.number), *handle.wait()]
        else:
            handle = its.group.engine.submit(its.request, its.arrays, self.origin)
        return [*COMPLETIONS.ticket_for(handle, its.number), *self._nothing]

    def fetch(self, ticket: np.int64, *ready: np.ndarray) -> Arrays:
        return list(map(np.asarray, ready)) if ticket < 0 else COMPLETIONS.redeem(int(ticket)).wait()


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Return the memory of an eager CPU tensor as an array, without a copy if numpy has the dtype."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, BufferError, ValueError, RuntimeError, tf.errors.OpError):
        return np.asarray(tensor.numpy())


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """Return an eager tensor over the array's memory, without a copy if TensorFlow's DLPack supports the dtype."""
    # TensorFlow does not check the alignment of the memory, and some operations abort the process if it is wrong.
    is_aligned = array.ctypes.data % ALIGNMENT == 0
    # The kind of float8 is "f" too, or "V". numpy has no DLPack type for it.
    is_known = array.dtype.kind in "iufc" and array.dtype.isbuiltin == 1
    if is_aligned and is_known and array.size and array.dtype.itemsize <= 16:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)
