"""Collectives in functions that XLA compiles: one custom call each, with all tensors of the collective.

The call submits the tensors from XLA's memory and waits for the results. In a thread of XLA or TensorFlow, which other
collectives may need, the call waits for at most ten milliseconds, like the last collective of other graphs (see cpu).
If the collective is not complete by then, a thread of mpistrat completes the call later. So ranks that run several
functions in different orders do not block each other, even if XLA has only one thread. On a GPU XLA cannot complete a
call later. There the call waits until the collective is complete (see custom_call.GpuMemory).

XLA runs independent operations in any order. For custom calls with side effects, it guarantees only that none of them
is removed or repeated. So each call has an argument that is a result of the previous call: the *link*, which keeps the
program order. The value of the link has no meaning. It is an int64, because TensorFlow has no int32 variables on a GPU.

A compiled function keeps the link in a variable. TensorFlow makes the value of the variable an argument and a result of
each branch, loop and inner function, so the link passes through all of them. Each compiled function has its own
variable, because TensorFlow locks the variables that a compiled function changes until the function ends. With one
variable for all, functions in two threads would wait for each other. The gradient of a function cannot have a variable
(see program_order). There the link is a tensor, and each branch or loop begins with a new link.
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...core import signal_handlers
from ...core.errors import EngineError, InvalidRequestError, NotInitializedError
from ...core.handle import Handle
from ...core.request import on_gpu
from ...core.tuning import SUBMIT_WAIT_S
from ...gpu.arrays import GpuTensors, RecordedStream
from ..async_op.submission import CollectiveCallSite, MakeRequest, Observer, Submission
from ..bridge.gpu_device import has_gpu
from ..bridge.program_order import Execution, capture_in_order, current_execution, in_gradient, in_order, zero_on
from ..bridge.tf_errors import described
from ..xla import context, ffi
from ..xla.custom_call import TYPES, GpuMemory, custom_call

# The variable of each compiled function. It lives as long as the graphs that have captured its handle.
_variables: "weakref.WeakKeyDictionary[tf.Graph, tf.Tensor]" = weakref.WeakKeyDictionary()
_last: "weakref.WeakKeyDictionary[tf.Graph, str]" = weakref.WeakKeyDictionary()  # The name of the last link.


class Started:
    """The collectives of one list in a function that XLA compiles for a GPU. Each has a custom call that does not wait.

    After such a call XLA launches other work, while the ranks agree and reduce the tensors in their own memory. XLA
    knows nothing of work outside of its stream. So `results` adds one more call, which waits for all collectives and
    returns the same memory. All readers of the results come after that call.
    """

    def __init__(self) -> None:
        self._results: list[tf.Tensor] = []
        self._site = _Awaiting()

    @staticmethod
    def is_possible(tensors: Sequence[tf.Tensor]) -> bool:
        """Return whether collectives of these tensors may be submitted first and awaited later."""
        return has_gpu() and all(t.dtype.is_floating or t.dtype.is_complex for t in tensors)

    def run(self, name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
            shapes: Sequence[tf.TensorShape], process_set: int, observer: Observer | None = None) -> list[tf.Tensor]:
        """As the function `run`, but the returned tensors are incomplete. Use the tensors that `results` returns."""
        results = run(name, make_request, tensors, shapes, process_set, observer, 0, self._site)
        self._results += results
        return results

    def results(self) -> list[tf.Tensor]:
        """Return the results of all collectives, in the order of the calls of `run`."""
        dtypes = [tf.int64, *[t.dtype for t in self._results]]
        self._site.dtypes = [np.dtype(dtype.as_numpy_dtype) for dtype in dtypes]
        return _linked(lambda link: custom_call(
            self._site, [link, *self._results], dtypes, [tf.TensorShape([]), *[t.shape for t in self._results]],
            0, range(1, len(dtypes))))[1:]


class _Awaiting:
    """The Python object of the custom call that waits for the started collectives."""

    dtypes: Sequence[np.dtype]  # Of the arguments and the results.

    def __init__(self) -> None:
        # By the call site that has started the collective. An execution that ends in an error may leave entries.
        self.started: dict[CollectiveCallSite, tuple[Handle, GpuTensors]] = {}

    def finish(self, stream: RecordedStream) -> tuple[list[GpuTensors], list[Exception]]:
        """Wait for all started collectives, because XLA frees their memory after the awaiting call or a failed call.

        Makes `stream` wait for their results. Returns the tensors and the errors of the collectives.
        """
        started, self.started = self.started, {}
        errors: list[Exception] = []
        for site, (handle, tensors) in started.items():
            try:
                _await(site, handle)
                handle.wait()
            except Exception as error:
                errors.append(error)
            tensors.follow(stream)
        return [tensors for _, tensors in started.values()], errors

    def execute(self, call: ffi.Call) -> None:
        memory = GpuMemory(call, self.dtypes, self.dtypes)
        started, errors = self.finish(memory.stream)
        if errors:
            raise errors[0]
        given = {array.address for array in memory.arguments}
        moved = any(array.nbytes and array.address not in given for tensors in started for array in tensors)
        if moved or not memory.is_in_place(1, len(self.dtypes) - 1):
            raise EngineError("XLA has moved the results of collectives to other memory before the collectives were "
                              "complete. Set MPISTRAT_DISABLE=xla, and leave out jit_compile=True.")


def run(name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape],
        process_set: int, observer: Observer | None, times_rows: int,
        awaiting: _Awaiting | None = None) -> list[tf.Tensor]:
    """Add one collective to a graph that XLA compiles. Arguments as for cpu.run. Collective.

    `awaiting`: The object that waits for the collective later; None: the custom call of the collective waits.

    Raises:
        InvalidRequestError: XLA cannot compile collectives in this process. Or XLA cannot compile this collective: the
            shape of a result depends on other ranks, or XLA has no type for a dtype.
    """
    context.require()
    if times_rows:
        shapes = [tf.TensorShape([times_rows * shape[0], *shape[1:]]) if shape.rank and shape[0] is not None else shape
                  for shape in [tensor.shape for tensor in tensors]]
    for tensor, shape in zip(tensors, shapes, strict=True):
        if shape.rank is None or not (times_rows or shape.is_fully_defined()):
            raise InvalidRequestError(
                f"{name}: XLA must know the shape of the result when it compiles a collective. The result has shape "
                f"{shape} for a tensor of the shape {tensor.shape}. Leave jit_compile out of the function.")
        if tensor.dtype not in TYPES:
            raise InvalidRequestError(f"{name}: XLA cannot compile a collective of {tensor.dtype.name}. Leave "
                                      "jit_compile out of the function, or cast the tensor.")
    execution = current_execution.get()
    past = [tf.cast(execution.number, tf.int64)] if execution is not None and execution.is_past else []
    counts = execution is not None and execution.number is None
    # As in other graphs, integers on a GPU are copied to the host.
    stays_on_gpu = Started.is_possible(tensors)
    make = (lambda arrays: on_gpu(make_request(arrays))) if stays_on_gpu else make_request
    site = _CompiledCallSite(name, process_set, make, [t.dtype.as_numpy_dtype for t in tensors], execution,
                             observer, stays_on_gpu, awaiting)
    dtypes = [tf.int64, *[t.dtype for t in tensors], *[tf.int64] * counts]
    outputs = in_order(lambda: _linked(lambda link: custom_call(
        site, [link, *tensors, *past], dtypes, [tf.TensorShape([]), *shapes, *[tf.TensorShape([])] * counts],
        times_rows, range(1, 1 + len(tensors)) if awaiting is not None else ())), context.device_of_compiled())
    site.belongs_to(outputs[0].op)
    if execution is not None and counts:
        execution.number = outputs.pop()
    return outputs[1:]


def read_in_graph(read: Callable[[], Sequence[int]], count: int) -> list[tf.Tensor]:
    """As cpu.read_in_graph, but for a graph that XLA compiles."""
    context.require()
    outputs = _linked(lambda link: custom_call(
        _Reading(read), [link], [tf.int64, *[tf.int32] * count], [tf.TensorShape([])] * (1 + count)))
    return outputs[1:]


def _linked(call: Callable[[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Return `call(link)`: the results of a new custom call. To keep the order, the first is the next call's `link`."""
    if in_gradient():
        graph = tf.compat.v1.get_default_graph()
        outputs = call(graph.get_tensor_by_name(_last[graph]) if graph in _last else tf.constant(0, tf.int64))
        _last[graph] = outputs[0].name
        return outputs
    function = context.compiled_function()
    if function not in _variables:
        _variables[function] = zero_on(context.device_of_compiled())
    handle = capture_in_order(_variables[function])
    link = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
    link.set_shape([])
    outputs = call(link)
    tf.raw_ops.AssignVariableOp(resource=handle, value=outputs[0])
    return outputs


