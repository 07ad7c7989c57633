"""State that the replaced functions share: the strategy in use, the rows of a batch, and flags for compiled steps.

A tf.function is traced once and runs many times. So a value that changes between runs is a variable here: Python
assigns the variable, and the compiled step reads it. Each model has its own flags: several threads may call fit.
"""

import contextlib
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from ...keras.bridge.measures import LocalScalar, rows_of
from ...process.error_text import is_users
from ...tensorflow.bridge.program_order import captured_in_function
from ...tensorflow.gradients import GradientReducer
from ...tensorflow.list_ops import loss_weighted
from .. import collectives
from ..mpi_strategy import MPIStrategy


class Flags:
    """Values for a model's compiled steps, equal on all ranks: the rows of a full batch, and whether logs are read."""

    def __init__(self) -> None:
        # The number of rows of a full batch on each rank, and whether a callback reads the logs of each batch.
        self._scalars = {"usual_rows": LocalScalar(tf.int64, 1), "logs_wanted": LocalScalar(tf.bool, 1)}
        self._assigned: dict[str, int | bool] = {}

    def assign(self, name: str, value: int | bool) -> None:
        """Assign a flag. Assigning takes longer than comparing, so an equal value is not assigned again."""
        if self._assigned.get(name) != value:
            self._scalars[name].assign(value)
            self._assigned[name] = value

    def read(self, name: str) -> tf.Tensor:
        """Return the value of a flag. A compiled step reads it each time it runs."""
        return self._scalars[name].read()


_flags: "weakref.WeakKeyDictionary[keras.Model, Flags]" = weakref.WeakKeyDictionary()


def flags_of(model: keras.Model) -> Flags:
    return _flags.get(model) or _flags.setdefault(model, Flags())


class StepState(threading.local):
    """The state of the step that this thread traces."""

    rows: tf.Tensor | None = None  # The number of rows of this rank's batch. None outside of Keras' steps.
    # The weight of this rank's loss: its number of rows, divided by the usual number. None outside of Keras' steps, for
    # losses that are not reduced over the rows, and with one rank.
    weight: tf.Tensor | None = None
    has_sums = False  # Whether a loss of the model is a sum over rows
    in_compute_loss: keras.Model | None = None  # The model whose compute_loss runs
    losses_within = 0  # The depth of nested calls of Keras losses
    reducer: GradientReducer | None = None  # The reducer of the optimizer that is applying gradients
    total: tf.Tensor | None = None  # The sum of all ranks' weights, once a collective has computed it
    # The model of the step, and whether this rank has no rows; see trainer.py.
    called: tuple[keras.Model, tf.Tensor] | None = None
    # The flags of the model of the latest step, if Keras ignores the step's logs, so that the ranks' logs may differ.
    may_differ: Flags | None = None


state = StepState()


def warn(text: str) -> None:
    """Issue a warning that names the line of user code. Local."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe()))
    warnings.warn(text, stacklevel=next((level for level, file in enumerate(files, 1) if is_users(file)), 1))


def strategy_here() -> MPIStrategy | None:
    """Return the MPIStrategy in whose replica this code runs; None outside of a replica."""
    if tf.distribute.in_cross_replica_context():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, MPIStrategy) else None


def scope_of(strategy: MPIStrategy) -> AbstractContextManager[object]:
    """Return the scope of a strategy, or a null context in a replica, where the scope cannot be entered again."""
    return contextlib.nullcontext() if tf.distribute.get_strategy() is strategy else strategy.scope()


def strategy_of(model: keras.Model | None) -> MPIStrategy | None:
    """Return the MPIStrategy in whose scope a model was created, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, MPIStrategy) else None


@contextlib.contextmanager
def step_of(model: keras.Model, data: object, logs_may_differ: bool) -> Iterator[None]:
    """A context in which TensorFlow traces a step of `model`. It sets this thread's StepState from the batch `data`."""
    before = state.rows, state.weight
    state.rows, state.total = rows_of(data), None
    reductions = {getattr(loss, "reduction", "mean") for loss in keras.tree.flatten(getattr(model, "loss", None))}
    state.has_sums = "sum" in reductions
    is_alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
    flags = flags_of(model)
    try:
        state.may_differ = flags if logs_may_differ else None
        state.weight = tf.cast(state.rows, tf.float32) / tf.cast(flags.read("usual_rows"), tf.float32) \
            if state.rows is not None and reductions.isdisjoint(("none", None)) and not is_alone else None
        with loss_weighted(state.weight):
            yield
    finally:
        state.rows, state.weight = before
        state.total = None


def share(of: tf.Tensor | None = None) -> tf.Tensor:
    """Return this rank's share of the rows of the global batch, times the number of ranks: 1 if the shares are equal.

    If `of` is not None, return `of` divided by its mean over the ranks instead. StepState.weight must not be None.
    Collective, but local if `of` is None and an earlier collective of the step has summed the rows.
    """
    assert state.weight is not None
    size = tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32)
    total = captured_in_function(state.total)
    if of is None and total is not None:
        return state.weight * size / total
    # A weight whose sum is not known yet is summed in the same collective.
    values = [*([] if of is None else [of]), *([state.weight] if total is None else [])]
    totals = collectives.all_reduce(values, tf.distribute.ReduceOp.SUM, "rows")
    if total is None:
        state.total = totals[-1]
    return state.weight * size / totals[0] if of is None else tf.math.divide_no_nan(of * size, totals[0])
