"""Local SGD and DiLoCo: each rank trains its own weights, and all ranks average the weights every N steps.

For users. The classes are callbacks for fit. User-defined loops can call them too. Collective.
"""

from collections.abc import Sequence
from typing import Literal

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ..api import array_ops, runtime
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import InvalidRequestError, MismatchError
from ..core.request import Average, ScaledOp
from ..core.topology import describe_by_rank
from ..tensorflow.bridge.arguments import checked
from ..tensorflow.bridge.names import eager
from ..tensorflow.bridge.types import Variable
from ..tensorflow.compression import Compression, Compressor, require_compression
from ..tensorflow.consistency import require_equal_weights
from ..tensorflow.graph.buckets import ReduceSpec, reduce_list
from ..tensorflow.kerases import IdentitySet, is_keras2, label_of, steps_of
from ..tensorflow.list_ops import reduce_tensors
from .bridge import patches
from .bridge.private_names import Logs, distributed_in, non_trainable_variables, parts_of
from .bridge.training import Training, average_statistics, compared_in, is_under_strategy, optimizers_of, training_of

LOCAL_SGD = "local_sgd"  # The name, by names.eager, of the collectives of ranks that each train alone

# -- the scope: where gradients are averaged in every step, while weights are averaged over all ranks ------------------

Scope = ProcessSet | Literal["hosts"] | None


def process_set_of(scope: Scope) -> ProcessSet | None:
    """Return the process set in which this rank averages gradients; None if `scope` is None. Collective for "hosts".

    The first call with "hosts" registers a set for each host. With one host the result is the set of all ranks. Raises
    InvalidRequestError if `scope` is not a Scope, or is a set that is not registered or does not include this rank.
    """
    if isinstance(scope, ProcessSet):
        scope.group("scope")
        return scope
    if scope is None:
        return None
    if scope != "hosts":
        raise InvalidRequestError('scope must be None, "hosts" or a ProcessSet that this rank is in. Received: '
                                  f"{scope!r}")
    topology, registry = runtime.current().topology, runtime.current().registry
    if len(topology.hosts) == 1:
        return global_process_set
    known = set(registry.ranks_of.values())
    registry.add([ProcessSet(ranks) for host in topology.hosts if (ranks := topology.ranks_on(host)) not in known])
    return next(registry.sets[number] for number, ranks in registry.ranks_of.items() if ranks == topology.local_ranks)


# -- what fit knows of such a model ------------------------------------------------------------------------------------

