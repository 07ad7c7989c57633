"""LocalTraining: the training of a model whose weights the ranks change by themselves and average now and then."""

from collections.abc import Sequence
from typing import Protocol

import keras
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...api.process_sets import ProcessSet, global_process_set
from ...core.errors import InvalidRequestError
from ...tensorflow.identity_set import IdentitySet
from ...tensorflow.kerases import is_keras2
from ...tensorflow.names import eager
from ...tensorflow.types import Variable
from .._private import non_trainable_variables
from ..fit.training import Training, compared_in, is_under_strategy, optimizers_of, training_of
from ..nested_optimizers import distributed_in, parts_of

LOCAL_SGD = "local_sgd"  # Names the collectives of all ranks that average weights, by names.eager.


class Averaging(Protocol):
    """What averages the weights: a PeriodicAveraging."""

    process_set: ProcessSet | None
    joins: bool
    average_slots: bool
    steps: int
    steps_apart: int
    outer: Sequence[Optimizer]

    @property
    def variables(self) -> list[keras.Variable]: ...

    def average_weights(self) -> None: ...


class LocalTraining(Training):
    """The training of a model by ranks whose weights differ between two synchronisations. All ranks take part.

    Args:
        model: The model.
        averaging: What averages its weights.
        optimizers: Those of a loop of the user's own, where a tape may average; (): fit trains by those of the model.

    Raises:
        InvalidRequestError: The model is one of Keras 2, or of a strategy, or its optimizers average gradients among
            other ranks than those of the scope.
    """

    causes = ("weights that were not broadcast before training; a callback, or a learning rate, on some ranks only; "
              "code that loads or assigns weights on some ranks only, without hvd.broadcast_variables(model.weights, "
              "root_rank=0) after it.")

    def __init__(self, model: keras.Model, averaging: Averaging, optimizers: Sequence[Optimizer] = ()):
        super().__init__(model)
        if is_keras2(model):
            raise InvalidRequestError(f"{type(averaging).__name__} is for models of Keras 3. Received one of Keras 2 "
                                      "(tf_keras), which hvd.DistributedOptimizer trains.")
        self._averaging, self._optimizers = averaging, list(optimizers) or optimizers_of(model)
        is_step_known = not optimizers and type(model).train_step is keras.Model.train_step
        _require_scope(model, averaging.process_set, self._optimizers, type(averaging).__name__, is_step_known)
        self.name, self.process_set, self.joins = eager(LOCAL_SGD), global_process_set, averaging.joins
        self._within = training_of(model)  # by the ranks of the scope
        self.averages_statistics = self._within is None or self._within.averages_statistics
        self.settings = str(averaging)

    @property
    def parts(self) -> list[Optimizer]:
        """Without those that scale the loss: each rank has its own scale."""
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
        return [part._iterations for part in self.parts]

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
        """The state of the optimizers that is averaged: what Keras puts in the place of weights (use_ema), or all."""
        own = [part for part in self.parts if part not in IdentitySet(self._averaging.outer)]
        emas = IdentitySet(v for part in own for v in getattr(part, "_model_variables_moving_average", ()))
        return self.shared([v for v in compared_in(own) if v in emas or (
            self._averaging.average_slots and v.name != "learning_rate" and keras.backend.is_float_dtype(v.dtype))])

    @property
    def weights(self) -> list[keras.Variable]:
        """The weights that are trained and averaged."""
        return self.shared(self.model.trainable_variables)

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        return list(variables) if self._within is None else self._within.shared(variables)

    def compared(self) -> list[Variable]:
        own = IdentitySet(non_trainable_variables(self.model))
        return [*(v for v in self.shared(self.model.weights) if v not in own), *self.variables]

    def synchronise(self) -> None:
        self._averaging.average_weights()


def _require_scope(model: keras.Model, scope: ProcessSet | None, optimizers: Sequence[Optimizer], kind: str,
                   is_step_known: bool) -> None:
    """Raise InvalidRequestError unless gradients are averaged within the scope, and nowhere else.

    In steps that are not known it may be done by a tape.
    """
    if is_under_strategy(model):
        raise InvalidRequestError(f"{kind} is for models that are made outside of strategy.scope(): MPIStrategy keeps "
                                  "one set of weights for all ranks, and each rank needs its own.")
    distributed = [part for optimizer in optimizers for part in distributed_in(optimizer)]
    for part in distributed:
        name = type(part).__name__
        if scope is None:
            raise InvalidRequestError(
                f"{kind} has each rank train by itself, and the optimizer is distributed, so gradients would be "
                f"averaged in every step: give compile() keras.optimizers.{name}(...) itself. To average gradients "
                f'within each host: local = hvd.callbacks.{kind}(..., scope="hosts"), and '
                f"hvd.DistributedOptimizer(keras.optimizers.{name}(...), process_set=local.process_set).")
        if part._mpistrat.reducer.process_set is not scope:
            raise InvalidRequestError(
                f"{kind} has a scope, and the optimizer averages gradients among other ranks: write "
                f"hvd.DistributedOptimizer(keras.optimizers.{name}(...), process_set=local.process_set), where local "
                f"is the {kind}.")
    if scope is not None and not distributed and optimizers and is_step_known:
        name = type(optimizers[0]).__name__
        raise InvalidRequestError(
            f"{kind} has a scope, and the optimizer does not average gradients in it: write hvd.DistributedOptimizer("
            f"keras.optimizers.{name}(...), process_set=local.process_set), where local is the {kind}.")
