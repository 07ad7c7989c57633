"""Reductions and gathers of lists of tensors, with gradients. The collectives in ops.py and GradientReducer use them.

`process_set` is the id of a process set. All functions are collective unless their docstring says otherwise.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import tensorflow as tf

from ..api import runtime
from ..api.process_sets import ProcessSet, resolved
from ..core.errors import InvalidRequestError, MpistratError
from ..core.request import Average, ScaledOp, Sum, allgather_request, broadcast_request, scaled_op, specs_of
from ..core.topology import Topology
from .async_op import call_site
from .async_op.submission import Observer
from .bridge.names import of_gradient
from .bridge.private_names import could_possibly_record, record_operation, set_node_attribute
from .bridge.program_order import Execution, captured_in_function, current_execution, enclosing_function
from .bridge.tf_errors import as_tf_error
from .bridge.types import OptionalGradient, Reducible, Tensor
from .compression import Compressed, Compression, Compressor
from .graph import cpu
from .graph.buckets import ReduceSpec, reduce_list
from .xla import context as xla

# -- collectives with gradients ---------------------------------------------------------------------------------------

# tf.custom_gradient is used for eager calls only. In a graph it registers one function per call, which lives until the
# process ends and keeps the graph alive. Here one function is registered for all collectives. The data that it needs
# about a collective is an attribute of a node in the graph, so all copies of the graph have it.

_REGISTERED = "MpistratCollective"
_ATTRIBUTE = "_mpistrat_gradient"

Collective = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]

_weight: ContextVar[tf.Tensor | None] = ContextVar("mpistrat_loss_weight", default=None)


@contextmanager
def loss_weighted(weight: tf.Tensor | None) -> Iterator[None]:
    """A context in which this rank's loss has the weight `weight`, a scalar that may differ among the ranks. Local.

    Later, each rank's gradients are multiplied by its weight, and summed over the ranks. If a loss depends on a
    collective, its gradients contain gradients of other ranks' losses, which have different weights. So the gradient of
    a collective sums weighted gradients, and divides the sum by this rank's weight. With None nothing is weighted.
    """
    before = _weight.set(weight)
    try:
        yield
    finally:
        _weight.reset(before)


@dataclass(frozen=True)
class Gradient:
    """The gradient of a collective. Its fields must be serialisable as JSON, because a graph stores them in a node."""

    kinds: ClassVar[dict[str, type["Gradient"]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the gradient of each of `values`, which are the arguments of the collective. Collective.

        `upstream`: The gradient of each result of the collective, as a dense tensor.
        """
        raise NotImplementedError


