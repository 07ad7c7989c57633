"""Training: which ranks train a model in fit, how their collectives are named, and which state the ranks share.

Subclasses of Training are for distributed optimizers, strategies, and averaged weights (local_sgd.py). The callbacks
that mpistrat adds to fit call this module, in the thread of fit. Local, unless marked as collective.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...api.process_sets import ProcessSet, global_process_set
from ...core.request import Average, Max, ReduceOp, ScaledOp, Sum
from ...tensorflow import kerases
from ...tensorflow.bridge.names import eager
from ...tensorflow.bridge.types import Variable
from ...tensorflow.consistency import CAUSES, FirstSteps
from ...tensorflow.gradients import GradientReducer, label_of
from ...tensorflow.graph.buckets import ReduceSpec, reduce_list
from ...tensorflow.kerases import IdentitySet, accumulators_of
from ...tensorflow.list_ops import number_of
from .private_names import (
    Callback,
    Logs,
    distributed_in,
    non_trainable_variables,
    optimizers_in,
    parts_of,
    states_in,
    trained_by,
    weights_of,
)


class Training:
    """A model, and how several ranks train it together. A model that is in fit has one Training."""

    name: str  # The prefix of the names of collectives
    process_set: ProcessSet  # The ranks that take part
    averages_statistics = True  # Whether fit averages the running statistics
    # Whether the ranks train under a strategy, which shards the data, so all have the same data, and reduces metrics.
    is_under_strategy = False
    joins = False  # Whether ranks with fewer steps join at the end of each epoch
    accumulates = False  # Whether gradients are accumulated
    is_reading = False  # Whether batches are read without training
    shards_state = False  # Whether the state of optimizers is divided among the ranks, once they are built
    causes = CAUSES  # The usual causes of different weights, with advice
    settings = ""  # How the ranks average their weights, in words; "" if the weights are the same in every step

    def __init__(self, model: keras.Model):
        self.model = model

    @property
    def parts(self) -> list[Optimizer]:
        """The optimizers of the model and their inner optimizers, in an order that is equal on all ranks."""
        return list(IdentitySet(part for optimizer in optimizers_of(self.model) for part in parts_of(optimizer)))

    @property
    def first_steps(self) -> list[FirstSteps]:
        """The checks of the first reductions of gradients, one for each optimizer that reduces gradients."""
        states = (vars(part).get("_mpistrat") for part in self.parts)
        return [own.reducer.checks for own in states if own is not None and own.reducer_or_none is not None]

    @property
    def leaves_weights_uncompared(self) -> bool:
        """Whether fit must compare the weights of the ranks, because some first reductions of gradients do not."""
        return False

    @property
    def has_local(self) -> bool:
        """Whether the model has local variables, which each rank trains separately."""
        return False

    @property
    def undistributed(self) -> str:
        """A sentence on the optimizers of the model that have trained without averaging; "" if there are none."""
        return ""

    @property
    def accumulators(self) -> list[keras.Variable]:
        return [variable for optimizer in self.parts for variable in accumulators_of(optimizer)]

    @property
    def counters(self) -> list[keras.Variable]:
        """The step counters of the optimizers, if they may differ between the ranks; otherwise []."""
        return []

    @property
    def is_synchronised(self) -> bool:
        """Whether the ranks have the same weights now."""
        return True

    def synchronise(self) -> None:
        """Give all ranks the same weights. Does nothing without LocalSGD and DiLoCo. Collective."""

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return those of `variables` that must be equal on all ranks."""
        raise NotImplementedError

    def compared(self) -> list[Variable]:
        own = IdentitySet(non_trainable_variables(self.model))
        return [v for v in self.shared(list(IdentitySet([*weights_of(self.model), *compared_in(self.parts)])))
                if v not in own]

    def consolidate(self, place: int = 0) -> None:
        """Gather sharded optimizer state on rank `place` of the process set, for saving the model. Collective."""
        for state in states_in(self.parts):
            state.consolidate(to=self.process_set.group("fit").topology.job_ranks[place])

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """Return this rank's value of a variable. For eager code."""
        return tf.convert_to_tensor(variable)

    def known_values(self) -> AbstractContextManager[None]:
        """Return a context in which a single rank can read all values of the model. This call is collective."""
        return nullcontext()


