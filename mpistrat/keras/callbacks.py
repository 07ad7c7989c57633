"""Keras callbacks: broadcast the initial weights, average metrics over the ranks, and schedule learning rates.

Names and arguments are Horovod's. Users pass the callbacks to fit, and Keras calls them in the thread that called fit.
Callbacks that communicate are collective: all ranks must pass them to fit, in the same order.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ..api import missing_names, runtime
from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..core.errors import InvalidRequestError
from ..tensorflow.bridge.arguments import checked
from ..tensorflow.bridge.types import Variable
from ..tensorflow.consistency import FirstSteps
from ..tensorflow.kerases import KERASES, IdentitySet, build, is_of_keras, package_of, variables_of, velocities_of
from ..tensorflow.ops import broadcast_
from .bridge.compared import number
from .bridge.measures import UNKNOWN, LocalScalar, MetricMeans, Throughput, row_count_of
from .bridge.private_names import Callback, CalledByKeras2, Logs, all_layers, parts_of, states_in, weights_of
from .bridge.training import is_under_strategy, name_in_fit, optimizers_of
from .elastic import Elastic
from .local_sgd import DiLoCo, LocalSGD

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "DiLoCo", "Elastic",
           "LearningRateScheduleCallback", "LearningRateWarmupCallback", "LocalSGD", "MetricAverageCallback",
           "Throughput"]

__getattr__ = missing_names.explain(__name__)
logger = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(Callback):
    """Broadcasts the root's weights and optimizer state. Collective: all ranks must pass this callback to fit.

    When training begins, the callback builds the optimizer and broadcasts all existing variables. A model without an
    Input layer creates its weights in the first batch, and the callback broadcasts these weights after that batch. The
    broadcast includes the statistics of Normalization layers, and the state of further optimizers in public attributes
    of the model (a GAN). It does not include the random states of layers such as Dropout, so ranks that call
    keras.utils.set_random_seed(seed + rank()) drop different units. fit logs a warning if each rank trains alone: the
    optimizer is not distributed, or the steps of the first epoch do not communicate.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for compatibility with Horovod, ignored.
        local_variables: Variables that are not broadcast.
        process_set: The ranks that take part; `root_rank` is one of them. On other ranks the callback does nothing.

    Attributes:
        local: The variables that are not broadcast.
        process_set: The process set of the constructor.
        first_steps: Checks, set by fit, that compare the weights of the ranks in the first reductions of each
            optimizer. The checks begin after the broadcast.
    """

    first_steps: Sequence[FirstSteps] = ()

    @checked
    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Variable] | None = None,
                 process_set: ProcessSet = global_process_set):
        super().__init__()
        self.root_rank, self.process_set = root_rank, resolved(process_set)
        self.local = IdentitySet(local_variables or ())
        self._sent, self._is_first_batch = 0, True

    def register_local_var(self, variable: Variable) -> None:
        """Exclude this variable from the broadcast."""
        self.local.add(variable)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_first_batch = True
        optimizer = self.model.optimizer
        if optimizer is not None and self.model.built and self.model.trainable_variables:
            build(optimizer, self.model.trainable_variables)
        self._broadcast(self._variables())
        for first_steps in self.first_steps:
            first_steps.is_paused = not self.model.built

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        # The first `batch` is not 0 with steps_per_execution > 1.
        if self._is_first_batch:
            # Only now have all ranks built the other optimizers, which may have been restored on the root alone.
            variables = self._variables(has_begun=True)
            if len(variables) != self._sent:
                uncounted(lambda: self._broadcast(variables))
        self._is_first_batch = False
        for first_steps in self.first_steps:
            first_steps.is_paused = False

    def _variables(self, has_begun: bool = False) -> list[keras.Variable]:
        """Return the weights and the optimizer's state; with `has_begun`, also the state of further optimizers."""
        optimizer = self.model.optimizer
        found = [*weights_of(self.model), *(variables_of(optimizer) if optimizer is not None else ())]
        if has_begun:
            found += [v for other in optimizers_of(self.model) for v in variables_of(other)]
        return [v for v in IdentitySet(found) if v not in self.local]

    def _broadcast(self, variables: list[keras.Variable]) -> None:
        self._sent = len(variables)
        if self.process_set.has_others():
            broadcast_state(self.model, variables, self.root_rank, self.process_set)


