"""What a training step of Keras does otherwise under MPIStrategy: how gradients are weighted, and which logs travel.

Keras averages the ranks' mean gradients, each rank weighing the same. Where a global batch does not divide evenly (the
last one, or fewer rows than ranks) that is not the gradient of the global batch, so each rank's is weighted by its
number of rows. The numbers travel with the gradients, and when they are the usual ones nothing is multiplied.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ...tensorflow.distribute import MPIStrategy, collectives
from ...tensorflow.gradients import label_of

_HALVES = (tf.float16, tf.bfloat16)
_SUM = tf.distribute.ReduceOp.SUM


class StepState(threading.local):
    """What is known while a step is traced: the number of rows of this rank, a tensor; None outside of Keras' fit."""

    rows: tf.Tensor | None = None
    logs_may_stay: bool = False


state = StepState()
_shared: dict[str, tf.Variable] = {}
_told: dict[str, Any] = {}  # the values last assigned to these


def shared(name: str, initial: Any) -> tf.Variable:
    """A variable by which Python tells compiled steps something; equal on all ranks. Make it outside of any scope."""
    if name not in _shared:
        with tf.init_scope(), tf.device("CPU:0"):
            _shared[name] = tf.Variable(initial, trainable=False, name=f"mpistrat_{name}")
    return _shared[name]


def tell(name: str, value: Any) -> None:
    """Assign to a shared variable, unless it is the last value assigned: that takes longer than to look."""
    if _told.get(name) != value:
        shared(name, None).assign(value)
        _told[name] = value


def create_shared() -> None:
    """Make the variables that tell steps what rows are usual, and whether somebody reads the logs of each batch."""
    shared("usual_rows", tf.constant(1, tf.int64))
    shared("logs_wanted", tf.constant(True))


def strategy_here() -> MPIStrategy | None:
    """The MPIStrategy whose replica this code runs in."""
    if tf.distribute.in_cross_replica_context():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, MPIStrategy) else None


@contextlib.contextmanager
def step_of(model: Any, data: Any, logs_may_stay: bool) -> Iterator[None]:
    """While a step of `model` on `data` is traced; Keras then calls reduce_logs."""
    before, state.rows = state.rows, rows_of(data) if _is_mean(model) else None
    state.logs_may_stay = logs_may_stay
    try:
        yield
    finally:
        state.rows = before


def rows_of(data: Any) -> tf.Tensor | None:
    """The number of rows of a batch, or None where it has none."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) else \
                leaf.nrows(tf.int64) if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0]
    return None


def _is_mean(model: Any) -> bool:
    """Whether the losses are means over rows. A sum is right as it is."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return all(getattr(loss, "reduction", "mean") not in ("sum", "none", None) for loss in losses if loss is not None)


def reduce_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
    """The gradient of the global batch, of the ranks' gradients. Collective, in a replica of MPIStrategy.

    Args:
        optimizer: Whose gradients they are.
        gradients: Tensors or tf.IndexedSlices; no None.
        variables: What they are gradients of, for error messages, if that is known.
    """
    labels = [label_of(v) for v in variables] if variables is not None else \
        [f"gradient {i}" for i in range(len(gradients))]
    # A sum over several steps has no one number of rows.
    strategy = tf.distribute.get_strategy()
    bucket_bytes = strategy.extended.bucket_bytes()
    if state.rows is None or optimizer.gradient_accumulation_steps:
        return collectives.all_reduce(gradients, _SUM, "gradients", labels, bucket_bytes)
    # Here and not where the step begins: this may be in a branch of it.
    rows, usual = state.rows, shared("usual_rows", None)
    weight = tf.cast(rows, tf.float32) / tf.cast(usual, tf.float32)
    weighted = tf.cond(rows == usual, lambda: _copied(gradients), lambda: [_scaled(g, weight) for g in gradients])
    *summed, total = collectives.all_reduce([*weighted, weight], _SUM, "gradients", [*labels, "rows"], bucket_bytes)
    size = tf.cast(strategy.num_replicas_in_sync, tf.float32)
    return tf.cond(total == size, lambda: _copied(summed), lambda: [_scaled(g, size / total) for g in summed])


def _copied(gradients: Sequence[Any]) -> list[Any]:
    return [tf.nest.map_structure(tf.identity, g, expand_composites=True) for g in gradients]


def _scaled(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.cast(gradient, tf.float32) if gradient.dtype in _HALVES else gradient
    # A rank without rows may have any gradient, also NaN, and must not spoil that of the others.
    return tf.cast(tf.math.multiply_no_nan(wide, tf.cast(factor, wide.dtype)), gradient.dtype)


def reduce_logs(strategy: MPIStrategy, logs: Any) -> Any:
    """The ranks' mean of a step's logs, in one go; or this rank's, where nobody looks at them."""
    def reduced() -> Any:
        return strategy.reduce("MEAN", logs, axis=0)

    may_stay, state.logs_may_stay = state.logs_may_stay, False
    if not may_stay or not all(log.dtype.is_floating for log in tf.nest.flatten(logs)):
        return reduced()
    return tf.cond(shared("logs_wanted", None), reduced, lambda: tf.nest.map_structure(tf.identity, logs))


def running_statistics(model: Any) -> list[Any]:
    """The variables that layers such as BatchNormalization update without gradients: on each rank in its own way."""
    found = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                found[id(variable)] = variable
    return list(found.values())


def average_statistics(model: Any) -> None:
    """Give all ranks the mean of their running statistics. Collective; outside of a replica."""
    strategy = getattr(model, "_distribute_strategy", None)
    if not isinstance(strategy, MPIStrategy) or strategy.num_replicas_in_sync == 1:
        return
    variables = running_statistics(model)
    values = collectives.all_reduce([strategy.extended.local(v.value) for v in variables],
                                    tf.distribute.ReduceOp.MEAN, "statistics", [label_of(v) for v in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def keep_statistics_of_empty(model: Any, step: Callable[[], Any]) -> Any:
    """Run a step; where this rank has no rows, the running statistics stay as they are."""
    variables = running_statistics(model) if state.rows is not None and model.built else []
    if not variables:
        return step()
    before = [tf.identity(v.value) for v in variables]
    outputs = step()

    def restore() -> tf.Tensor:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return tf.constant(0)

    tf.cond(state.rows == 0, restore, lambda: tf.constant(0))
    return outputs
