"""The private names of TensorFlow that collectives on tensors use; the modules beside this one import them from here.

They were run with TensorFlow 2.16.1 to 2.21. At import this module checks that they exist and accept the calls that
mpistrat makes. A name that is missing is None, and `missing` says why. The module that uses it then does without, in a
slower way, or raises MissingDependencyError at its first use. So the import of mpistrat.tensorflow does not depend on
private names. Each missing name is logged at DEBUG.
"""

import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import tensorflow as tf

from ...core.errors import MissingDependencyError
from ...core.install import pip_extra
from .._private import Call, rejected, unsupported

logger = logging.getLogger(__name__)

# What is wrong with each missing name, by name.
missing: dict[str, str] = {}


def _found(place: str, name: str, without: str, call: tuple[int, tuple[str, ...]] | None = None) -> Any:
    """The attribute `name` of `place`, a module or an object in one; None if it is missing or has other parameters.

    Args:
        place: For example "tensorflow.python.eager.context" or "tensorflow.python.eager.context:Context".
        name: The attribute.
        without: What mpistrat does without it, for the log.
        call: The positional arguments and the keywords of mpistrat's calls. None: not checked, as C functions have no
            signature.
    """
    module, _, owner = place.partition(":")
    try:
        attribute = getattr(getattr(import_module(module), owner) if owner else import_module(module), name)
        problem = "; ".join(rejected([Call(attribute, *call)])) if call else ""
    except (ImportError, AttributeError) as error:
        problem = str(error)
    if not problem:
        return attribute
    missing[name] = problem
    logger.debug("TensorFlow %s: %s. mpistrat was run with TensorFlow 2.16.1 to 2.21. %s", tf.__version__, problem,
                 without)
    return None


def without_names(user: str, names: Iterable[str], way_out: str) -> MissingDependencyError:
    """The error of `user`, a part of mpistrat that needs these names. `way_out` says what works without them."""
    what = "; ".join(missing[name] for name in names if name in missing)
    return unsupported(user, what, f" {way_out}, or install such a version ({pip_extra('tensorflow')}).")


is_compiled_by_xla: Callable[[tf.Graph], bool] | None = _found(
    "tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext",
    "A collective in a function that XLA compiles fails with XLA's own error.", (1, ()))

could_possibly_record: Callable[[], bool] | None = _found(
    "tensorflow.python.eager.record", "could_possibly_record",
    "Eager collectives prepare a gradient even if no tape records.", (0, ()))

_FUNCTIONS_OF_GRADIENTS = "Graphs with collectives are kept until the process ends (tf.custom_gradient)."
record_operation: Callable[..., None] | None = _found(
    "tensorflow.python.eager.record", "record_operation", _FUNCTIONS_OF_GRADIENTS, (4, ()))
set_node_attribute: Callable[[tf.Operation, str, Any], None] | None = _found(
    "tensorflow:Operation", "_set_attr", _FUNCTIONS_OF_GRADIENTS, (3, ()))

_NUMPY_FUNCTION = "Nodes that call Python are slower (tf.numpy_function), and GPU tensors in a tf.function are refused."
EagerFunc: Any = _found("tensorflow.python.ops.script_ops", "EagerFunc", _NUMPY_FUNCTION, (2, ("is_grad_func",)))
insert_function: Callable[[Any], str] | None = _found(
    "tensorflow.python.ops.script_ops:_py_funcs", "insert", _NUMPY_FUNCTION, (1, ()))

_ATOMIC_FUNCTION = "tensorflow.python.eager.polymorphic_function.atomic_function"
_CALLS = "Threads that run tf.functions are not told apart, nor are executions that end in an error."
call_flat: Callable[..., Any] | None = _found(f"{_ATOMIC_FUNCTION}:AtomicFunction", "call_flat", _CALLS, (2, ()))
AtomicFunction: Any = None if call_flat is None else _found(_ATOMIC_FUNCTION, "AtomicFunction", _CALLS)


class Executors(NamedTuple):
    """Functions for the executor of the calling thread, which runs its eager operations."""

    of_thread: Callable[[], Any]
    set_for_thread: Callable[[Any], None]
    is_asynchronous: Callable[[Any], bool]
    delete: Callable[[Any], None]
    create: Callable[[bool, bool, int], Any]


EXECUTOR_NAMES = ("TFE_ContextGetExecutorForThread", "TFE_ContextSetExecutorForThread", "TFE_ExecutorIsAsync",
                  "TFE_DeleteExecutor", "TFE_NewExecutor", "context", "ensure_initialized", "_handle")


def _executors() -> Executors | None:
    without = "Collectives are refused in asynchronous execution."
    module = "tensorflow.python.eager.context"
    get, replace, is_asynchronous, delete, create = (
        _found("tensorflow.python.pywrap_tfe", name, without) for name in EXECUTOR_NAMES[:5])
    context = _found(module, "context", without, (0, ()))
    _found(f"{module}:Context", "ensure_initialized", without, (1, ()))
    _found(f"{module}:Context", "_handle", without)
    if not missing.keys().isdisjoint(EXECUTOR_NAMES):
        return None

    def handle() -> Any:
        context().ensure_initialized()
        return context()._handle

    return Executors(lambda: get(handle()), lambda executor: replace(handle(), executor), is_asynchronous, delete,
                     create)


executors = _executors()
