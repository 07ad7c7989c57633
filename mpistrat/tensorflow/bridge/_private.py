"""The private names of TensorFlow that collectives on tensors use; the modules beside this one import them from here.

They were run with all versions of TensorFlow that `import mpistrat.tensorflow` accepts.
"""

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_call_module
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
WHILE_GRAPHS = (WhileBodyFuncGraph, WhileCondFuncGraph)
insert_function = _py_funcs.insert
set_node_attribute = tf.Operation._set_attr
# A function, or in older versions a variable that the profiler sets.
is_profiled = trace.enabled if callable(trace.enabled) else lambda: trace.enabled

__all__ = [
    "WHILE_GRAPHS", "AtomicFunction", "BaseSession", "EagerFunc", "apply_op", "autograph_config", "context",
    "could_possibly_record", "eager_mode", "execute_eagerly", "in_xla_context", "insert_function", "is_compiled_by_xla",
    "is_profiled", "pywrap_tfe", "record_operation", "set_node_attribute", "stop_recording", "xla_call_module",
]
