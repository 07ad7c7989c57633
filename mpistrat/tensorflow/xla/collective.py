"""Collectives in functions that XLA compiles: one custom call each, with all tensors of the collective.

The call submits the tensors from XLA's memory and waits for the results. In a thread that other collectives may need,
which is one of XLA's or TensorFlow's, it waits for ten milliseconds at most, as the last collective of a graph
that is not compiled does (see cpu). If the results are not there by then, the call is completed later. So ranks that
run several functions in different orders do not wait for each other, even where XLA has only one thread.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ...core import signal_handlers
from ...core.errors import InvalidRequestError
from ...core.handle import Handle
from ...core.tuning import SUBMIT_WAIT_S
from ..bridge import executions
from ..bridge.executions import Execution
from ..bridge.program_order import current_function, in_order, is_gradient
from ..bridge.submission import HostCallSite, MakeRequest, Observer, Submission
from ..types import Arrays
from . import context, ffi, own_threads
from .custom_call import custom_call, described, has_type
from .link import linked


def run(name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape],
        process_set: int, observer: Observer | None, times_rows: int) -> list[tf.Tensor]:
    """Run one collective in a graph that XLA compiles; the arguments are those of cpu.run. Collective.

    Raises:
        InvalidRequestError: XLA cannot compile collectives in this process, or not this one: the shape of a result
            depends on other ranks, or XLA has no type for a dtype.
    """
    context.require()
    if times_rows:
        shapes = [_with_rows(tensor.shape, times_rows) for tensor in tensors]
    for tensor, shape in zip(tensors, shapes, strict=True):
        if shape.rank is None or not (times_rows or shape.is_fully_defined()):
            raise InvalidRequestError(
                f"{name}: XLA must know the shape of the result when it compiles a collective. It is {shape} here, for "
                f"a tensor of the shape {tensor.shape}. Leave jit_compile out of the function.")
        if not has_type(tensor.dtype):
            raise InvalidRequestError(f"{name}: XLA cannot compile a collective of {tensor.dtype.name}. Leave "
                                      "jit_compile out of the function, or cast the tensor.")
    execution = executions.current.get() or Execution()
    past = [tf.cast(execution.number, tf.int64)] if execution.is_past else []
    counts = execution.number is None
    site = _CompiledCallSite(name, process_set, make_request, [t.dtype.as_numpy_dtype for t in tensors], execution,
                             observer)
    dtypes = [tf.int32, *[t.dtype for t in tensors], *[tf.int64] * counts]
    outputs = in_order(lambda: linked(lambda link: custom_call(
        site, [link, *tensors, *past], dtypes, [tf.TensorShape([]), *shapes, *[tf.TensorShape([])] * counts],
        times_rows)))
    site.belongs_to(outputs[0].op)
    if counts:
        execution.number = outputs.pop()
    return outputs[1:]


def _with_rows(shape: tf.TensorShape, times_rows: int) -> tf.TensorShape:
    """The shape of a result that has `times_rows` as many rows as its tensor."""
    if not shape.rank or shape[0] is None:
        return shape
    return tf.TensorShape([times_rows * shape[0], *shape[1:]])


def read_in_graph(read: Callable[[], Sequence[int]], count: int) -> list[tf.Tensor]:
    """As cpu.read_in_graph, in a graph that XLA compiles."""
    context.require()
    outputs = linked(lambda link: custom_call(_Reading(read), [link], [tf.int32] * (1 + count),
                                              [tf.TensorShape([])] * (1 + count)))
    return outputs[1:]


class _Reading:
    """The target of a custom call that reads numbers of this process."""

    def __init__(self, read: Callable[[], Sequence[int]]):
        self._read = read

    def execute(self, call: ffi.Call) -> None:
        """Write the numbers."""
        values = [0, *self._read()]
        for value, result in zip(values, call.results([np.int32] * len(values)), strict=True):
            result[...] = value


class _CompiledCallSite(HostCallSite):
    """The target of the custom call of one collective."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, dtypes: Sequence[Any],
                 execution: Execution, observer: Observer | None):
        super().__init__(name, process_set, make_request, execution, observer)
        # Nothing orders the collectives of a gradient after those of the function that computes it (see link).
        self._waits = not is_gradient(current_function())
        self._given = [np.int32, *dtypes, *[np.int64] * execution.is_past]
        self._returned = [np.int32, *dtypes, *[np.int64] * (execution.number is None)]

    def execute(self, call: ffi.Call) -> None:
        """Submit the collective; write the results, or leave that to another thread."""
        its = self.submission(call.arguments(self._given)[1:])
        results = call.results(self._returned)
        results[0][...] = 0
        if len(results) > 1 + len(its.arrays):
            results.pop()[...] = its.number
        handle = self._submitted(its)
        if handle.is_done:
            _write(handle, results[1:])
        else:
            handle.when_done(_go_on, (handle, results[1:], call.complete_later()))

    def _submitted(self, its: Submission) -> Handle:
        """Submit the collective, and wait as long as this thread may."""
        engine = its.group.engine
        is_free = self._waits and (threading.get_ident() in self.running or own_threads.is_own())
        if not (is_free and signal_handlers.may_interrupt()):
            try:
                return engine.run(its.request, its.arrays, math.inf if is_free else SUBMIT_WAIT_S, self.origin)
            except KeyboardInterrupt as error:  # XLA frees the tensors when the call ends.
                self.raised = error
                raise engine.break_off(f"{its.request.name}: Ctrl-C has interrupted it on a rank.") from error
        handle = engine.submit(its.request, its.arrays, self.origin)
        try:
            handle.await_done(-1)
        except BaseException as error:  # Of a signal handler. The call ends when the collective is complete.
            self.raised = error
        return handle


def _write(handle: Handle, results: Arrays) -> None:
    """Copy the results of a complete collective into XLA's memory; raise its error."""
    for found, result in zip(handle.wait(), results, strict=True):
        if found.shape != result.shape:
            raise InvalidRequestError(
                f"{handle.name}: all ranks must give as many rows to a collective that XLA has compiled, since the "
                f"shape of its result is fixed: {result.shape}, but the ranks' rows make {found.shape}. Give "
                "the ranks batches of one size, or for sparse gradients sparse_as_dense=True, or leave jit_compile out "
                "of the function that gathers.")
        np.copyto(result, found)


_Waiting = tuple[Handle, Arrays, ffi.Future]


def _go_on(waiting: Sequence[_Waiting]) -> None:
    """The handles are complete. Called by the engine's thread."""
    for each in waiting:
        own_threads.run_in_own_thread(partial(_complete, *each))


def _complete(handle: Handle, results: Arrays, future: ffi.Future) -> None:
    try:
        _write(handle, results)
    except Exception as error:
        future.set_error(*described(error))
    else:
        future.set_available()
