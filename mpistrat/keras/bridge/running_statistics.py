"""State that layers update from each rank's own rows, such as the running statistics of BatchNormalization.

When an epoch ends, and before the model is saved within an epoch, all ranks get the same state. Variables of floats,
such as moving averages, get the mean over the ranks. Variables of int32 and int64, which are counters, get the largest
value. Variables made with aggregation="sum" get the sum of all ranks' additions; under a strategy assign_add does this
at once. Accumulated gradients get their mean. This does not change the update, and a file that one rank writes has the
gradients of all ranks.
The callbacks that mpistrat adds to fit, and strategies, call this module. Averaging is collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from ...core.request import Average, Max, ReduceOp, ScaledOp, Sum
from ...tensorflow.gradients import label_of
from ...tensorflow.graph.buckets import reduce_list
from ...tensorflow.graph.reduce_spec import ReduceSpec
from ...tensorflow.kerases import aggregation_of, is_of_keras
from ...tensorflow.list_ops import number_of
from .private_names import Callback, Logs, non_trainable_variables, states_in
from .training import Training

_AGGREGATED = ("sum", "only_first_replica")


def running_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the running statistics of all layers, including frozen layers."""
    return [v for v in non_trainable_variables(model)
            if tf.as_dtype(v.dtype).is_floating and aggregation_of(v) not in _AGGREGATED]


def average_statistics(training: Training) -> None:
    """Set running statistics and accumulated gradients to the ranks' mean, and counters to the maximum. Collective.

    Variables that are local to each rank are not changed.
    """
    model = training.model
    # The random state of a layer, which differs by rank, is uint32.
    counters = [v for v in non_trainable_variables(model)
                if v.dtype in ("int32", "int64") and aggregation_of(v) not in _AGGREGATED]
    for op, variables in ((Average, [*running_statistics(model), *training.accumulators]),
                          (Max, [*counters, *training.counters])):
        shared = training.shared(variables)
        for variable, value in zip(shared, _reduced(training, op, shared), strict=True):
            variable.assign(value)


def _reduced(training: Training, op: ReduceOp, variables: list[keras.Variable],
             before: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """Return the values of variables, minus the values `before` if given, reduced over the ranks. Collective."""
    tensors = [training.value_of(v) for v in variables]
    tensors = [t - b for t, b in zip(tensors, before, strict=True)] if before else tensors
    name = f"{training.name}/statistics"
    return reduce_list(tensors, ReduceSpec(f"{name}/{op.name}", ScaledOp(op), [label_of(v) for v in variables],
                                           process_set=number_of(training.process_set, name)))


@dataclass(frozen=True)
class SaveSchedule:
    """The state of a ModelCheckpoint's batch count, which continues across epochs and calls of fit."""

    save_freq: int  # Batches between two saves
    seen: int = 0  # Batches since the last save
    last: int | None = None  # The number of the last batch in its epoch; None before the first

    def after(self, batch: int) -> "SaveSchedule":
        """Return the state after `batch`. For a step of several batches it is the last batch's number, as in Keras."""
        seen = self.seen + (batch + 1 if self.last is None or batch <= self.last else batch - self.last)
        return replace(self, seen=0 if seen >= self.save_freq else seen, last=batch)

    @property
    def saves(self) -> bool:
        """Whether the model is saved after the last batch."""
        return self.last is not None and self.seen == 0


_schedules: WeakKeyDictionary[Callback, SaveSchedule] = WeakKeyDictionary()


def schedules_of(callbacks: Sequence[Callback]) -> tuple[SaveSchedule, ...]:
    """Return the schedules of the callbacks that save the model within an epoch."""
    return tuple(_schedules.setdefault(callback, SaveSchedule(callback.save_freq)) for callback in callbacks
                 if is_of_keras(callback, "ModelCheckpoint", "BackupAndRestore")
                 and callback.save_freq and callback.save_freq != "epoch")


class AverageStatistics(Callback):
    """Makes the state of layers, except local variables, equal on all ranks when an epoch ends. Collective.

    It also does this before a callback of any rank saves the model within an epoch, and gathers the state of sharded
    optimizers. fit adds it before the callbacks that save the model. Validation in fit comes before it, with each
    rank's own statistics.
    """

    def __init__(self, training: Training, callbacks: Sequence[Callback]):
        super().__init__()
        self._training, self._callbacks = training, callbacks
        # The schedules of all ranks' callbacks that save within an epoch. FitChecks sets them.
        self.schedules: list[SaveSchedule] = []
        self._summed: dict[int, tf.Tensor] = {}  # the last value that all ranks had in common, by the variable's id

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        for state in states_in(self._training.parts):
            state.forget()
        # Not when training begins: variables may be broadcast then.
        for variable in self._sums():
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

    def _sums(self) -> list[keras.Variable]:
        """Return the variables that get the sum of all ranks' additions. None under a strategy: assign_add does it."""
        return [] if self._training.is_under_strategy else [
            variable for variable in non_trainable_variables(self.model) if aggregation_of(variable) == "sum"]

    def _average(self) -> None:
        self._training.synchronise()
        self._training.consolidate()
        if not self._training.averages_statistics:
            return
        average_statistics(self._training)
        variables = self._training.shared(self._sums())
        # A variable that the first step has made was 0 at first.
        before = [self._summed.get(id(v), tf.zeros(v.shape, v.dtype)) for v in variables]
        for variable, value, increment in zip(variables, before, _reduced(self._training, Sum, variables, before),
                                              strict=True):
            variable.assign(value + increment)
            self._summed[id(variable)] = value + increment