class AveragingCheck(Callback):
    """Warns if each rank trains alone, although `sign` says that the ranks train one model. Local.

    fit adds this callback as the last. It warns when training begins if nothing can average: neither the train step,
    the optimizer nor a callback is user-defined (`has_users_own`). Otherwise it warns after the first epoch if no
    operation of the epoch, with the callbacks at its end, can have averaged anything.
    """

    def __init__(self, sign: str, process_set: ProcessSet, has_users_own: bool):
        super().__init__()
        self._sign, self._process_set, self._has_users_own = sign, process_set, has_users_own

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = self.model.optimizer
        self._is_first_epoch, self._why = True, ""
        self._executed: int | None = _executed()  # The number of operations before an epoch that must average
        self._advice = ("no training step has called a collective. Give compile() an hvd.DistributedOptimizer, or wrap "
                        "the tape of a train_step in hvd.DistributedGradientTape.")
        if type(self.model).train_step.__module__.partition(".")[0] in KERASES and optimizer is not None \
                and all(package_of(type(part)) in KERASES for part in parts_of(optimizer)):
            name = type(optimizer).__name__
            self._advice = (
                f"the optimizer of compile() is {name}, which does not average gradients. Write "
                f"model.compile(hvd.DistributedOptimizer(keras.optimizers.{name}(...)), ...) wherever the script "
                "compiles, or use hvd.load_model(path) in place of keras.models.load_model(path).")
            if not self._has_users_own:
                self._warn()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._is_first_epoch:
            self._require_averaging()
        self._is_first_epoch = False

    def on_train_end(self, logs: Logs = None) -> None:
        before = self._why
        if not self._is_first_epoch:  # fit has had an epoch.
            self._require_averaging()
        if before:
            self._warn()  # Again, at the end of the output

    def _require_averaging(self) -> None:
        if not self._why and self._executed == _executed():
            self._warn()
        self._executed = None

    def _warn(self) -> None:
        self._why = self._advice
        if self._process_set.rank() == 0:
            logger.warning("mpistrat: EACH RANK TRAINS A MODEL OF ITS OWN, although %s: %s The weights of the ranks "
                           "drift apart.", self._sign, self._why)


_uncounted = 0


def uncounted(communicate: Callable[[], None]) -> None:
    """Call a function, and do not count its operations in `_executed`, because they average no gradients or weights."""
    global _uncounted
    before = _executed()
    communicate()
    _uncounted += _executed() - before


def _executed() -> int:
    """Return how many operations this rank has executed in all its process sets, without those of `uncounted`."""
    return sum(group.executed for group in runtime.current().registry.groups.values()) - _uncounted