class LocalTraining(Training):
    """Training with LocalSGD or DiLoCo: the weights of the ranks differ between two synchronisations of all ranks.

    The argument `optimizers` has the optimizers of a user-defined loop, in which a tape may average gradients. If it is
    empty, those of the model are used. Raises InvalidRequestError for a model of Keras 2 or of a strategy, or if the
    optimizers average gradients over other ranks than the argument `scope` of the LocalSGD or DiLoCo callback.
    """

    causes = ("weights that were not broadcast before training; a callback that only some ranks have; learning rates "
              "that differ between ranks; code that loads or assigns weights on some ranks only, without "
              "hvd.broadcast_variables(model.weights, root_rank=0) after it.")

    def __init__(self, model: keras.Model, averaging: "PeriodicAveraging", optimizers: Sequence[Optimizer] = ()):
        super().__init__(model)
        if is_keras2(model):
            raise InvalidRequestError(f"{type(averaging).__name__} is for models of Keras 3. Train a model of Keras 2 "
                                      "(tf_keras) with hvd.DistributedOptimizer instead.")
        self._averaging, self._optimizers = averaging, list(optimizers) or optimizers_of(model)
        self._require_scope(may_have_tape=bool(optimizers) or type(model).train_step is not keras.Model.train_step)
        self.name, self.process_set, self.joins = eager(LOCAL_SGD), global_process_set, averaging.joins
        self._within = training_of(model)  # by the ranks of the scope
        self.averages_statistics = self._within is None or self._within.averages_statistics
        self.settings = str(averaging)

    @property
    def parts(self) -> list[Optimizer]:
        """All optimizers that update variables. A LossScaleOptimizer is left out: each rank has its own loss scale."""
        found = IdentitySet(part for whole in (*self._optimizers, *self._averaging.outer) for part in parts_of(whole))
        return [part for part in found if not isinstance(part, LossScaleOptimizer)]

    @property
    def leaves_weights_uncompared(self) -> bool:
        return True

    @property
    def has_local(self) -> bool:
        return self._within is not None and self._within.has_local

    @property
    def accumulators(self) -> list[keras.Variable]:
        return []  # Each rank has sums of its own gradients.

    @property
    def counters(self) -> list[keras.Variable]:
        return [steps_of(part) for part in self.parts]

    @property
    def is_synchronised(self) -> bool:
        return not self._averaging.steps_apart

    @property
    def calls(self) -> int:
        return self._averaging.steps

    @property
    def variables(self) -> list[keras.Variable]:
        return [*self.slots, *self._averaging.variables]

    @property
    def slots(self) -> list[keras.Variable]:
        """The optimizer state to average: moving averages of weights (use_ema); with average_slots all float state."""
        own = [part for part in self.parts if part not in IdentitySet(self._averaging.outer)]
        emas = IdentitySet(v for part in own for v in getattr(part, "_model_variables_moving_average", ()))
        return self.shared([v for v in compared_in(own) if v in emas or (
            self._averaging.average_slots and v.name != "learning_rate" and keras.backend.is_float_dtype(v.dtype))])

    @property
    def weights(self) -> list[keras.Variable]:
        return self.shared(self.model.trainable_variables)

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        return list(variables) if self._within is None else self._within.shared(variables)

    def compared(self) -> list[Variable]:
        own = IdentitySet(non_trainable_variables(self.model))
        return [*(v for v in self.shared(self.model.weights) if v not in own), *self.variables]

    def synchronise(self) -> None:
        self._averaging.average_weights()

    def _require_scope(self, may_have_tape: bool) -> None:
        """Raise InvalidRequestError unless optimizers, or a tape if `may_have_tape`, average over the scope's ranks."""
        scope, kind = self._averaging.process_set, type(self._averaging).__name__
        if is_under_strategy(self.model):
            raise InvalidRequestError(f"{kind} is for models that are made outside of strategy.scope(): MPIStrategy "
                                      f"keeps the weights equal on all ranks, but with {kind} they differ.")
        distributed = [part for optimizer in self._optimizers for part in distributed_in(optimizer)]
        for part in distributed:
            name = type(part).__name__
            if scope is None:
                raise InvalidRequestError(
                    f"{kind} lets each rank train by itself, but the optimizer is distributed and would average "
                    f"gradients in every step. Pass the plain keras.optimizers.{name}(...) to compile(). To average "
                    f'gradients within each host, write local = hvd.callbacks.{kind}(..., scope="hosts") and '
                    f"hvd.DistributedOptimizer(keras.optimizers.{name}(...), process_set=local.process_set).")
            if part._mpistrat.reducer.process_set is not scope:
                raise InvalidRequestError(
                    f"the optimizer averages gradients over other ranks than the scope of {kind}. Write "
                    f"hvd.DistributedOptimizer(keras.optimizers.{name}(...), process_set=local.process_set), where "
                    f"local is the {kind}.")
        if scope is not None and not distributed and self._optimizers and not may_have_tape:
            name = type(self._optimizers[0]).__name__
            raise InvalidRequestError(
                f"{kind} has a scope, but the optimizer is not distributed. Write hvd.DistributedOptimizer("
                f"keras.optimizers.{name}(...), process_set=local.process_set), where local is the {kind}.")


def problem_of_settings(of_ranks: Sequence[str]) -> str:
    """Return a message if the ranks' LocalSGD or DiLoCo callbacks differ, else "". `of_ranks`: each rank's, as text."""
    if len(set(of_ranks)) == 1:
        return ""
    found = describe_by_rank([each or "none" for each in of_ranks])
    return (f"the ranks average their weights in different ways: {found}. Give all ranks the same callback, "
            "with the same arguments.")


# -- when the ranks synchronise ----------------------------------------------------------------------------------------