class _Reading:
    """The Python object of a custom call that reads numbers of this process, such as its rank."""

    def __init__(self, read: Callable[[], Sequence[int]]):
        self._read = read

    def execute(self, call: ffi.Call) -> None:
        values = [np.int64(0), *map(np.int32, self._read())]
        dtypes = [value.dtype for value in values]
        if has_gpu():
            memory = GpuMemory(call, dtypes[:1], dtypes)
            for i, value in enumerate(values):
                memory.write_number(i, int(value))
            return
        for value, result in zip(values, call.results(dtypes), strict=True):
            result[...] = value


class _CompiledCallSite(CollectiveCallSite):
    """The Python object of the custom call of one collective."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, dtypes: Sequence[Any],
                 execution: Execution | None, observer: Observer | None, stays_on_gpu: bool,
                 awaiting: _Awaiting | None):
        super().__init__(name, process_set, make_request, execution, observer)
        self._awaiting = awaiting
        # Nothing orders the collectives of a gradient after those of the function that computes it.
        self._waits = not in_gradient()
        kinds = list(map(np.dtype, [np.int64, *dtypes, np.int64]))
        self._given, self._returned = (kinds[:len(kinds) - 1 + more] for more in (self._has_past, self._counts))
        self._stays_on_gpu = stays_on_gpu
        self._ranks = runtime.group_of(name, process_set).topology.size  # which the shapes of results are for

    def execute(self, call: ffi.Call) -> None:
        """Submit the collective, and write its results. If it is not complete in time, another thread writes them."""
        if has_gpu():
            memory = GpuMemory(call, self._given, self._returned)
            try:
                self._execute_on_gpu(memory)
            except BaseException:
                if self._awaiting is not None:
                    self._awaiting.finish(memory.stream)
                raise
            return
        its = self.host_submission(call.arguments(self._given)[1:])
        results = call.results(self._returned)
        results[0][...] = 0
        if self._counts:
            results.pop()[...] = its.number
        handle = self._submitted(its)

        def write() -> None:
            for found, result in zip(self._found(handle, its, results[1:]), results[1:], strict=True):
                np.copyto(result, found)

        def complete() -> None:
            try:
                write()
            except Exception as error:
                future.set_error(*described(error))
            else:
                future.set_available()

        if handle.is_done:
            write()
        else:
            future = call.complete_later()
            handle.when_done(lambda _: _run_in_own_thread(complete))

    def _execute_on_gpu(self, memory: GpuMemory) -> None:
        """Submit the collective, and wait unless `_awaiting` will: on a GPU, XLA cannot complete the call later."""
        count = len(self._given) - 1 - self._has_past
        past = int(memory.on_host(1 + count, 1)[0]) if self._has_past else None

        def on_host() -> list[np.ndarray]:
            return memory.on_host(1, count)

        # If a result does not have its tensor's memory, XLA may reuse that memory after this call, so this call waits.
        awaiting = self._awaiting if memory.is_in_place(1, count) else None
        given, returned = memory.arguments[1:1 + count], memory.results[1:1 + count]
        tensors = memory.tensors(given, returned, awaiting is None) if self._stays_on_gpu else None
        its = self.submission(on_host() if tensors is None else tensors, past, on_host)
        if self._counts:
            memory.write_number(1 + count, its.number)
        if awaiting is not None and tensors is not None:
            handle = its.group.engine.submit(its.request, its.arrays, self.origin)
            awaiting.started[self] = handle, tensors
            return
        handle = self._submitted(its)
        _await(self, handle)
        found = self._found(handle, its, returned)
        if not self._stays_on_gpu:
            for index, value in enumerate(found, start=1):
                memory.write(index, value)

    def _found(self, handle: Handle, its: Submission, memory: Sequence[Any]) -> Sequence[Any]:
        """Wait for the results. Raises the collective's error, or InvalidRequestError if `memory` has other shapes."""
        found, ranks = handle.wait(), its.group.topology.size
        for result, fixed in zip(found, memory, strict=True):
            if result.shape == fixed.shape:
                continue
            if ranks != self._ranks:
                raise InvalidRequestError(
                    f"{handle.name}: XLA has compiled this collective for {self._ranks} ranks, but there are {ranks} "
                    "ranks now, and the result has another shape. Create the tf.function again after ranks are lost.")
            raise InvalidRequestError(
                f"{handle.name}: all ranks must pass the same number of rows to a collective that XLA has compiled. "
                f"The result was compiled with shape {fixed.shape}, but now has shape {result.shape}. Use batches of "
                "the same size on all ranks, or pass sparse_as_dense=True for sparse gradients, or leave jit_compile "
                "out of the function.")
        return found

    def _submitted(self, its: Submission) -> Handle:
        """Submit the collective, and wait for it as long as this thread may wait."""
        engine = its.group.engine
        is_free = self._waits and (threading.get_ident() in self.running or hasattr(_own, "is_own"))
        if not (is_free and signal_handlers.may_interrupt()):
            try:
                return engine.run(its.request, its.arrays, math.inf if is_free else SUBMIT_WAIT_S, self.origin)
            except KeyboardInterrupt as error:  # XLA frees the tensors when the call ends.
                self.raised = error
                raise engine.break_off(f"{its.request.name}: Ctrl-C interrupted the collective on a rank.") from error
        handle = engine.submit(its.request, its.arrays, self.origin)
        _await(self, handle, breaks_off=False)
        return handle


