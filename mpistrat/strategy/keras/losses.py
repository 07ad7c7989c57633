"""Losses under MPIStrategy: the weight of each rank's part of a batch, and the losses that user-defined steps log.

The loss of a global batch is the mean of the ranks' losses, weighted by their numbers of rows. This is right if Keras
divides the loss by the number of rows. But Keras divides some losses by the number of valid tokens of a mask, by the
sum of sample weights, or not at all. Here such a loss is multiplied by a factor, so that the weighted mean equals the
loss of one process. For the factor the divisor is summed over the ranks, in one small collective for each such loss. So
the result is right for several outputs with different masks, for terms that are added to a loss, and for evaluation.

The functions run in a replica, while TensorFlow traces the step.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from ...api import runtime
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import BaseTrainer
from ...keras.bridge.private_names import trainer as keras_trainer
from ...tensorflow.bridge.types import OptionalGradient, Structure, TensorLike, Variable
from ...tensorflow.kerases import label_of
from . import step_state
from .step_state import state, strategy_here

T = TypeVar("T")
logger = logging.getLogger(__name__)
_loss_module = keras_trainer.loss_module


@replaces(_loss_module, "reduce_weighted_values",
          "a loss divided by valid tokens or sample weights would count by rows, and a sum of rows would be logged as "
          "if all ranks had as many", "loss = reduce_values(values, sample_weight, reduction)")
def reduce_weighted_values(original: Function, values: TensorLike, sample_weight: TensorLike | None = None,
                           mask: TensorLike | None = None, reduction: str | None = "sum_over_batch_size",
                           dtype: str | None = None) -> tf.Tensor:
    loss = original(values, sample_weight, mask, reduction, dtype)
    if state.weight is None or strategy_here() is None or reduction in ("none", None) or _is_part():
        return loss
    if state.in_compute_loss is not None and state.losses_within == 1 and reduction != "sum" \
            and tf.convert_to_tensor(values).shape.rank == 0:
        _tell_of_number(state.in_compute_loss.name)
        if loss.shape.rank == 0 and not is_scaled(loss):
            loss = _loss_module.scale_loss_for_distribution(loss)  # Keras leaves it out.
    if reduction == "sum":
        if not state.has_sums:  # A user-defined step divides the sum.
            return loss
        factor = tf.math.divide_no_nan(1.0, step_state.share())
    else:
        divisor = _divisor(sample_weight, mask, reduction)
        if divisor is None:
            return loss
        factor = tf.math.divide_no_nan(step_state.share(divisor), step_state.share())
    loss = tf.math.multiply_no_nan(loss, tf.cast(factor, loss.dtype))
    return mark_scaled(loss)


def _divisor(sample_weight: TensorLike | None, mask: TensorLike | None, reduction: str | None) -> tf.Tensor | None:
    """Return the number by which Keras divides a loss, up to a factor equal on all ranks; None: the number of rows."""
    if reduction == "mean_with_sample_weight":
        mask = _loss_module.apply_mask(sample_weight, mask, "float32", reduction)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


@functools.cache
def _tell_of_number(model: str) -> None:
    if runtime.current().topology.rank == 0:
        logger.warning("%s: the loss function returns one number for a batch, so training uses the mean of the ranks' "
                       "numbers, weighted by rows. That is the loss of the global batch for a mean over rows, but not "
                       "for a ratio (Dice) or a comparison of rows. Return a number per row if you can.", model)


@replaces(_loss_module.Loss, "__call__", "a loss that calls other losses would be divided by the number of ranks twice",
          "losses = self.call(y_true, y_pred)")
def call_loss(original: Function, self: keras.Loss, *args: object, **kwargs: object) -> tf.Tensor:
    state.losses_within += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        state.losses_within -= 1


def _is_part() -> bool:
    """Return whether a loss of `compile` has called the loss that runs now. Only the outermost loss is weighted."""
    return state.in_compute_loss is not None and state.losses_within > 1


@replaces(_loss_module, "scale_loss_for_distribution",
          "a mean of losses that a step of the user's keeps would be divided by the number of ranks",
          "1.0 / num_replicas")
def scale_loss(original: Function, value: tf.Tensor) -> tf.Tensor:
    if state.weight is not None and strategy_here() is not None and _is_part():
        return value
    loss = original(value)
    is_in_loop = state.rows is None and strategy_here() is not None
    return mark_scaled(loss) if loss is not value and (state.weight is not None or is_in_loop) else loss


@replaces(_loss_module, "unscale_loss_for_distribution",
          "losses of reduction=None, which are not scaled, would be logged times the number of ranks", "num_replicas")
def unscale_loss(original: Function, value: tf.Tensor) -> tf.Tensor:
    return value if strategy_here() is not None and value.shape.rank else original(value)


@replaces(BaseTrainer, "compute_loss", "the sum of several losses would be logged divided by "
          "the number of ranks", "ops.sum(losses)")
def compute_loss(original: Function, self: keras.Model, *args: object, **kwargs: object) -> tf.Tensor:
    before, state.in_compute_loss = state.in_compute_loss, self
    try:
        loss = original(self, *args, **kwargs)
    finally:
        state.in_compute_loss = before
    return mark_scaled(loss) if state.weight is not None and strategy_here() is not None else loss


@replaces(keras.metrics.Mean, "update_state", "a scalar, as a loss is, would count by ranks and not by rows",
          "num_samples = 1")
def update_mean(original: Function, self: keras.metrics.Mean, values: TensorLike,
                sample_weight: TensorLike | None = None) -> object:
    if state.rows is None or strategy_here() is None:
        return original(self, values, sample_weight)
    values = unscaled(values, f"the metric {self.name!r}")
    if isinstance(values, tf.Tensor):
        if values.shape.rank == 0 and state.weight is not None:
            values = tf.where(state.rows == 0, tf.zeros_like(values), values)  # It may be NaN.
            sample_weight = step_state.share() if sample_weight is None else sample_weight
        elif values.shape.rank and values.dtype.is_floating and not hasattr(values, "_keras_mask") \
                and sample_weight is not None and len(tf.convert_to_tensor(sample_weight).shape) == 0:
            # `values` are the losses of rows, with their number as the weight. Keras' mean of no rows is NaN.
            values = tf.cast(values, self.dtype)  # as Keras does; a sum of halves may overflow
            values = tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
    return original(self, values, sample_weight)


# -- the losses of user-defined steps: whether they are divided by the number of ranks ---------------------------------
# A step may add Keras' losses or multiply them by numbers. So the graph is followed from a result back to the losses:
# the division is undone for logs, and a loss whose gradient would be wrong is told of. In eager execution there is no
# graph, and only the losses themselves are known.

_CALLS, _BRANCHES = ("PartitionedCall", "StatefulPartitionedCall"), ("body", "then_branch", "else_branch")
_PASS_ON = ("Cast", "CheckNumerics", "CheckNumericsV2", "EnsureShape", "ExpandDims", "GatherV2", "Identity",
            "IdentityN", "Mean", "Neg", "Placeholder", "PreventGradient", "Reshape", "Squeeze", "StopGradient",
            "StridedSlice", "Sum", "Unpack", *_CALLS)
_ADD = ("Add", "AddN", "AddV2", "ConcatV2", "Maximum", "Minimum", "Pack", "Select", "SelectV2", "Sub")
_MULTIPLY, _DIVIDE = ("BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan"), ("DivNoNan", "RealDiv")
_LINEAR = (*_PASS_ON, *_ADD, *_MULTIPLY)
# Python functions and collectives. A collective may be a sum over the ranks, which undoes the division.
_UNKNOWN = ("EagerPyFunc", "MpistratAsyncCollective", "PyFunc", "PyFuncStateless")
_OF_SHAPES = ("OnesLike", "Rank", "Shape", "Size", "ZerosLike")
# A tensor in a graph, and the operations that call the function of this graph, outermost first.
_Place = tuple[tf.Tensor, tuple[tf.Operation, ...]]


def mark_scaled(loss: tf.Tensor) -> tf.Tensor:
    """Remember that a loss has been divided by the number of ranks. Return the loss."""
    loss._mpistrat_is_scaled = True
    return loss


def is_scaled(loss: object) -> bool:
    """Return whether a loss has been divided by the number of ranks."""
    return hasattr(loss, "_mpistrat_is_scaled")


def unscaled(log: T, title: str) -> T:
    """Undo the division by the number of ranks for a loss, and for sums and multiples of losses.

    Return anything else unchanged. A warning names the log by `title` if the division cannot be undone.
    """
    if not is_scaled(log):
        if not tf.is_symbolic_tensor(log) or state.may_differ is not None:
            return log
        exponents = _exponents(log, of_branches=set())
        if not exponents:
            _tell(title, _MIXED)
        if exponents != {1}:
            return log
    return tf.convert_to_tensor(log) * tf.distribute.get_strategy().num_replicas_in_sync


@replaces(tf.GradientTape, "gradient", "the gradients of a loss that a step of the user's does not divide by the "
          "number of ranks would be too large, and nothing would say so", "def gradient(self,")
def gradient(original: Function, self: tf.GradientTape, target: Structure, sources: Structure, *args: object,
             **kwargs: object) -> Structure:
    gradients, strategy, problem = original(self, target, sources, *args, **kwargs), strategy_here(), ""
    if strategy is None or strategy.num_replicas_in_sync == 1 \
            or not any(isinstance(each, keras.Variable | tf.Variable) for each in tf.nest.flatten(sources)):
        return gradients
    for loss in tf.nest.flatten(target):
        if tf.is_symbolic_tensor(loss) and loss.shape.rank == 0:
            exponents = _exponents(loss, of_branches={0, 1})
            if exponents and (exponents != {0} or not _is_mean(loss)):
                _mark_parts(loss)
            else:
                problem = _NOT_DIVIDED if exponents else _MIXED
    for each in filter(tf.is_symbolic_tensor, map(_values, tf.nest.flatten(gradients)) if problem else ()):
        each._mpistrat_problem = problem
    return gradients


def _values(gradient: OptionalGradient) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def tell_of_problem(gradients: Sequence[OptionalGradient], variables: Sequence[Variable]) -> None:
    """Log a warning if an optimizer sums the gradients of a doubtful loss, and the step has not divided them. Local."""
    size = tf.distribute.get_strategy().num_replicas_in_sync
    for gradient, variable in zip(map(_values, gradients), variables, strict=True):
        while tf.is_symbolic_tensor(gradient) and not hasattr(gradient, "_mpistrat_problem"):
            kind, inputs = gradient.op.type, gradient.op.inputs
            divides = kind in (*_MULTIPLY, *_DIVIDE)
            is_passed_on = kind in _PASS_ON or (divides and not _has_size(map(tf.get_static_value, inputs), size))
            gradient = next((each for each in inputs if each.shape.rank == gradient.shape.rank), None) \
                if is_passed_on else None
        if problem := getattr(gradient, "_mpistrat_problem", ""):
            return _tell(f"the loss by whose gradients {label_of(variable)} is trained", problem)


def _has_size(values: Iterable[Any], size: int) -> bool:
    """Return whether one of the constants is the number of ranks, or its inverse. None is no constant."""
    return any(v is not None and bool(np.all((v == size) | np.isclose(v * size, 1.0))) for v in values)


def _mark_parts(loss: tf.Tensor) -> None:
    """Mark a loss, and the terms that a step has divided. Their values on all ranks add up to that of one process."""
    waiting: list[_Place] = [(mark_scaled(loss), ())]
    while waiting:
        tensor, calls = waiting.pop()
        if tensor.op.type in _DIVIDE and tensor.shape.rank == 0:
            mark_scaled(tensor)
        elif tensor.op.type in _LINEAR and (tensor.shape.rank == 0 or tensor.op.type == "Pack"):
            waiting += [each for each in _sources(tensor, calls) if not is_scaled(each[0])]


def _exponents(result: tf.Tensor, of_branches: set[int]) -> set[int]:
    """Return the possible exponents n of the division by size^n in a result, of 0 and 1; empty if its terms differ.

    Zero has both exponents, and so has a number that the step divides: the divisor may contain the number of ranks.
    `of_branches`: The exponents of a condition or loop with losses, which is not followed.
    """
    without_loss: set[tuple[object, ...]] = set()

    def has_loss(place: _Place) -> bool:
        waiting, seen = [place], set()
        while waiting:
            tensor, calls = waiting.pop()
            if is_scaled(tensor) or any(map(is_scaled, _tensors_of_branches(tensor.op))):
                return True
            key = _key((tensor, calls))
            if key not in seen and key not in without_loss and tensor.op.type not in _OF_SHAPES:
                seen.add(key)
                waiting += _sources(tensor, calls)
        without_loss.update(seen)
        return False

    found: dict[tuple[object, ...], set[int]] = {}
    waiting: list[_Place] = [(result, ())]
    while waiting:  # A loop, since a sum of a thousand losses is too deep for recursion.
        tensor, calls = place = waiting[-1]
        kind, key, sources = tensor.op.type, _key(place), _sources(tensor, calls)
        sources = sources[:1] if kind in _PASS_ON else sources
        if is_scaled(tensor):
            found[key] = {1}
        elif not sources:
            value = tf.get_static_value(tensor)
            found[key] = {0} if value is None or np.any(value) else {0, 1}
        elif tensor.shape.rank != 0 and kind != "Pack" and not has_loss(place):
            found[key] = {0}
        elif kind not in (*_LINEAR, *_DIVIDE):
            found[key] = {0} if not has_loss(place) else {0, 1} if kind in _UNKNOWN else \
                of_branches if kind.endswith(("If", "While")) else set()
        elif missing := [each for each in sources if _key(each) not in found]:
            waiting += missing
            continue
        else:
            found[key] = _combined(sources, kind, [found[_key(each)] for each in sources])
        waiting.pop()
    return found[_key((result, ()))] & {0, 1}


def _key(place: _Place) -> tuple[object, ...]:
    return place[0].ref(), *place[1]


def _combined(sources: list[_Place], kind: str, exponents: list[set[int]]) -> set[int]:
    """Return the exponents of the result of an operation, given its inputs and their exponents. As for `_exponents`."""
    if kind in _PASS_ON:
        return exponents[0]
    if kind in _ADD:
        return set.intersection(*exponents)
    size, values = tf.distribute.get_strategy().num_replicas_in_sync, [tf.get_static_value(each) for each, _ in sources]
    if kind in _MULTIPLY:  # By `size` or its inverse: perhaps the step undoes the division, or divides.
        sums = {a + b for a in exponents[0] for b in exponents[1]}
        is_undone = any(value is not None and bool(np.all(value == size)) for value in values)
        return {0, 1} if is_undone or (sums == {0} and _has_size(values, size)) else sums
    if exponents == [{0}, {0}] and not _counts_rows(sources[1]) and (values[1] is None or np.all(values[1] >= size)):
        return {0, 1}
    return {a - b for a in exponents[0] for b in exponents[1]}


def _counts_rows(place: _Place) -> bool:
    """Return whether a divisor is the size of a tensor, so it does not contain the number of ranks."""
    while place[0].op.type in _PASS_ON and (sources := _sources(*place)):
        place = sources[0]
    return place[0].op.type in ("Shape", "Size")


def _sources(tensor: tf.Tensor, calls: tuple[tf.Operation, ...]) -> list[_Place]:
    """Return the tensors from which a tensor is computed. Calls of functions are followed into and out of them."""
    op = tensor.op
    if op.type == "Placeholder" and calls:
        return [(of_call, calls[:-1]) for of_call, own in zip(calls[-1].inputs, _body(calls[-1], "f").inputs,
                                                              strict=False) if own is tensor]
    if op.type in _CALLS and (graph := _body(op, "f")) and tensor.value_index < len(graph.outputs):
        return [(graph.outputs[tensor.value_index], (*calls, op))]
    if op.type == "IdentityN":
        return [(op.inputs[tensor.value_index], calls)]
    # Not the condition of a choice, and not the axis of a concatenation
    inputs = op.inputs[1:] if op.type.startswith("Select") else op.inputs[:-1] if op.type == "ConcatV2" else op.inputs
    return [(each, calls) for each in inputs]


def _tensors_of_branches(op: tf.Operation) -> list[tf.Tensor]:
    """Return the tensors in the branches or in the loop body of an operation of control flow; [] for others."""
    graphs = [_body(op, name) for name in _BRANCHES] if op.type.endswith(("While", "If")) else []
    return [tensor for graph in graphs if graph for each in graph.get_operations() for tensor in each.outputs]


def _body(op: tf.Operation, name: str) -> Any:
    """Return the graph of the function in an attribute of an operation; None if there is none."""
    try:
        function = op.graph._get_function(op.get_attr(name).name)
    except ValueError:  # No such attribute
        return None
    return getattr(function, "graph", None)


def _is_mean(loss: tf.Tensor) -> bool:
    """Return whether a loss is a mean over all rows of this rank, or a function, a sum or a multiple of such means."""
    waiting: list[_Place] = [(loss, ())]
    while waiting:
        tensor, calls = waiting.pop()
        kind, sources = tensor.op.type, _sources(tensor, calls)
        if (kind == "Mean" and sources[0][0].op.type != "Pack" and sources[0][0].shape.rank != 0) \
                or (kind in _DIVIDE and _counts_rows(sources[1])):
            return True
        if kind not in ("Sum", "Mean") and (len(sources) == 1 or kind in _LINEAR):
            waiting += [each for each in sources if each[0].shape.rank == 0 or each[0].op.type == "Pack"]
    return False


_MIXED = ("Keras divides a part of it by the number of ranks, and another part is not divided, or it is no sum or "
          "multiple of losses (a function, a loop, a condition). So it depends on the number of ranks. Divide each "
          "term by it, as tf.nn.scale_regularization_loss(self.losses) does, or use self.compute_loss().")
_NOT_DIVIDED = ("it is a mean over this rank's rows. The optimizer sums gradients over the ranks, so they are N times "
                "too large on N ranks. Pass loss / strategy.num_replicas_in_sync to tape.gradient(), or use "
                "self.compute_loss() or losses of Keras, which Keras divides.")


@functools.cache
def _tell(title: str, problem: str) -> None:
    if runtime.current().topology.rank == 0 and runtime.current().settings.is_checked:
        logger.warning("mpistrat: %s: %s", title, problem)
