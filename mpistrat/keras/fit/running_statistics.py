"""State that layers update from each rank's own rows, such as the running statistics of BatchNormalization.

When an epoch ends, and before the model is saved within an epoch, all ranks get the same: of floating-point numbers the
mean, as for moving averages; of int32 and int64, which count, the largest. A variable that was made with
aggregation="sum" gets what all ranks have added to it; under a strategy assign_add does so at once. The sums of
gradients that wait for an update get their mean, which does not change the update: a file that one rank writes then has
the gradients of all.

Called by what mpistrat adds to fit, and under a strategy; averaging is collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from keras.callbacks import Callback, ModelCheckpoint

from ...api import ops as array_ops
from ...core.request import Average, Max, ReduceOp, ScaledOp, Sum
from ...tensorflow.bridge.buckets import reduce_list
from ...tensorflow.gradients import label_of
from ...tensorflow.identity_set import IdentitySet
from ...tensorflow.list_ops import number_of
from .._private import non_trainable_variables
from ..callbacks import Logs
from .fit_optimizers import FitOptimizers

# Takes an operation, variables and their labels, and returns the reduced values. Collective.
Reduce = Callable[[ReduceOp, list[keras.Variable], list[str]], list[tf.Tensor]]


def running_statistics(model: keras.Model) -> list[keras.Variable]:
    """The running statistics of all layers, those of a frozen layer included."""
    return [v for v in _state(model) if keras.backend.is_float_dtype(v.dtype) and not _is_aggregated(v)]


def counters(model: keras.Model) -> list[keras.Variable]:
    """The state of all layers that counts. The random state of a layer, which is each rank's own, is uint32."""
    return [v for v in _state(model) if v.dtype in ("int32", "int64") and not _is_aggregated(v)]


def _sums(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in _state(model) if getattr(variable, "aggregation", "none") == "sum"]


def _state(model: keras.Model) -> list[keras.Variable]:
    return list(IdentitySet(non_trainable_variables(model)))


def _is_aggregated(variable: keras.Variable) -> bool:
    return getattr(variable, "aggregation", "none") in ("sum", "only_first_replica")


def average_state(model: keras.Model, accumulators: Sequence[keras.Variable], reduce: Reduce,
                  shared: Callable[[list[keras.Variable]], list[keras.Variable]] = list) -> None:
    """Set running statistics and sums of gradients on all ranks to their mean, counters to the largest. Collective.

    Args:
        model: The model, whose layers have the statistics and the counters.
        accumulators: The sums of gradients of its optimizers.
        reduce: Reduces the values of variables.
        shared: Takes variables, and leaves out those that are local to each rank.
    """
    for op, variables in ((Average, [*running_statistics(model), *accumulators]), (Max, counters(model))):
        reduced = shared(variables)
        for variable, value in zip(reduced, reduce(op, reduced, [label_of(v) for v in reduced]), strict=True):
            variable.assign(value)


@dataclass(frozen=True)
class SaveSchedule:
    """The state of a ModelCheckpoint's count, which goes on from epoch to epoch, and from fit to fit.

    Attributes:
        save_freq: Batches between two saves.
        seen: Batches since the last save.
        last: The number of the last batch in its epoch; None before the first.
    """

    save_freq: int
    seen: int = 0
    last: int | None = None

    def after(self, batch: int) -> "SaveSchedule":
        """The state after this batch. A step of several batches has the number of its last batch, as in Keras."""
        seen = self.seen + (batch + 1 if self.last is None or batch <= self.last else batch - self.last)
        return replace(self, seen=0 if seen >= self.save_freq else seen, last=batch)

    @property
    def saves(self) -> bool:
        """Whether the model is saved after the last batch."""
        return self.last is not None and self.seen == 0


_schedules: WeakKeyDictionary[Callback, SaveSchedule] = WeakKeyDictionary()


def schedules_of(callbacks: Sequence[Callback]) -> tuple[SaveSchedule, ...]:
    """The schedules of those callbacks that save the model within an epoch."""
    return tuple(_schedules.setdefault(callback, SaveSchedule(callback.save_freq)) for callback in callbacks
                 if isinstance(callback, ModelCheckpoint) and callback.save_freq != "epoch")


class AverageStatistics(Callback):
    """Makes the state of layers, except local variables, equal when an epoch ends. Collective; fit adds it.

    So it does before a callback of any rank saves the model within an epoch. It comes before callbacks that save the
    model. Validation in fit comes before it, with each rank's own statistics.

    Args:
        optimizers: Those of the model.
        callbacks: The callbacks of fit on this rank.
        exchanges: Whether it exchanges the schedules of the ranks when training begins.

    Attributes:
        schedules: Those of the callbacks of all ranks that save within an epoch. Without `exchanges` FitChecks sets
            them.
    """

    def __init__(self, optimizers: FitOptimizers, callbacks: Sequence[Callback], exchanges: bool):
        super().__init__()
        self._name, self._optimizers = f"{optimizers.name}/statistics", optimizers
        self._callbacks, self._exchanges = callbacks, exchanges
        self.schedules: list[SaveSchedule] = []
        self._summed: dict[int, tf.Tensor] = {}  # the value that all ranks had last, by the variable's id

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._exchanges:
            of_ranks = array_ops.allgather_object(schedules_of(self._callbacks), f"{self._name}/saves",
                                                  self._optimizers.process_set)
            self.schedules = [schedule for of_rank in of_ranks for schedule in of_rank]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        # Not when training begins: variables may be broadcast then.
        for variable in _sums(self.model):
            self._summed.setdefault(id(variable), tf.convert_to_tensor(variable))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        for callback in self._callbacks:
            if callback in _schedules:
                _schedules[callback] = _schedules[callback].after(batch)
        self.schedules = [schedule.after(batch) for schedule in self.schedules]
        if any(schedule.saves for schedule in self.schedules):
            self._average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._average()

    def _average(self) -> None:
        average_state(self.model, self._optimizers.accumulators, self._reduced, self._optimizers.shared)
        variables = self._optimizers.shared(_sums(self.model))
        # A variable that the first step has made began at zero.
        before = [self._summed.get(id(v), tf.zeros(v.shape, v.dtype)) for v in variables]
        added = self._reduced(Sum, variables, [label_of(v) for v in variables], before)
        for variable, value, increment in zip(variables, before, added, strict=True):
            variable.assign(value + increment)
            self._summed[id(variable)] = value + increment

    def _reduced(self, op: ReduceOp, variables: list[keras.Variable], labels: list[str],
                 before: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        tensors = [tf.convert_to_tensor(v) for v in variables]
        tensors = [t - b for t, b in zip(tensors, before, strict=True)] if before else tensors
        return reduce_list(tensors, f"{self._name}/{op.name}", ScaledOp(op), labels=labels,
                           process_set=number_of(self._optimizers.process_set, self._name))