class PeriodicAveraging(keras.callbacks.Callback):
    """The base of LocalSGD and DiLoCo, with the arguments of LocalSGD: it decides when the ranks synchronise.

    Attributes:
        process_set: The process set for the DistributedOptimizer, from the argument `scope`; None if `scope` is None.
        steps: The number of steps of this rank so far.
        steps_apart: The number of steps since all ranks had the same weights.
    """

    outer: Sequence[Optimizer] = ()  # The optimizers of the averaged weights

    @checked
    def __init__(self, every: int, warmup: int = 0, scope: Scope = None, average_slots: bool = False,
                 uneven: str = "error"):
        super().__init__()
        if uneven not in ("error", "join"):
            raise InvalidRequestError(f"uneven must be 'error' or 'join'. Received: {uneven!r}")
        if uneven == "join" and scope is not None:
            raise InvalidRequestError('uneven="join" does not work with scope=: the ranks of a scope average gradients '
                                      "in every step, so they need equal numbers of batches. Leave out one argument.")
        self.every, self.warmup, self.average_slots, self.joins = every, warmup, average_slots, uneven == "join"
        self.process_set = process_set_of(scope)
        self.steps = self.steps_apart = 0
        self._training: LocalTraining | None = None
        self._done = keras.Variable(0, dtype="int64", trainable=False, name="steps")
        self._scope = "None" if scope is None else "'hosts'" if scope == "hosts" else "a ProcessSet"
        patches.apply()

    def __str__(self) -> str:
        """Return the class and its arguments as text, which the ranks compare."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._settings().items())})"

    def _settings(self) -> dict[str, object]:
        return {"every": self.every, "warmup": self.warmup, "scope": self._scope, "average_slots": self.average_slots,
                "uneven": "'join'" if self.joins else "'error'"}

    @property
    def variables(self) -> list[keras.Variable]:
        """The state of this callback that commits of an elastic job include. It is the same on all ranks."""
        return [self._done]

    # -- for loops -----------------------------------------------------------------------------------------------------

    def begin(self, model: keras.Model, optimizer: Optimizer | None = None) -> None:
        """Begin a user-defined loop, after hvd.broadcast_variables has made the weights equal. Collective.

        Args:
            model: A model whose weights have been created.
            optimizer: The optimizer of the loop; default: the optimizers of the model.

        Raises:
            InvalidRequestError: On every rank, if LocalSGD or DiLoCo cannot train this model with this optimizer.
            MismatchError: On every rank, if the ranks have different arguments or weights.
        """
        if not model.built or not model.trainable_variables:
            raise InvalidRequestError("the model has no weights yet. Call model.build(input_shape), or add an "
                                      f"Input layer, before {type(self).__name__}.begin(model).")
        self.set_model(model)
        training = LocalTraining(model, self, optimizers_of(model) if optimizer is None else [optimizer])
        problem = problem_of_settings(array_ops.allgather_object(str(self), f"{training.name}/begin"))
        if problem:
            raise MismatchError(problem)
        require_equal_weights(training.weights, f"{training.name}/compared", f"{type(self).__name__}.begin:",
                              causes=training.causes)
        self.enter(training)
        self._remember()

    def step(self) -> None:
        """Count a step of a loop, after the optimizer's update. Collective if the ranks synchronise after this step.

        Raises:
            InvalidRequestError: begin() has not been called.
        """
        self._count(1)

    def synchronise(self) -> None:
        """Give all ranks the same weights and statistics now. Collective.

        Call it at the end of a loop, and before the model is saved, evaluated or committed.

        Raises:
            InvalidRequestError: begin() has not been called.
        """
        self.average_weights()
        if self._begun.averages_statistics:
            average_statistics(self._begun)

    # -- in an elastic job ---------------------------------------------------------------------------------------------

    def prepare(self, model: keras.Model) -> None:
        """Create the variables of this callback for `model`. Local. TensorFlowKerasState calls prepare()."""

    def before_commit(self) -> bool:
        """Synchronise the ranks if training has begun, and return whether it has begun. Collective."""
        if self._training is None:
            return False
        self.synchronise()
        return True

    # -- in fit --------------------------------------------------------------------------------------------------------

    def training(self, model: keras.Model) -> LocalTraining:
        """Begin to average the weights of `model`, and return an object that describes its training. Local.

        Raises InvalidRequestError if the model is of Keras 2 or of a strategy, or its optimizers do not fit the scope.
        """
        training = LocalTraining(model, self)
        self.enter(training)
        return training

    def enter(self, training: LocalTraining) -> None:
        """Begin to average the weights of the model in `training`. Local."""
        self._training = training
        self._forget()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.steps = int(self._done)  # Ranks that have joined get the others' count.

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._begun.is_reading:
            self._count(self.model.steps_per_execution)

    def on_test_begin(self, logs: Logs = None) -> None:
        self.average_weights()  # Keras validates before the epoch ends for callbacks.

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.average_weights()

    def average_weights(self) -> None:
        """Give all ranks the same weights, if a step has followed the last synchronisation. Collective."""
        if self._begun.weights and self.steps_apart:
            self._average_and_reset(self._begun)

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _average(self, training: LocalTraining) -> None:
        """Give all ranks the same weights, by an average or an outer step of DiLoCo. Collective."""
        raise NotImplementedError

    def _remember(self) -> None:
        """Store the current weights, which all ranks have in common. Local."""

    def _forget(self) -> None:
        """Reset counts and stored weights, because other code may have changed the model's weights. Local."""
        self.steps, self.steps_apart = int(self._done), 0

    @property
    def _begun(self) -> LocalTraining:
        if self._training is None:
            name = type(self).__name__
            raise InvalidRequestError(f"{name} has no model yet. Pass it to fit(callbacks=[...]), or call "
                                      f"{name}.begin(model) before a loop of your own.")
        return self._training

    def _count(self, steps: int) -> None:
        training = self._begun
        self.steps += steps
        self.steps_apart += steps
        if self.steps_apart >= self.every or self.steps <= self.warmup:
            self._average_and_reset(training)
            if training.averages_statistics:
                average_statistics(training)

    def _average_and_reset(self, training: LocalTraining) -> None:
        self._average(training)
        self.steps_apart = 0
        self._done.assign(self.steps)