def _await(site: CollectiveCallSite, handle: Handle, breaks_off: bool = True) -> None:
    """Wait until a collective is complete or has failed, because XLA frees its tensors when the custom call ends.

    If a signal handler raises an exception meanwhile, the exception is raised after the call of the compiled function.
    `breaks_off`: Whether Ctrl-C also ends the engines of all ranks.
    """
    while not handle.is_done:
        try:
            handle.await_done(-1)
        except (InvalidRequestError, NotInitializedError):  # This thread or process may not wait for the collective.
            raise
        except BaseException as error:
            site.raised = error
            if breaks_off and isinstance(error, KeyboardInterrupt):
                engine = runtime.group_of(site.name, site.process_set).engine
                engine.break_off(f"{handle.name}: Ctrl-C interrupted the collective on a rank.")


# XLA runs the rest of the function in the thread that completes a call. This must not be the engine's thread, which has
# other work, and in which no collective can be awaited. Each completion has a separate thread until XLA returns from
# it, so that two functions do not wait for each other. The threads are kept for later completions.
_Tasks = SimpleQueue[Callable[[], None]]

_idle: list[_Tasks] = []  # Operations on lists are atomic.
_own = threading.local()


def _run_in_own_thread(task: Callable[[], None]) -> None:
    """Call `task`, which must not raise, in a thread that runs no other task meanwhile. Any thread may call this."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name="mpistrat-blocking", daemon=True).start()
    tasks.put(task)


def _serve(tasks: _Tasks) -> None:
    _own.is_own = True
    while True:
        tasks.get()()
        _idle.append(tasks)
