"""LocalSGD: the ranks train by themselves, and average their weights every so many steps (arXiv 1808.07217).

For users. A callback of fit, and an object for loops; collective.
"""

from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import Callback
from keras.optimizers import Optimizer

from ...api import ops as array_ops
from ...core.errors import InvalidRequestError, MismatchError
from ...core.request import Average, ScaledOp
from ...core.topology import describe_by_rank
from ...tensorflow.bridge.buckets import reduce_list
from ...tensorflow.bridge.reduce_spec import ReduceSpec
from ...tensorflow.equal_weights import require_equal_weights
from ...tensorflow.gradients import label_of
from .. import patches
from .._private import Logs
from ..fit.running_statistics import average_statistics
from ..fit.training import optimizers_of
from .local_training import LocalTraining
from .scope import Scope, process_set_of


class PeriodicAveraging(Callback):
    """What LocalSGD and DiLoCo have in common: when the ranks synchronise. For its subclasses.

    Args:
        every, warmup, scope, average_slots, uneven: As for LocalSGD.

    Attributes:
        process_set: The ranks of the scope; None without one. The process_set of the DistributedOptimizer.
        joins: Whether ranks with fewer batches wait for the others at the end of an epoch.
        steps: The steps of this rank so far.
        steps_apart: Those since the ranks had the same weights.
        outer: The optimizers of the averaged weights.
    """

    outer: Sequence[Optimizer] = ()

    def __init__(self, every: int, warmup: int = 0, scope: Scope = None, average_slots: bool = False,
                 uneven: str = "error"):
        super().__init__()
        for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
            if not isinstance(value, int | np.integer) or value < least:
                raise InvalidRequestError(f"{type(self).__name__}({name}=) is a number of steps, {least} or more. "
                                          f"Received: {value!r}")
        if uneven not in ("error", "join"):
            raise InvalidRequestError(f"uneven must be 'error' or 'join'. Received: {uneven!r}")
        if uneven == "join" and scope is not None:
            raise InvalidRequestError('uneven="join" is for ranks that train by themselves: leave out scope=, or give '
                                      "all ranks as many batches.")
        self.every, self.warmup, self.average_slots, self.joins = every, warmup, average_slots, uneven == "join"
        self.process_set = process_set_of(scope)
        self.steps = self.steps_apart = 0
        self._training: LocalTraining | None = None
        self._done = keras.Variable(0, dtype="int64", trainable=False, name="steps")
        self._scope = "None" if scope is None else "'hosts'" if scope == "hosts" else "a ProcessSet"
        patches.apply()

    def __str__(self) -> str:
        """Its arguments, by which the ranks compare them."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._settings().items())})"

    def _settings(self) -> dict[str, object]:
        return {"every": self.every, "warmup": self.warmup, "scope": self._scope, "average_slots": self.average_slots,
                "uneven": "'join'" if self.joins else "'error'"}

    @property
    def variables(self) -> list[keras.Variable]:
        """The state that a commit of an elastic job keeps with the weights, the same on all ranks."""
        return [self._done]

    # -- for loops -----------------------------------------------------------------------------------------------------

    def begin(self, model: keras.Model, optimizer: Optimizer | None = None) -> None:
        """Begin a loop of the script's own, once all ranks have the same weights, by a broadcast. Collective.

        Args:
            model: It has its weights.
            optimizer: Default: those that the model has.

        Raises:
            InvalidRequestError: On every rank, if the optimizer, or the model, does not fit.
            MismatchError: On every rank, if the ranks have different arguments or weights.
        """
        if not model.built or not model.trainable_variables:
            raise InvalidRequestError("the model has no weights yet: call model.build(input_shape), or give it an "
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
        """Count a step of a loop, after the optimizer has changed the weights. Collective where the ranks synchronise.

        Raises:
            InvalidRequestError: Before begin().
        """
        self._count(1)

    def synchronise(self) -> None:
        """Give all ranks the same weights and statistics now. Collective.

        Call it at the end of a loop, and before the model is saved, evaluated or committed.

        Raises:
            InvalidRequestError: Before begin().
        """
        self.average_weights()
        if self._begun.averages_statistics:
            average_statistics(self._begun)

    # -- in an elastic job ---------------------------------------------------------------------------------------------

    def prepare(self, model: keras.Model) -> None:
        """Make `variables`, before a state is made of them. Local."""

    def before_commit(self) -> bool:
        """Synchronise, if training has begun; returns whether. Collective."""
        if self._training is None:
            return False
        self.synchronise()
        return True

    # -- in fit --------------------------------------------------------------------------------------------------------

    def enter(self, training: LocalTraining) -> None:
        """Train this model from now on. Local."""
        self._training = training
        self._forget()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.steps = int(self._done)  # Ranks that have joined get that of the others.

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._begun.is_reading:
            self._count(self.model.steps_per_execution)

    def on_test_begin(self, logs: Logs = None) -> None:
        self.average_weights()  # Keras validates before the epoch ends for callbacks.

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.average_weights()

    def average_weights(self) -> None:
        """Give all ranks the same weights, if there were steps since they had. Collective."""
        if self._begun.weights and self.steps_apart:
            self._average(self._begun)
            self._is_together()

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _average(self, training: LocalTraining) -> None:
        """Give all ranks the same weights, after steps apart. Collective."""
        raise NotImplementedError

    def _remember(self) -> None:
        """Take the weights for those that all ranks have. Local."""

    def _forget(self) -> None:
        """The weights may be other ones now. Local."""
        self.steps, self.steps_apart = int(self._done), 0

    @property
    def _begun(self) -> LocalTraining:
        if self._training is None:
            name = type(self).__name__
            raise InvalidRequestError(f"{name} has no model yet: give it to the callbacks of fit, or call "
                                      f"{name}.begin(model) before a loop of your own.")
        return self._training

    def _count(self, steps: int) -> None:
        training = self._begun
        self.steps += steps
        self.steps_apart += steps
        if self.steps_apart >= self.every or self.steps <= self.warmup:
            self._average(training)
            if training.averages_statistics:
                average_statistics(training)
            self._is_together()

    def _is_together(self) -> None:
        self.steps_apart = 0
        self._done.assign(self.steps)


class LocalSGD(PeriodicAveraging):
    """Has each rank train by itself, and averages the weights of all ranks every so many steps. Collective.

    Local SGD (Stich, arXiv 1805.09767); with `warmup`, post-local SGD (Lin et al., arXiv 1808.07217). For networks that
    are too slow to average gradients in every step.

        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), ...)  # not distributed
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.LocalSGD(every=16)])

    Give it to the callbacks of all ranks. The ranks also synchronise at the end of each epoch, before the validation,
    before a callback saves the model within an epoch, and in a commit of an elastic job. So what is validated, saved
    and compared is the average. All ranks have the same bits then. Running statistics, and moving averages of the
    weights (use_ema), are averaged with the weights.
    Gradients that are accumulated, and loss scales, are each rank's own. In a loop of your own:

        local = hvd.callbacks.LocalSGD(every=16)
        hvd.broadcast_variables(model.weights, root_rank=0)
        local.begin(model)
        for x, y in dataset:
            train_step(x, y)
            local.step()
        local.synchronise()

    Args:
        every: The steps between two averages. A step is a batch. With steps_per_execution it is rounded up to whole
            executions.
        warmup: In so many first steps the weights are averaged after each one (each execution). For SGD that is the
            same as averaging gradients.
        scope: Averages gradients in every step within the ranks of a host ("hosts"), or of a process set that this rank
            is in, and weights over all ranks. Pass its `process_set` to the optimizer:
            `hvd.DistributedOptimizer(optimizer, process_set=local.process_set)`. "hosts" registers process sets, so all
            ranks make the object after init().
        average_slots: Whether the state of the optimizer (momentum, Adam's moments) is averaged with the weights.
            Otherwise each rank keeps its own, and less is sent.
        uneven: What ranks with different numbers of batches are. "error": an error. "join": those with fewer wait at
            the end of each epoch, and the others average without them; then all get the weights of the rank with most.

    Raises:
        ValueError: An argument is out of range; on every rank when fit begins, if the model is one of MPIStrategy, the
            optimizer averages gradients among other ranks, fit has two such callbacks, or the ranks differ in
            arguments.
    """

    def _average(self, training: LocalTraining) -> None:
        assign_means([*training.weights, *training.slots], f"{training.name}/weights")


def assign_means(variables: Sequence[keras.Variable], name: str) -> None:
    """Set variables to the means over all ranks. Collective."""
    spec = ReduceSpec(name, ScaledOp(Average), [label_of(v) for v in variables])
    for variable, mean in zip(variables, reduce_list([tf.convert_to_tensor(v) for v in variables], spec), strict=True):
        variable.assign(mean)


def averaging_among(callbacks: Iterable[Callback]) -> PeriodicAveraging | None:
    """The one among the callbacks of fit; None: there is none. Raises InvalidRequestError if there are several."""
    found = [callback for callback in callbacks if isinstance(callback, PeriodicAveraging)]
    if len(found) > 1:
        raise InvalidRequestError(f"fit has {' and '.join(type(each).__name__ for each in found)} among its callbacks. "
                                  "Each averages the weights in its own way: keep one of them.")
    return found[0] if found else None


def problem_of_settings(of_ranks: Sequence[str]) -> str:
    """The sentence on ranks that average in different ways; "" if all do it in the same. Each is a `str(averaging)`."""
    if len(set(of_ranks)) == 1:
        return ""
    found = describe_by_rank([each or "none" for each in of_ranks])
    return (f"the ranks average their weights in different ways: {found}. Give all ranks the same callback, "
            "with the same arguments.")
