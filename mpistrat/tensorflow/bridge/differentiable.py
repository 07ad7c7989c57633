"""Collectives that have gradients.

tf.custom_gradient is for eager calls only here. In a graph it registers a function of its own for each call, for as
long as the process lives, and that function holds the graph. Here one function is registered for all collectives. What
it needs to know of one stands in the graph, as an attribute of a node, and so is there in all copies of the graph.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.eager.record import could_possibly_record, record_operation

from . import executions
from .executions import Execution
from .program_order import current_function, function_of

_REGISTERED = "MpistratCollective"
_ATTRIBUTE = "_mpistrat_gradient"

_names: "WeakKeyDictionary[tf.Graph, Counter[str]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Gradient:
    """The gradient of a collective. The fields of a subclass are what json can write."""

    kinds: ClassVar[dict[str, type["Gradient"]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradient of each value. Collective.

        Args:
            values: What the collective was called with.
            upstream: The gradient of each result, dense.
        """
        raise NotImplementedError


def with_gradient(collective: Callable[..., Any], gradient: Gradient, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The list `collective(*values)`, whose gradient is `gradient`. Collective."""
    if not tf.executing_eagerly():
        return _in_graph(collective, gradient, values)
    if not could_possibly_record():
        return list(collective(*values))  # Nobody can ask for the gradient, and to prepare for that takes 300 us.

    @tf.custom_gradient
    def differentiable(*values: tf.Tensor) -> Any:
        return list(collective(*values)), lambda *upstream: gradient.of(values, upstream)

    results = differentiable(*values)
    return list(results) if isinstance(results, list | tuple) else [results]


def _in_graph(collective: Callable[..., Any], gradient: Gradient, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    past = executions.current()
    with executions.scope(Execution() if past is None else past) as execution:
        results = collective(*values)
    before, count = [*results, *values], len(results)

    def backward(*upstream: Any) -> list[Any]:
        return [None] * count + _gradients(gradient, values, upstream[:count], execution)

    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": _REGISTERED}):
        after = tf.identity_n(before)
    known = {"kind": type(gradient).__name__, "fields": asdict(gradient), "count": count,
             "number": None if execution.number is None else execution.number.name, "is_past": execution.is_past}
    after[0].op._set_attr(_ATTRIBUTE, AttrValue(s=json.dumps(known).encode()))
    record_operation(_REGISTERED, after, before, backward)  # for tapes in the function; others ask for _registered
    return list(after[:count])


@tf.RegisterGradient(_REGISTERED)
def _registered(node: tf.Operation, *upstream: Any) -> list[Any]:
    known = json.loads(node.get_attr(_ATTRIBUTE))
    count = known["count"]
    gradient = Gradient.kinds[known["kind"]](**known["fields"])
    number = known["number"] and node.graph.get_tensor_by_name(known["number"])
    return [None] * count + _gradients(gradient, list(node.inputs)[count:], upstream[:count],
                                       Execution(number, known["is_past"]))


def _gradients(gradient: Gradient, values: Sequence[tf.Tensor], upstream: Sequence[Any],
               execution: Execution) -> list[Any]:
    """The gradients of this execution."""
    dense, number = [tf.convert_to_tensor(value) for value in upstream], execution.number
    if number is None or (function_of(number.graph) is current_function() and not execution.is_past):
        return list(gradient.of(values, dense))
    with tf.device("CPU:0"):
        number = tf.identity(number)  # a tensor of this graph
    with executions.scope(Execution(number, is_past=True)):
        return list(gradient.of(values, dense))


def name_of_gradient(name: str) -> str:
    """The name of a collective that is the gradient of one of this name; in a graph, another one each time."""
    if tf.executing_eagerly():
        return f"{name}/gradient"
    counter = _names.setdefault(current_function(), Counter())
    counter[name] += 1
    return f"{name}/gradient" if counter[name] == 1 else f"{name}/gradient_{counter[name] - 1}"
