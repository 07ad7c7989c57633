"""A node of a graph that calls Python with arrays: what tf.numpy_function is, without what that does on top.

On the way into the function and out of it, tf.numpy_function switches AutoGraph off and on, compares versions of numpy
by regular expressions, once or twice for each result, and converts results that may be anything. That takes 75 us for
a node with two results, when the node itself takes 25.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

# tf.numpy_function, too, keeps its functions for as long as the process lives: nothing tells when the last graph is
# gone that a node was copied to.
_kept: list[Any] = []


class _Direct(script_ops.EagerFunc):
    """Registered as what TensorFlow calls without conversions, which for a PyFunc node is with numpy arrays."""

    def __init__(self, function: Callable[..., list[np.ndarray]]):
        self._function = function

    def __call__(self, device: Any, token: Any, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._function(*args)


def host_call(function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType],
              stateful: bool) -> list[tf.Tensor]:
    """Call `function` when the graph is executed. Its results are not copied if their memory is aligned to 64 bytes.

    Args:
        function: Given an array for each of `inputs`, or a numpy scalar where there are no dimensions, returns a
            C-contiguous array, and not a scalar, for each of `dtypes`. What it raises is a TensorFlow error with the
            same text.
        inputs: Tensors on the CPU.
        dtypes: Of the results, whose shapes are not known.
        stateful: As for tf.numpy_function: it is called once, in program order, and also if nobody uses the results.
    """
    direct = _Direct(function)
    _kept.append(direct)
    op = tf.raw_ops.PyFunc if stateful else tf.raw_ops.PyFuncStateless
    return list(op(input=list(inputs), token=script_ops._py_funcs.insert(direct), Tout=list(dtypes)))