class DistributedTraining(Training):
    """Training with the distributed optimizers of one process set.

    The process set and the name are those of the first optimizer, which must be the same on all ranks. fit neither
    checks nor averages what optimizers of another process set train. `wholes`: the optimizers, without inner ones.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Optimizer], wholes: Sequence[Optimizer]):
        super().__init__(model)
        first: GradientReducer = optimizers[0]._mpistrat.reducer
        self.name, self.process_set = first.name, first.process_set
        number = self.process_set.process_set_id
        self._optimizers = [o for o in optimizers if o._mpistrat.reducer.process_set.process_set_id == number]
        self._elsewhere = [o for o in optimizers if o not in IdentitySet(self._optimizers)]
        self._wholes = wholes
        self.reducers: list[GradientReducer] = [o._mpistrat.reducer for o in self._optimizers]  # One for each optimizer
        self.averages_statistics = all(o._mpistrat.arguments.average_statistics for o in self._optimizers)
        self.joins = any(o._mpistrat.arguments.uneven == "join" for o in self._optimizers)
        self.accumulates = any(map(kerases.accumulated_passes, self._optimizers))
        self.shards_state = any(o._mpistrat.arguments.shard_state for o in self._optimizers)

    @property
    def first_steps(self) -> list[FirstSteps]:
        return [reducer.checks for reducer in self.reducers if reducer.checks is not None]

    @property
    def leaves_weights_uncompared(self) -> bool:
        """Whether some first reductions cannot compare weights, due to weight decay or sharded optimizers."""
        return any(reducer.checks_weights and reducer.checks is not None and (
            self.shards_state or (reducer.changes_early and not reducer.checks.is_done)) for reducer in self.reducers)

    @property
    def undistributed(self) -> str:
        plain = [f"{each.name} ({type(each).__name__})" for each in self._wholes
                 if kerases.calls_of(each) and not distributed_in(each)]
        return f"The model also has optimizers without hvd.DistributedOptimizer: {', '.join(plain)}." if plain else ""

    @property
    def has_local(self) -> bool:
        return any(reducer.has_local for reducer in self.reducers)

    @property
    def parts(self) -> list[Optimizer]:
        return list(IdentitySet(part for optimizer in self._optimizers for whole in self._wholes
                                if optimizer in IdentitySet(parts_of(whole)) for part in parts_of(whole)))

    @property
    def calls(self) -> int:
        """The number of calls of `apply` on this rank. If gradients are accumulated, there are fewer updates."""
        return sum(map(kerases.calls_of, self._optimizers))

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer variables that ranks without batches receive when an epoch ends, with uneven="join"."""
        return [variable for optimizer in self._optimizers for variable in kerases.variables_of(optimizer)]

    @property
    def accumulators(self) -> list[keras.Variable]:
        return [variable for optimizer in self._optimizers for variable in accumulators_of(optimizer)]

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return those of `variables` that are neither local to each rank nor trained in a different process set.

        The optimizer state of a local variable counts as local.
        """
        local = IdentitySet(slot for optimizer, reducer in zip(self._optimizers, self.reducers, strict=True)
                            for slot in _local_slots(optimizer, reducer))
        elsewhere = IdentitySet(v for optimizer in self._elsewhere for part in parts_of(optimizer)
                                for v in trained_by(part))
        return [v for v in variables if v not in local and v not in elsewhere
                and not any(reducer.is_local(v) for reducer in self.reducers)]


class StrategyTraining(Training):
    """Training of a model under an MPIStrategy, by all ranks of the job."""

    is_under_strategy = True
    causes = ("a model or an optimizer that was made outside of strategy.scope(); weights that were loaded or assigned "
              "on some ranks only (call load_weights, load_model and set_weights on all ranks); a callback or a "
              "learning rate on some ranks only.")

    def __init__(self, model: keras.Model):
        super().__init__(model)
        self.name, self.process_set = eager("strategy"), global_process_set
        self.accumulates = any(map(kerases.accumulated_passes, self.parts))
        self.usual_rows = 1  # The rows of this rank's part of the first batch, once they are known
        self.has_begun = False  # Whether the ranks have exchanged these numbers
        self._extended = model.distribute_strategy.extended
        self.shards_state = self._extended.slots.are_sharded

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        return [v for v in variables if self._extended.is_everywhere(getattr(v, "value", v))]

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        return self._extended.local(variable.value)

    def known_values(self) -> AbstractContextManager[None]:
        return self._extended.known_values(self.model)


@dataclass
class StepValues:
    """Values on which the steps of a model under a strategy depend, such as row counts. Equal on all ranks."""

    # The number of rows of a full batch on each rank.
    train_rows: int = 1
    test_rows: int = 1
    reads_logs: bool = True  # Whether a callback reads the logs of each batch, which are reduced over the ranks then


_step_values: "WeakKeyDictionary[keras.Model, StepValues]" = WeakKeyDictionary()


def step_values_of(model: keras.Model) -> StepValues:
    """Return the StepValues of a model. They are not stored in the model, because Keras would track them there."""
    return _step_values.setdefault(model, StepValues())


# The trainings of the models that fit now.
in_fit: "WeakKeyDictionary[keras.Model, Training]" = WeakKeyDictionary()


def training_of(model: keras.Model) -> Training | None:
    """Return a new Training of a model under a strategy or with distributed optimizers; None for other models.

    The optimizers of `compile` come first, then those in attributes of the model. The result is None also for a Keras 2
    model under a strategy, because Keras 2 itself calls strategies of TensorFlow.
    """
    if is_under_strategy(model):
        return None if kerases.is_keras2(model) else StrategyTraining(model)
    wholes = optimizers_of(model)
    compiled = IdentitySet(distributed_in(getattr(model, "optimizer", None)))
    # Then in the order of creation, since the order of attributes may differ by rank.
    found = sorted(IdentitySet(each for optimizer in wholes for each in distributed_in(optimizer)),
                   key=lambda each: (each not in compiled, each._mpistrat.reducer.optimizer.place))
    return DistributedTraining(model, found, wholes) if found else None


def name_in_fit(model: keras.Model, operation: str, process_set: ProcessSet) -> str:
    """Return a name for a callback's collective, beginning with the optimizer's if the optimizer uses `process_set`."""
    training, number = training_of(model), process_set.process_set_id
    if isinstance(training, DistributedTraining) and training.process_set.process_set_id == number:
        return f"{training.name}/{operation}"
    return eager(operation, number or 0)


def is_under_strategy(model: keras.Model) -> bool:
    """Return whether a model was made in the scope of an MPIStrategy."""
    # For a model that was made outside of a scope, the public attribute is the strategy of the caller's scope.
    return getattr(getattr(model, "_distribute_strategy", None), "is_mpi_strategy", False)


def optimizers_of(model: keras.Model) -> list[Optimizer]:
    """Return the optimizer of `compile`, then optimizers in public attributes, and in lists, tuples and dicts there."""
    public = [value for name, value in vars(model).items() if not name.startswith("_")]
    return list(IdentitySet(optimizers_in([getattr(model, "optimizer", None), *public])))


def compared_in(optimizers: Iterable[Optimizer]) -> list[keras.Variable]:
    """Return the optimizer variables that the ranks compare. Callers leave out those that belong to local variables.

    Accumulated gradients are not included, because each rank computes them from its own rows. Step counters are not
    included either: if the data of a rank ends with an error, TensorFlow has already counted the step that fails.
    """
    optimizers = list(optimizers)
    own = IdentitySet(variable for optimizer in optimizers
                      for variable in (*accumulators_of(optimizer), kerases.steps_of(optimizer)))
    return [variable for optimizer in optimizers for variable in kerases.variables_of(optimizer) if variable not in own]


def _local_slots(optimizer: Optimizer, reducer: GradientReducer) -> list[keras.Variable]:
    """Return the optimizer variables (momenta and others) of local variables. In Keras 3 their names tell which."""
    if not reducer.has_local:
        return []
    if kerases.is_keras2(optimizer):
        return [slot for weight in trained_by(optimizer) if reducer.is_local(weight)
                for part in parts_of(optimizer) for slot in kerases.slots_of(part, weight)]
    prefixes = {f"{v.path.replace('/', '_')}_": reducer.is_local(v)
                for part in parts_of(optimizer) for v in trained_by(part)}
    slots = []
    for slot in optimizer.variables:
        fitting = [prefix for prefix in prefixes if slot.name.replace("/", "_").startswith(prefix)]
        if fitting and prefixes[max(fitting, key=len)]:
            slots.append(slot)
    return slots


# -- state that layers update from each rank's own rows, such as the statistics of BatchNormalization ------------------
#
# When an epoch ends, and before the model is saved within an epoch, all ranks get the same state. Variables of floats,
# such as moving averages, get the mean over the ranks. Variables of int32 and int64, which are counters, get the
# largest value. Variables made with aggregation="sum" get the sum of all ranks' additions; under a strategy assign_add
# does this at once. Accumulated gradients get their mean. This does not change the update, and a file that one rank
# writes has the gradients of all ranks.

_AGGREGATED = ("sum", "only_first_replica")


def running_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the running statistics of all layers, including frozen layers."""
    return [v for v in non_trainable_variables(model)
            if tf.as_dtype(v.dtype).is_floating and kerases.aggregation_of(v) not in _AGGREGATED]


