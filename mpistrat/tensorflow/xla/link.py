"""The link: a number that each custom call gets from the one before, which keeps the program order in compiled code.

XLA computes in any order what does not depend on each other, and a custom call with side effects is no exception: it
only does not remove or repeat it. So each call has an argument that is a result of the call before. Its value has no
meaning.

A compiled function keeps it in a variable, so that it goes through branches, loops and inner functions: TensorFlow
makes the variable's value an argument and a result of all of them. Each compiled function has a variable of its own,
for TensorFlow locks the variables that a compiled function changes until it ends, and functions in two threads would
wait for each other.

The gradient of a function can have no variable (see program_order). There the link is a tensor, and each branch or loop
begins with a new one.
"""

import weakref
from collections.abc import Callable

import tensorflow as tf

from ..bridge.program_order import capture_in_order, current_function, is_gradient
from .context import compiled_function

_variables: "weakref.WeakKeyDictionary[tf.Graph, tf.Tensor]" = weakref.WeakKeyDictionary()
_last: "weakref.WeakKeyDictionary[tf.Graph, str]" = weakref.WeakKeyDictionary()  # the names of tensors
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's name of resources that end with their handles


def linked(call: Callable[[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Return `call(link)`, which makes a custom call with the link as an argument; its first result is the next one."""
    if is_gradient(current_function()):
        graph = tf.compat.v1.get_default_graph()
        outputs = call(graph.get_tensor_by_name(_last[graph]) if graph in _last else tf.constant(0))
        _last[graph] = outputs[0].name
        return outputs
    handle = capture_in_order(_variable_of(compiled_function()))
    link = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)
    link.set_shape([])
    outputs = call(link)
    tf.raw_ops.AssignVariableOp(resource=handle, value=outputs[0])
    return outputs


def _variable_of(function: tf.Graph) -> tf.Tensor:
    """The variable of a compiled function. It lives as long as the graphs that have captured its handle."""
    if function not in _variables:
        with tf.init_scope(), tf.device("CPU:0"):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], container="", shared_name=_ANONYMOUS)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
        _variables[function] = handle
    return _variables[function]
