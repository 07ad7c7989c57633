"""Collectives with gradients.

tf.custom_gradient is used for eager calls only. In a graph it registers one function per call, which lives until the
process ends and keeps the graph alive. Here one function is registered for all collectives. The data that it needs
about a collective is an attribute of a node in the graph, so all copies of the graph have it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import ClassVar

import tensorflow as tf

from ..bridge.private_names import could_possibly_record, record_operation, set_node_attribute
from ..bridge.program_order import Execution, captured_in_function, current_execution, enclosing_function
from ..bridge.types import OptionalGradient
from ..xla import context as xla

_REGISTERED = "MpistratCollective"
_ATTRIBUTE = "_mpistrat_gradient"

Collective = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]

_weight: ContextVar[tf.Tensor | None] = ContextVar("mpistrat_loss_weight", default=None)


@contextmanager
def loss_weighted(weight: tf.Tensor | None) -> Iterator[None]:
    """A context in which this rank's loss is weighted by `weight`, a scalar that may differ among the ranks.

    The gradients of the loss are multiplied by the weight when they are summed over the ranks. Through a collective, a
    rank's gradient contains gradients of the other ranks' losses, which have other weights. So the gradient of a
    collective sums weighted gradients, and divides the sum by this rank's weight. None: all losses weigh the same.
    """
    before = _weight.set(weight)
    try:
        yield
    finally:
        _weight.reset(before)


@dataclass(frozen=True)
class Gradient:
    """The gradient of a collective. The fields of a subclass must be serialisable as JSON."""

    kinds: ClassVar[dict[str, type["Gradient"]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradient of each value. Collective.

        Args:
            values: The arguments of the collective.
            upstream: The gradient of each result, dense.
        """
        raise NotImplementedError


def with_gradient(collective: Collective, gradient: Gradient, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the list `collective(values)` with this gradient. Collective."""
    if tf.executing_eagerly():
        return _eagerly(collective, gradient, values)
    execution = current_execution.get() or Execution()
    before = current_execution.set(execution)
    try:
        results = collective(values)
    finally:
        current_execution.reset(before)
    # One node has the results and the values, so that its gradient finds the values among its inputs.
    inputs, count = [*results, *values], len(results)

    def backward(*upstream: tf.Tensor) -> list[OptionalGradient]:
        return [None] * count + _gradients(gradient, values, upstream[:count], execution)

    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": _REGISTERED}):
        outputs = tf.identity_n(inputs)
    known = {"kind": type(gradient).__name__, "fields": asdict(gradient), "count": count,
             "number": None if execution.number is None else execution.number.name, "is_past": execution.is_past,
             "is_compiled": xla.is_compiled()}
    set_node_attribute(outputs[0].op, _ATTRIBUTE, tf.compat.v1.AttrValue(s=json.dumps(known).encode()))
    record_operation(_REGISTERED, outputs, inputs, backward)  # For tapes in the function; others call _registered.
    return list(outputs[:count])


def _eagerly(collective: Collective, gradient: Gradient, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if not could_possibly_record():
        return list(collective(values))  # No tape records, and preparing a gradient takes 300 us.

    @tf.custom_gradient
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        return list(collective(values)), lambda *upstream: _weighted(gradient, values, upstream)

    return list(differentiable(*values))


@tf.RegisterGradient(_REGISTERED)
def _registered(node: tf.Operation, *upstream: tf.Tensor) -> list[OptionalGradient]:
    known = json.loads(node.get_attr(_ATTRIBUTE))
    count = known["count"]
    gradient = Gradient.kinds[known["kind"]](**known["fields"])
    if known["is_compiled"]:
        xla.note_gradient()
    number = known["number"] and node.graph.get_tensor_by_name(known["number"])
    return [None] * count + _gradients(gradient, list(node.inputs)[count:], upstream[:count],
                                       Execution(number, known["is_past"]))


def _gradients(gradient: Gradient, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor],
               execution: Execution) -> list[tf.Tensor]:
    number = execution.number
    if number is None or (enclosing_function(number.graph) is enclosing_function() and not execution.is_past):
        return _weighted(gradient, values, upstream)
    with tf.device("CPU:0"):
        number = tf.identity(number)  # Now a tensor of this graph.
    before = current_execution.set(Execution(number, is_past=True))
    try:
        return _weighted(gradient, values, upstream)
    finally:
        current_execution.reset(before)


def _weighted(gradient: Gradient, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The gradients, weighted as in `loss_weighted`. Gradients of a function inside of the step are not weighted."""
    weight, dense = captured_in_function(_weight.get()), [tf.convert_to_tensor(each) for each in upstream]
    if weight is None:
        return list(gradient.of(values, dense))
    # Without rows the weight is 0, and a loss may be anything, also NaN.
    weighted = [tf.math.multiply_no_nan(each, tf.cast(weight, each.dtype)) for each in dense]
    return [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in gradient.of(values, weighted)]
