"""TensorFlow's private functions and classes that collectives use. Other modules of mpistrat import them from here.

They exist in all versions of TensorFlow that `import mpistrat.tensorflow` accepts. SynchronousExecution is in this
module because it calls TensorFlow's C functions.
"""

from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_call_module
from tensorflow.core.function import trace_type
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.context import context, eager_mode
from tensorflow.python.eager.execute import quick_execute as execute_eagerly
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.record import could_possibly_record, record_operation, stop_recording
from tensorflow.python.framework.op_def_library import apply_op
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext, InXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph
from tensorflow.python.ops.script_ops import EagerFunc, _py_funcs
from tensorflow.python.profiler import trace

in_xla_context = InXlaContext
is_compiled_by_xla = GraphOrParentsInXlaContext


def at_each_call(function: tf.Graph, value: Callable[[], tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
    """Return a placeholder in `function`. Each call of `function` that is added to a graph passes `value()` for it.

    FuncGraph.capture_call_time_value does the same, but only for calls from Python.
    """
    placeholder: tf.Tensor = spec.placeholder_value(trace_type.InternalPlaceholderContext(function))
    value.output_spec = spec  # type: ignore[attr-defined]
    function._function_captures.add_or_replace(key=object(), external=value, internal=placeholder, tracetype=spec,
                                               is_by_ref=True)
    return placeholder


WHILE_GRAPHS = (WhileBodyFuncGraph, WhileCondFuncGraph)
insert_function = _py_funcs.insert
set_node_attribute = tf.Operation._set_attr
# A function, or in older versions a variable that the profiler sets.
is_profiled = trace.enabled if callable(trace.enabled) else lambda: trace.enabled


class SynchronousExecution:
    """A context in which each eager operation of this thread is complete before the next statement runs.

    After tf.config.experimental.set_synchronous_execution(False), the eager operations of all threads go into the queue
    of one executor. A function that waits for a collective may be ahead of an operation that the collective needs. Then
    neither would ever end.

    TensorFlow's executor_scope cannot be used: it makes an object that waits for the whole queue when it is deleted.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        self._previous = None
        previous = pywrap_tfe.TFE_ContextGetExecutorForThread(_context())
        if pywrap_tfe.TFE_ExecutorIsAsync(previous):
            pywrap_tfe.TFE_ContextSetExecutorForThread(_context(), _synchronous())
            self._previous = previous
        else:
            pywrap_tfe.TFE_DeleteExecutor(previous)  # Deletes this reference only.

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._previous is not None:
            pywrap_tfe.TFE_ContextSetExecutorForThread(_context(), self._previous)
            pywrap_tfe.TFE_DeleteExecutor(self._previous)


def is_asynchronous() -> bool:
    """Return whether this thread's eager operations run in the background.

    Does not call tf.config.experimental.get_synchronous_execution, which would wait for all of these operations.
    """
    here = pywrap_tfe.TFE_ContextGetExecutorForThread(_context())
    try:
        return bool(pywrap_tfe.TFE_ExecutorIsAsync(here))
    finally:
        pywrap_tfe.TFE_DeleteExecutor(here)


def _context() -> Any:
    """Return the handle of TensorFlow's eager context, for TensorFlow's C functions."""
    its = context()
    its.ensure_initialized()
    return its._handle


@cache
def _synchronous() -> Any:
    """Return a synchronous executor, which has no queue. All threads share it."""
    return pywrap_tfe.TFE_NewExecutor(False, True, 0)


__all__ = [
    "WHILE_GRAPHS", "AtomicFunction", "BaseSession", "EagerFunc", "apply_op", "at_each_call", "autograph_config",
    "context", "could_possibly_record", "eager_mode", "execute_eagerly", "in_xla_context", "insert_function",
    "is_compiled_by_xla", "is_profiled", "record_operation", "set_node_attribute", "stop_recording", "xla_call_module",
]
