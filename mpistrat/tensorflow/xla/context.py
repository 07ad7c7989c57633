"""Tells which graphs XLA compiles, and whether these graphs may contain collectives."""

import weakref

import tensorflow as tf

from ...api import runtime
from ...api.tensors import go_by_host
from ...core.errors import InvalidRequestError
from ..bridge.gpu_device import has_gpu, why_no_gpu
from ..bridge.private_names import in_xla_context, is_compiled_by_xla
from ..bridge.program_order import HOST, enclosing_function
from . import ffi

# The gradients of compiled functions. TensorFlow compiles them too, but traces them outside of XLA's context.
_gradients: "weakref.WeakSet[tf.Graph]" = weakref.WeakSet()


def is_compiled() -> bool:
    """Return whether XLA is going to compile the graph that is being traced."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return is_compiled_by_xla(graph) or (len(_gradients) > 0 and enclosing_function(graph) in _gradients)


def note_gradient() -> None:
    """Record that the function that is being traced is the gradient of a function that XLA compiles."""
    _gradients.add(enclosing_function())


def compiled_function() -> tf.Graph:
    """Return the outermost function that contains the traced graph and that XLA compiles as a whole."""
    function = enclosing_function()
    # The context is that of the graph that calls the function, or else of the function itself.
    while not (in_xla_context(function) or in_xla_context(function.outer_graph)):
        function = enclosing_function(function.outer_graph)
    return function


def device_of_compiled() -> str:
    """Return the device of functions that XLA compiles. They may not use variables of another device."""
    return "GPU:0" if has_gpu() else HOST


def device_here() -> str:
    """Return the device on which the traced graph may use variables of mpistrat: the CPU unless XLA compiles it."""
    return device_of_compiled() if is_compiled() else HOST


def why_not() -> str:
    """Return why XLA cannot compile collectives in this process; "" if it can."""
    if ffi.api() is None:
        return f"TensorFlow {tf.__version__} has no interface for collectives in XLA, but TensorFlow 2.21 has one"
    if runtime.is_initialized() and not runtime.current().settings.uses("xla"):
        return "MPISTRAT_DISABLE=xla is set"
    if not has_gpu():
        return ""
    # Of several GPUs the script may use another one than the first.
    if reason := why_no_gpu("/device:GPU:0" if len(tf.config.get_visible_devices("GPU")) == 1 else ""):
        return reason
    return "with MPISTRAT_GPU_OPERATIONS=host, the host reduces GPU tensors" if go_by_host() else ""


def require() -> None:
    """Raise InvalidRequestError if XLA cannot compile collectives in this process."""
    if reason := why_not():
        raise InvalidRequestError(
            "a collective cannot be compiled by XLA. Write model.compile(..., jit_compile=False), or leave jit_compile "
            f"out of the tf.function that averages. ({reason[0].upper()}{reason[1:]}.)")
