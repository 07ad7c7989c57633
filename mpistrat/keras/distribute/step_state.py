"""State that the replaced functions share: the strategy in use, the rows of a batch, and flags for compiled steps.

A tf.function is traced once and runs many times. So a value that changes between runs is a tf.Variable here: Python
assigns it with `set_flag`, the compiled step reads it with `flag`.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

import keras
import tensorflow as tf

from ...tensorflow.bridge.differentiable import loss_weighted
from ...tensorflow.bridge.program_order import captured_in_function
from ...tensorflow.distribute import MPIStrategy, collectives

T = TypeVar("T")


class StepState(threading.local):
    """The state of the step that this thread traces.

    Attributes:
        rows: The number of rows of this rank's batch, a tensor. None outside of Keras' steps.
        weight: By what this rank's loss counts: its rows in units of the usual number. None outside of Keras' steps,
            for losses that are no mean over rows, and with one rank.
        total: The sum of all ranks' weights, once a collective has told it.
        scaled: Losses that Keras has divided by the number of ranks.
        logs_may_differ: Whether the ranks may return different logs, which Keras does not use.
    """

    rows: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    total: tf.Tensor | None = None
    scaled: list[tf.Tensor]
    logs_may_differ: bool = False

    def __init__(self) -> None:
        self.scaled = []


state = StepState()
_flags: dict[str, tf.Variable] = {}
_assigned: dict[str, int | bool] = {}  # the value last assigned to each flag


def create_flags() -> None:
    """Create the flags; call it outside of any strategy's scope. They are equal on all ranks.

    "usual_rows" is the number of rows of a full batch on each rank. "logs_wanted" is whether a callback reads the logs
    of each batch.
    """
    for name, initial in (("usual_rows", tf.constant(1, tf.int64)), ("logs_wanted", tf.constant(True))):
        if name not in _flags:
            with tf.init_scope(), tf.device("CPU:0"):
                _flags[name] = tf.Variable(initial, trainable=False, name=f"mpistrat_{name}")


def flag(name: str) -> tf.Variable:
    """The variable that a compiled step reads."""
    return _flags[name]


def set_flag(name: str, value: int | bool) -> None:
    """Assign a flag. Assigning takes longer than comparing, so an equal value is not assigned again."""
    if _assigned.get(name) != value:
        _flags[name].assign(value)
        _assigned[name] = value


def strategy_here() -> MPIStrategy | None:
    """The MPIStrategy whose replica this code runs in, or None."""
    if tf.distribute.in_cross_replica_context():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, MPIStrategy) else None


def strategy_of(model: keras.Model | None) -> MPIStrategy | None:
    """The MPIStrategy in whose scope a model was created, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, MPIStrategy) else None


@contextlib.contextmanager
def step_of(model: keras.Model, data: object, logs_may_differ: bool) -> Iterator[None]:
    """A context for tracing a step of `model` on `data`; it sets the state."""
    before = state.rows, state.weight
    state.rows = rows_of(data)
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    state.weight = tf.cast(state.rows, tf.float32) / tf.cast(flag("usual_rows"), tf.float32) \
        if state.rows is not None and _is_mean(model) and not is_alone else None
    state.total, state.logs_may_differ = None, logs_may_differ
    try:
        with loss_weighted(state.weight):
            yield
    finally:
        state.rows, state.weight = before
        state.total = None
        state.scaled.clear()


def share() -> tf.Tensor:
    """This rank's part of the rows of the global batch, times the number of ranks: 1 if all have as many rows.

    Collective, unless the sum of the gradients has told how many rows all have. Only where there is a weight.
    """
    assert state.weight is not None
    total = captured_in_function(state.total)
    if total is None:
        total = state.total = collectives.all_reduce([state.weight], tf.distribute.ReduceOp.SUM, "rows")[0]
    return state.weight * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32) / total


def unscaled(loss: T) -> T:
    """A loss that Keras has divided by the number of ranks as it would be in one process; anything else as it is."""
    if not any(loss is scaled for scaled in state.scaled):
        return loss
    return tf.convert_to_tensor(loss) * tf.distribute.get_strategy().num_replicas_in_sync


def rows_of(data: object) -> tf.Tensor | None:
    """The number of rows of a batch, or None if it has no tensor with rows."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) else \
                leaf.nrows(tf.int64) if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0]
    return None


def _is_mean(model: keras.Model) -> bool:
    """Whether the model's losses are means over rows. Sums need no weights."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return all(getattr(loss, "reduction", "mean") not in ("sum", "none", None) for loss in losses if loss is not None)