def average_statistics(training: Training) -> None:
    """Average running statistics and accumulated gradients over the ranks. Set counters to the maximum. Collective."""
    model = training.model
    # The random state of a layer, which differs by rank, is uint32.
    counters = [v for v in non_trainable_variables(model)
                if v.dtype in ("int32", "int64") and kerases.aggregation_of(v) not in _AGGREGATED]
    for op, variables in ((Average, [*running_statistics(model), *training.accumulators]),
                          (Max, [*counters, *training.counters])):
        shared = training.shared(variables)
        for variable, value in zip(shared, _reduced(training, op, shared), strict=True):
            variable.assign(value)


def _reduced(training: Training, op: ReduceOp, variables: list[keras.Variable],
             before: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """Reduce the values of variables, or their differences from `before` if given, over the ranks. Collective."""
    tensors = [training.value_of(v) for v in variables]
    tensors = [t - b for t, b in zip(tensors, before, strict=True)] if before else tensors
    name = f"{training.name}/statistics"
    return reduce_list(tensors, ReduceSpec(f"{name}/{op.name}", ScaledOp(op), [label_of(v) for v in variables],
                                           process_set=number_of(training.process_set, name)))


@dataclass(frozen=True)
class SaveSchedule:
    """The batch count of a ModelCheckpoint that saves within epochs. It continues across epochs and calls of fit."""

    save_freq: int  # Batches between two saves
    seen: int = 0  # Batches since the last save
    last: int | None = None  # The number of the last batch in its epoch; None before the first

    def after(self, batch: int) -> "SaveSchedule":
        """Return the schedule after a step. `batch` is the last batch of the step, counted from 0 in each epoch."""
        seen = self.seen + (batch + 1 if self.last is None or batch <= self.last else batch - self.last)
        return replace(self, seen=0 if seen >= self.save_freq else seen, last=batch)

    @property
    def saves(self) -> bool:
        """Whether the callback saves the model after the batch that was counted last."""
        return self.last is not None and self.seen == 0


_schedules: WeakKeyDictionary[Callback, SaveSchedule] = WeakKeyDictionary()


def schedules_of(callbacks: Sequence[Callback]) -> tuple[SaveSchedule, ...]:
    """Return the schedules of the callbacks that save the model within an epoch."""
    return tuple(_schedules.setdefault(callback, SaveSchedule(callback.save_freq)) for callback in callbacks
                 if kerases.is_of_keras(callback, "ModelCheckpoint", "BackupAndRestore")
                 and callback.save_freq and callback.save_freq != "epoch")


class AverageStatistics(Callback):
    """Makes the state of layers, such as running statistics, equal on all ranks when an epoch ends. Collective.

    The callback does the same before a callback of any rank saves the model within an epoch. Each time it also gathers
    the state of sharded optimizers. It does not change local variables. fit adds it before the callbacks that save the
    model. The validation of an epoch comes earlier, with each rank's own statistics.
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
        """Return layers' variables with aggregation="sum"; [] under a strategy, whose assign_add sums over ranks."""
        return [] if self._training.is_under_strategy else [
            variable for variable in non_trainable_variables(self.model) if kerases.aggregation_of(variable) == "sum"]

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
