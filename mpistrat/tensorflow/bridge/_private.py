"""The private names of TensorFlow that collectives on tensors use; the modules beside this one import them from here.

They were run with all versions of TensorFlow that `import mpistrat.tensorflow` accepts.
"""

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_call_module
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.record import could_possibly_record, record_operation, stop_recording
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext, InXlaContext
from tensorflow.python.ops.script_ops import EagerFunc, _py_funcs

in_xla_context = InXlaContext
is_compiled_by_xla = GraphOrParentsInXlaContext
insert_function = _py_funcs.insert
set_node_attribute = tf.Operation._set_attr

__all__ = [
    "AtomicFunction", "EagerFunc", "context", "could_possibly_record", "in_xla_context", "insert_function",
    "is_compiled_by_xla", "pywrap_tfe", "record_operation", "set_node_attribute", "stop_recording", "xla_call_module",
]