def with_gradient(collective: Collective, gradient: Gradient, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the list `collective(values)`, and make `gradient` its gradient. Collective."""
    if tf.executing_eagerly():
        if not could_possibly_record():
            return list(collective(values))  # No tape records, and preparing a gradient takes 300 us.

        @tf.custom_gradient
        def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            return list(collective(values)), lambda *upstream: _weighted(gradient, values, upstream)

        return list(differentiable(*values))
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
    """Return the gradients, weighted as loss_weighted says; unweighted in an inner tf.function, which has no weight."""
    weight, dense = captured_in_function(_weight.get()), [tf.convert_to_tensor(each) for each in upstream]
    if weight is None:
        return list(gradient.of(values, dense))
    # Without rows the weight is 0, and a loss may be anything, also NaN.
    weighted = [tf.math.multiply_no_nan(each, tf.cast(weight, each.dtype)) for each in dense]
    return [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in gradient.of(values, weighted)]


# -- reductions and gathers -------------------------------------------------------------------------------------------


def number_of(process_set: ProcessSet | None, operation: str) -> int:
    """Return the set's id. Raises InvalidRequestError, which names `operation`: This rank is not in the set. Local."""
    try:
        found = resolved(process_set)
        found.group(operation)
    except MpistratError as error:
        raise as_tf_error(error) from error
    assert found.process_set_id is not None
    return found.process_set_id


def topology_of(process_set: int) -> Topology:
    """Return the topology of a process set of this rank. Raises InvalidRequestError: The set was removed. Local."""
    try:
        return runtime.group_of("a collective", process_set).topology
    except MpistratError as error:
        raise as_tf_error(error) from error


def place_in(process_set: int) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Return this rank's index in a process set, and the size of the set. Local. Raises as topology_of.

    If ranks may be lost, both are tensors in a graph, because the graph must read them each time it runs.
    """
    topology = topology_of(process_set)
    if tf.executing_eagerly() or not runtime.current().losses.is_tolerant:
        return topology.rank, topology.size

    def read() -> tuple[int, int]:
        topology = topology_of(process_set)
        return topology.rank, topology.size

    rank, size = cpu.read_in_graph(read, 2)
    return rank, size


def as_tensor(value: Reducible) -> Tensor:
    """Convert a value to a tensor. In tf.IndexedSlices, convert `values` and `indices`, which may be arrays. Local."""
    if isinstance(value, tf.IndexedSlices):
        # In a graph this turns tensors from outside into tensors of the graph, which have names.
        return tf.IndexedSlices(tf.convert_to_tensor(value.values), tf.convert_to_tensor(value.indices),
                                value.dense_shape)
    if isinstance(value, np.ndarray) and value.dtype == object:
        raise ValueError("an array of Python objects is not a tensor. Use broadcast_object or allgather_object.")
    return tf.convert_to_tensor(value)


def reduce_tensors(tensors: Sequence[Tensor], spec: ReduceSpec, compression: type[Compressor] = Compression.none,
                   exact: Mapping[str, tf.Tensor] = MappingProxyType({})) -> list[Tensor]:
    """Reduce dense tensors in buckets, and gather each tf.IndexedSlices. Collective.

    Returns the reduced tensors, followed by the reduced tensors of `exact`: more dense tensors, by label, which are not
    compressed. The number, dtypes and shapes must be equal on all ranks, except for the numbers of rows of slices.
    """
    numbers = spec.indices or range(len(tensors))
    results, dense, observer = list(tensors), [], spec.observer
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = reduce_slices(tensor, replace(spec, name=f"{spec.name}/{numbers[i]}", observer=observer))
            observer = None
        else:
            dense.append(i)
    compressed = Compressed([tf.convert_to_tensor(tensors[i]) for i in dense], compression,
                            process_set=spec.process_set)
    of_dense = replace(spec.of(dense), observer=observer, wire_dtype=compressed.wire_dtype)
    sent, apart = compressed.tensors, list[tf.Tensor]()
    if compressed.wire_dtype:  # It applies to all tensors of a collective.
        apart = reduce_dense(list(exact.values()), ReduceSpec(
            f"{spec.name}/exact", spec.scaled, tuple(exact), process_set=spec.process_set, may_wait=False,
            has_gradient=spec.has_gradient))
    elif exact:
        after = max(numbers, default=-1) + 1
        sent = [*sent, *exact.values()]
        of_dense = replace(of_dense, labels=[*of_dense.labels, *exact] if spec.labels else (),
                           indices=[*of_dense.indices, *range(after, after + len(exact))])
    reduced = reduce_dense(sent, of_dense)
    for i, tensor in zip(dense, compressed.restored(reduced[:len(dense)]), strict=True):
        results[i] = tensor
    return [*results, *reduced[len(dense):], *apart]


def reduce_dense(tensors: Sequence[tf.Tensor], spec: ReduceSpec) -> list[tf.Tensor]:
    """As buckets.reduce_list. If `spec.has_gradient`, results have gradients, which are reduced the same way."""
    if not tensors:
        return []
    if not spec.has_gradient:
        return reduce_list(tensors, spec)
    return with_gradient(partial(reduce_list, spec=spec), ReduceGradient(
        spec.name, spec.scaled, tuple(spec.labels), spec.may_wait, spec.wire_dtype, spec.process_set), tensors)


@dataclass(frozen=True)
class ReduceGradient(Gradient):
    name: str
    scaled: ScaledOp  # a list after JSON
    labels: Sequence[str]
    may_wait: bool
    wire_dtype: str
    process_set: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return reduce_dense(upstream, ReduceSpec(
            of_gradient(self.name, self.process_set), scaled_op(*self.scaled), self.labels,
            process_set=self.process_set, may_wait=self.may_wait, wire_dtype=self.wire_dtype, has_gradient=True))


def reduce_slices(slices: tf.IndexedSlices, spec: ReduceSpec) -> tf.IndexedSlices:
    """Return the slices of all ranks, concatenated. Collective.

    The observer of `spec` gets this rank's values. With Average, the values are divided by the number of ranks that
    have not joined, or with MPISTRAT_JOIN_AVERAGE=all by the number of all ranks.

    Rows with the same index are not added, because Keras 3 does not add them either: Adam, for example, squares each
    row. So the result is that of one process with the rows of all ranks.
    """
    (op, prescale, postscale), process_set = spec.scaled, spec.process_set
    if op not in (Average, Sum):
        raise NotImplementedError(f"tf.IndexedSlices can be reduced only with Average or Sum. Received: {op.name}")
    if not math.isclose(prescale * postscale, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor cannot scale tf.IndexedSlices. Pass "
                                  "sparse_as_dense=True, or convert them first: tf.convert_to_tensor(slices).")
    slices = as_tensor(slices)
    gathered = gather if spec.has_gradient else gather_list
    values, = gathered([slices.values], f"{spec.name}/values", process_set, spec.observer)
    with tf.device(slices.indices.device):
        present = tf.ones([1], slices.indices.dtype)
    indices, submitted = gather_list([slices.indices, present], f"{spec.name}/indices", process_set)
    if op is Average:
        # Ranks that have joined submit nothing.
        counts_all = runtime.current().settings.join_average == "all"
        ranks = place_in(process_set)[1] if counts_all else tf.size(submitted)
        values = values / tf.cast(ranks, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def with_unique_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return slices with one row for each index, the sum of all rows with this index. Local. XLA cannot compile it."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def gather(tensors: Sequence[tf.Tensor], name: str, process_set: int = 0, observer: Observer | None = None,
           shapes: Sequence[tf.TensorShape] = ()) -> list[tf.Tensor]:
    """As gather_list, but differentiable."""
    return with_gradient(partial(gather_list, name=name, process_set=process_set, observer=observer, shapes=shapes),
                         GatherGradient(name, process_set), tensors)


@dataclass(frozen=True)
class GatherGradient(Gradient):
    """The gradient of a gather: for each tensor, this rank's part of the average of the ranks' gradients."""

    name: str
    process_set: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        name = of_gradient(self.name, self.process_set)
        means = reduce_dense(upstream, ReduceSpec(name, ScaledOp(Average), process_set=self.process_set,
                                                  has_gradient=True))
        if xla.is_compiled():
            return equal_parts(means, values, name, self.process_set)
        own = tf.stack([tf.shape(value, tf.int64)[0] for value in values])
        rows, = gather_list([own[tf.newaxis]], f"{name}/rows", self.process_set)
        before = tf.reduce_sum(rows[:place_in(self.process_set)[0]], axis=0)
        return [mean[before[i]:before[i] + own[i]] for i, mean in enumerate(means)]


def equal_parts(joined: Sequence[tf.Tensor], values: Sequence[tf.Tensor], name: str, process_set: int = 0,
                axis: int = 0) -> list[tf.Tensor]:
    """Split each of `joined` into one equal part for each rank, and return this rank's parts. Local.

    `joined`: Tensors with the shapes that a gather of `values` returns. `name`: The name of this gather.
    Raises InvalidRequestError: The known shapes show that ranks have parts of different sizes.
    """
    topology = topology_of(process_set)
    for whole, value in zip(joined, values, strict=True):
        rows, own = whole.shape[axis], value.shape[axis]
        if None not in (rows, own) and rows != topology.size * own:
            raise InvalidRequestError(f"{name}: XLA can compile the gradient of a gather only if all ranks have the "
                                      "same number of rows. Leave jit_compile out of the function.")
    return [tf.split(whole, topology.size, axis)[topology.rank] for whole in joined]


def gather_list(tensors: Sequence[tf.Tensor], name: str, process_set: int = 0, observer: Observer | None = None,
                shapes: Sequence[tf.TensorShape] = ()) -> list[tf.Tensor]:
    """Return each tensor, concatenated over the ranks along the first dimension. One collective, not differentiable.

    `shapes`: The shapes of the results. Default: with an unknown number of rows; or in a function that XLA compiles, as
    if all ranks had the same number of rows.
    """
    device = call_site.device_of(tensors, process_set)
    has_rows = all(t.shape.rank for t in tensors)
    times_rows = 0 if shapes else topology_of(process_set).size
    run = partial(cpu.run, times_rows=times_rows) if device is None or not has_rows else \
        partial(call_site.run, device, keeps_shapes=False)
    shapes = shapes or [tf.TensorShape([None]).concatenate(t.shape[1:]) if t.shape.rank else t.shape for t in tensors]
    return run(name, lambda arrays: allgather_request(name, specs_of(arrays), process_set=process_set), tensors, shapes,
               process_set, observer=observer)


def broadcast_list(tensors: Sequence[tf.Tensor], root_rank: int, name: str, labels: tuple[str, ...] = (),
                   process_set: int = 0) -> list[tf.Tensor]:
    """Return root_rank's values of dense tensors. One collective, not differentiable."""
    ranks, device = topology_of(process_set).job_ranks, call_site.device_of(tensors, process_set)
    wait = cpu.Wait.ALWAYS if len(tensors) > 1 else cpu.Wait.IF_LAST
    run = partial(cpu.run, wait=wait) if device is None else partial(call_site.run, device)
    return run(name, lambda arrays: broadcast_request(name, specs_of(arrays), root_rank, ranks, labels,
                                                      process_set=process_set),
               tensors, [t.shape for t in tensors], process_set)