def broadcast_state(model: keras.Model, variables: Sequence[Variable], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast `variables`, and the state of sharded optimizers that has been loaded on the root. Collective."""
    broadcast_(variables, root_rank, name_in_fit(model, "broadcast_variables", process_set), process_set)
    for layer in all_layers(model):
        if is_of_keras(layer, "Normalization"):
            layer.finalize_state()  # It derives the constants that the layer computes with from the variables.
    for state in states_in(optimizers_of(model)):
        state.share(root_rank)


class MetricAverageCallback(Callback):
    """Replaces the metrics of an epoch by their averages over the ranks. Collective.

    Callbacks that read metrics (ReduceLROnPlateau, TensorBoard, ModelCheckpoint) must come after this callback, to get
    the same numbers on all ranks. An array, such as a metric with a number for each class, is averaged element by
    element. If only some ranks have validation data, the validation metrics are not averaged, and rank 0 logs a
    warning. Rank 0 also logs a warning if the ranks validate on different numbers of batches, unless `weighted=True`.

    By default the mean is not weighted, so the ranks should have equal numbers of rows. With `weighted=True` each
    rank's value is weighted by the number of rows that the rank has trained on in the epoch. Metrics that begin with
    `val_` are weighted by the number of rows in the rank's latest validation. Padding and sample weights do not change
    the numbers of rows. For means over rows, such as loss and accuracy without sample weights, the result is the metric
    over the rows of all ranks. For other metrics, such as AUC, the result is an approximation. The callback counts the
    rows in the model's `train_step` and `test_step`, so the first fit traces these methods again. Under MPIStrategy the
    metrics cover all ranks already, and no rows are counted.

    Args:
        device: Accepted for compatibility with Horovod, ignored.
        process_set: The ranks that take part. On other ranks the callback does nothing.
        weighted: Weight by rows. All ranks must pass the same value.

    Raises:
        ValueError: With `weighted=True`, on every rank at the end of an epoch, if no rank had rows, or if the rows of a
            rank cannot be counted: its batches have no batch dimension, or bypassed `train_step` or `test_step`.
    """

    @checked
    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set, weighted: bool = False):
        super().__init__()
        self._process_set, self._weighted = resolved(process_set), weighted
        self._means = MetricMeans(self._process_set)
        self._trained: LocalScalar | None = None  # None: rows are not counted
        self._tested: LocalScalar | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._trained = self._tested = None
        if self._weighted and self._process_set.has_others() and not is_under_strategy(self.model):
            self._trained, self._tested = (row_count_of(self.model, step) for step in ("train_step", "test_step"))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._has_trained = self._has_tested = False
        self._rows_tested = self._batches_tested = 0
        self._trained_before = 0 if self._trained is None else self._trained.sum()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._has_trained = True

    def on_test_begin(self, logs: Logs = None) -> None:
        self._has_tested, self._batches_tested = False, 0
        self._tested_before = 0 if self._tested is None else self._tested.sum()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._has_tested, self._batches_tested = True, batch + 1

    def on_test_end(self, logs: Logs = None) -> None:
        # Counted now, since a callback may evaluate other rows later in this epoch.
        self._rows_tested = 0 if self._tested is None else self._tested.sum() - self._tested_before

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not self._process_set.has_others():
            return
        rows = None
        if self._trained is not None:
            trained = self._trained.sum() - self._trained_before
            rows = (UNKNOWN if self._has_trained and not trained else trained,
                    UNKNOWN if self._has_tested and not self._rows_tested else self._rows_tested)
        name = name_in_fit(self.model, "metric_average", self._process_set)
        uncounted(lambda: self._means.replace(name, {} if logs is None else logs, rows, self._batches_tested))


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`. Local.

    Args:
        initial_lr: The learning rate before the multiplier.
        multiplier: A function of the epoch, or a constant c, which means c ** (epoch - start_epoch).
        start_epoch: The first epoch in which the callback sets the rate.
        end_epoch: The first epoch in which the callback no longer sets the rate. None: no end.
        staircase: True: set the rate only when an epoch begins. False: set it at every batch, with a fractional epoch.
        momentum_correction: Scale the momentum of SGD and RMSprop by new / old learning rate, for the batch in which
            the rate changes (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1).
        steps_per_epoch: Required with staircase=False if Keras does not know the length of the dataset.
    """

    @checked
    def __init__(self, initial_lr: float, multiplier: Callable[[float], float] | float, start_epoch: float = 0,
                 end_epoch: float | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: float | None = None):
        super().__init__()
        if not (callable(multiplier) or hasattr(multiplier, "__float__")):
            raise InvalidRequestError(f"{type(self).__name__}(multiplier=) must be a function of the epoch, or a "
                                      f"number. Received: {multiplier!r}")
        # A copy: `initial_lr` may be the variable of the optimizer.
        self.initial_lr, self.start_epoch, self.end_epoch = float(initial_lr), start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch = 0
        self._scale_velocities: Callable[[tf.Tensor], None] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._scale_velocities = None  # The optimizer may be another one.
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError("steps_per_epoch is required in this callback or in fit, since Keras does not know "
                                 "the length of this dataset.")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._set(self.multiplier(self._epoch))
        else:
            self._set(self.multiplier(self._epoch + batch / float(self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = number(self.model.optimizer.learning_rate)

    def _set(self, factor: float) -> None:
        optimizer, new = self.model.optimizer, self.initial_lr * factor
        try:
            old = number(optimizer.learning_rate)
            optimizer.learning_rate = new
        except (TypeError, AttributeError) as error:
            raise InvalidRequestError(
                f"{type(self).__name__} sets the learning rate, which must be a number in the optimizer of compile(), "
                f"for example keras.optimizers.Adam({self.initial_lr:g}): no schedule, no function. Leave out the "
                f"schedule or this callback. Received: {optimizer!r}") from error
        if self.momentum_correction and old and new != old:
            self._correct_momentum(new / old)

    def _correct_momentum(self, ratio: float) -> None:
        """Multiply the optimizer's velocities by `ratio`, which is new / old learning rate.

        In Goyal et al., section 2.1, the velocity is v = m v - rate g. In the step in which the rate changes, the
        momentum m is multiplied by the ratio. In Keras m is a number, and so a constant of the compiled step. Therefore
        v is multiplied instead, before that step, with the same result.
        """
        if self._scale_velocities is None:
            # SGD and RMSprop have velocities if they have a momentum; before the first step there are none.
            velocities = [velocity for part in parts_of(self.model.optimizer) for velocity in velocities_of(part)]
            if not velocities:
                return

            @tf.function(autograph=False)
            def scale(ratio: tf.Tensor) -> None:
                for variable in velocities:
                    value = tf.convert_to_tensor(variable)
                    if value.shape.num_elements() != 0:  # Another rank may have the velocity.
                        variable.assign(value * tf.cast(ratio, value.dtype))

            self._scale_velocities = scale
        self._scale_velocities(tf.constant(ratio, tf.float64))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate linearly from `initial_lr / size()` to `initial_lr` in the first epochs. Local.

    Args:
        initial_lr: The learning rate after the warm-up, usually the rate for one rank times size().
        warmup_epochs: The number of epochs of the warm-up.
        momentum_correction: See LearningRateScheduleCallback.
        steps_per_epoch: See LearningRateScheduleCallback.
        verbose: 1: rank 0 prints a line when the warm-up is done.
    """

    @checked
    def __init__(self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = True,
                 steps_per_epoch: float | None = None, verbose: int = 0):
        # A bound method: a copy of the callback gets its own.
        super().__init__(initial_lr, self._rising, start_epoch=0, end_epoch=warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self._warmup_epochs, self._verbose = warmup_epochs, verbose

    def _rising(self, epoch: float) -> float:
        epoch += 1.0 / float(self.steps_per_epoch or 1)  # The last batch of the warm-up reaches the full rate.
        size = runtime.current().topology.size
        return 1.0 / size * (epoch * (size - 1) / self._warmup_epochs + 1)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch and epoch == self.end_epoch - 1 and self._verbose and runtime.current().topology.rank == 0:
            print(f"\nEpoch {epoch + 1}: the learning-rate warm-up is done. The rate is "
                  f"{number(self.model.optimizer.learning_rate):g}.")


class BestModelCheckpoint(CalledByKeras2, keras.callbacks.ModelCheckpoint):
    """A Keras ModelCheckpoint with save_best_only=True and a file path that is set later. Rank 0 writes. Local.

    Set `filepath` before fit: `checkpoint.filepath = "best.keras"`. Put MetricAverageCallback before this callback, to
    measure "best" over all ranks. With MPIStrategy all ranks must pass this callback to fit, like any ModelCheckpoint.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: As for keras.callbacks.ModelCheckpoint.

    Raises:
        ValueError: When training begins, unless `filepath` ends in .keras or .h5 (.weights.h5 for weights only).
    """

    @checked
    def __init__(self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False, mode: str = "auto",
                 save_freq: str | int = "epoch"):
        self._endings = (".weights.h5",) if save_weights_only else (".keras", ".h5")
        super().__init__(f"best{self._endings[0]}", monitor=monitor, verbose=verbose, save_best_only=True,
                         save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath: Any = None  # Keras' constructor wants one.

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.filepath is None or not str(self.filepath).endswith(self._endings):
            raise ValueError("BestModelCheckpoint needs a path that ends in " + " or ".join(self._endings) + ". Set it "
                             f'before fit(): checkpoint.filepath = "best{self._endings[0]}". '
                             f"Received: {self.filepath!r}")
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._writes():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._writes():
            super().on_epoch_end(epoch, logs)

    def _writes(self) -> bool:
        """Return whether this rank saves: with MPIStrategy all ranks call Keras' code, otherwise only rank 0."""
        return is_under_strategy(self.model) or not runtime.is_initialized() or runtime.current().topology.rank == 0