class LocalSGD(PeriodicAveraging):
    """Lets each rank train alone for `every` steps at a time, and then averages the weights of all ranks. Collective.

    Local SGD (Stich, arXiv 1805.09767); with `warmup`, post-local SGD (Lin et al., arXiv 1808.07217). It is for
    networks that are too slow to average gradients in every step.

        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), ...)  # not distributed
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.LocalSGD(every=16)])

    All ranks must pass the callback to fit. The ranks also average the weights at the end of each epoch before the
    validation, before a callback saves the model within an epoch, and in a commit of an elastic job. So validation,
    files and comparisons use the average, which is bitwise the same on all ranks. Running statistics, and moving
    averages of the weights (use_ema), are averaged with the weights. Accumulated gradients and loss scales stay local
    to each rank. In a loop of your own:

        local = hvd.callbacks.LocalSGD(every=16)
        hvd.broadcast_variables(model.weights, root_rank=0)
        local.begin(model)
        for x, y in dataset:
            train_step(x, y)
            local.step()
        local.synchronise()

    Args:
        every: The number of steps between two averages. A step is a batch. With steps_per_execution the number is
            rounded up to whole executions.
        warmup: In the first `warmup` steps of training the weights are averaged after each step (with
            steps_per_execution: after each execution). For SGD that is the same as averaging gradients.
        scope: The ranks that average gradients in every step: "hosts" (the ranks of each host), or a process set that
            includes this rank. Weights are still averaged over all ranks. Pass the `process_set` of this object to the
            optimizer: `hvd.DistributedOptimizer(optimizer, process_set=local.process_set)`. "hosts" registers process
            sets, so all ranks must create the object after init().
        average_slots: Whether the state of the optimizer (momentum, Adam's moments) is averaged with the weights.
            False: each rank keeps its own state, and less is sent.
        uneven: What happens if the ranks have different numbers of batches. "error": an error. "join": ranks without
            batches wait at the end of each epoch while the other ranks average weights. Then all ranks get the weights
            of the rank with the most batches. "join" does not work with a scope.

    Raises:
        ValueError: An argument is out of range. Also on every rank when fit begins, if the model was made under
            MPIStrategy or with Keras 2, if the optimizer is distributed without `scope`, if the optimizer does not
            average over the ranks of `scope`, if fit has two such callbacks, or if the ranks have different arguments.
    """

    def _average(self, training: LocalTraining) -> None:
        assign_means([*training.weights, *training.slots], f"{training.name}/weights")


def assign_means(variables: Sequence[keras.Variable], name: str) -> None:
    """Set variables to their means over all ranks. Collective."""
    spec = ReduceSpec(name, ScaledOp(Average), [label_of(v) for v in variables])
    for variable, mean in zip(variables, reduce_list([tf.convert_to_tensor(v) for v in variables], spec), strict=True):
        variable.assign(mean)


class DiLoCo(PeriodicAveraging):
    """Lets each rank train alone for `every` steps at a time. An outer step then applies the mean progress. Collective.

    DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): the progress of a rank is the difference between its
    weights at the last outer step and its weights now. The outer gradient is the mean progress of the ranks. The outer
    optimizer applies this gradient to the weights at the last outer step, and all ranks continue from the result. The
    inner optimizer is that of `compile`; the paper uses AdamW. It may be a DistributedOptimizer only with a `scope`.

        model.compile(keras.optimizers.AdamW(4e-4), ...)
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.DiLoCo(every=50)])

    All ranks make an outer step wherever LocalSGD averages. All else is as in LocalSGD. DiLoCo needs more memory, twice
    the size of the weights: for the weights at the last outer step, and for the momentum of the outer optimizer.

    Args:
        every: The number of steps between two outer steps, as in LocalSGD.
        outer: The outer optimizer, a Keras optimizer; default: SGD(0.7, momentum=0.9, nesterov=True).
        compression: One of Compression, for the progress that ranks send. The rounding errors of int8 between hosts are
            added to the progress of the next outer step.
        scope, average_slots, uneven: As for LocalSGD.

    Raises:
        ValueError: As for LocalSGD. Also if `outer` is no Keras optimizer, is distributed, scales the loss, or is the
            optimizer of the model, or if `compression` is not one of Compression.
    """

    @checked
    def __init__(self, every: int, outer: Optimizer | None = None, scope: Scope = None, average_slots: bool = False,
                 uneven: str = "error", compression: type[Compressor] = Compression.none):
        if outer is None:
            outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        if not isinstance(outer, Optimizer) or isinstance(outer, LossScaleOptimizer):
            raise InvalidRequestError("DiLoCo(outer=) must be a Keras optimizer, for example keras.optimizers.SGD(0.7, "
                                      f"momentum=0.9, nesterov=True). Received: {outer!r}")
        if distributed_in(outer):
            raise InvalidRequestError("DiLoCo(outer=) must not be distributed, since DiLoCo averages over all ranks "
                                      f"itself. Pass keras.optimizers.{type(outer).__name__}(...).")
        require_compression(compression)
        self.outer, self.compression = (outer,), compression
        self._point: list[keras.Variable] = []  # the weights at the last outer step
        self._has_point = False
        super().__init__(every, 0, scope, average_slots, uneven)

    def _settings(self) -> dict[str, object]:
        outer, = self.outer
        arguments = {name: value for name, value in outer.get_config().items() if value and name != "name"}
        return {**super()._settings(), "compression": self.compression.__name__,
                "outer": f"{type(outer).__name__}({arguments})"}

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, *self.outer[0].variables]

    def prepare(self, model: keras.Model) -> None:
        self._build(LocalTraining(model, self).weights)

    def _build(self, weights: Sequence[keras.Variable]) -> None:
        """Create the state for these weights. Raises InvalidRequestError if state for other shapes exists. Local."""
        outer, = self.outer
        if not self._point:
            self._point = [keras.Variable(tf.convert_to_tensor(v), dtype=v.dtype, name=v.name) for v in weights]
            outer.build(self._point)
        if [(p.shape, p.dtype) for p in self._point] != [(v.shape, v.dtype) for v in weights]:
            raise InvalidRequestError("the model has other trainable weights than when this DiLoCo began. Make a new "
                                      "DiLoCo for them: hvd.callbacks.DiLoCo(...).")

    def enter(self, training: LocalTraining) -> None:
        if any(optimizer is self.outer[0] for optimizer in optimizers_of(training.model)):
            raise InvalidRequestError("DiLoCo(outer=) is the optimizer of the model too. Pass two different "
                                      "optimizers to compile() and DiLoCo(outer=).")
        super().enter(training)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._has_point = False  # Callbacks may have assigned weights.

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        training = self._begun
        if not self._has_point and training.weights:
            if self.steps_apart:  # The first batch has created the weights.
                assign_means(training.weights, f"{training.name}/weights")
            self._remember()

    def _remember(self) -> None:
        weights = self._begun.weights
        self._build(weights)
        for point, weight in zip(self._point, weights, strict=True):
            point.assign(weight)
        self._has_point = True

    def _forget(self) -> None:
        super()._forget()
        self._has_point = False

    def _average(self, training: LocalTraining) -> None:
        if not self._has_point:  # The first batches have created the weights.
            return assign_means(training.weights, f"{training.name}/weights")
        progress = [tf.convert_to_tensor(p) - tf.convert_to_tensor(w)
                    for p, w in zip(self._point, training.weights, strict=True)]
        spec = ReduceSpec(f"{training.name}/progress", ScaledOp(Average), [label_of(v) for v in training.weights])
        self.outer[0].apply(reduce_tensors(progress, spec, self.compression), self._point)
        for point, weight in zip(self._point, training.weights, strict=True):
            weight.assign(point)
        assign_means(training.slots, f"{training.name}/slots")
