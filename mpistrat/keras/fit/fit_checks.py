"""FitChecks: checks that all ranks make the same steps and epochs in fit, with compatible callbacks, and stop together.

All ranks exchange a few values when training begins, in the first step of each epoch, and when training ends. These
exchanges have one name. So if a rank ends training alone, its exchange is paired with the next exchange of the others,
and every rank raises an error. Under a strategy the ranks exchange them when training begins, at the beginning of each
later epoch, and when a rank ends early.

In the first step of an epoch the ranks compare learning rates. In the first steps of fit they also compare digests of
weights, unless the first reductions of gradients do. At the end of an epoch the ranks compare the weights and the state
of the optimizers. ChecksWithinEpochs repeats this within an epoch.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ...api import array_ops, runtime
from ...api.sharding import are_alike, samples_of
from ...core.errors import CollectiveError, MismatchError
from ...core.topology import describe_by_rank, rank_list
from ...tensorflow.bridge.types import Variable
from ...tensorflow.consistency import (
    describe_weights,
    differing,
    digests_of_weights,
    require_equal_weights,
    warn_of_equal_data,
)
from ...tensorflow.kerases import KERASES, IdentitySet, is_of_keras, label_of, package_of
from ..bridge.compared import Adapted, adapted_in, different_rate, problem_of_adapted, rates_of, require_equal_rates
from ..bridge.measures import AverageMetrics
from ..bridge.private_names import Callback, Logs, all_layers, weights_of
from ..bridge.training import AverageStatistics, SaveSchedule, StrategyTraining, Training, schedules_of, step_values_of
from ..callbacks import BroadcastGlobalVariablesCallback, LearningRateScheduleCallback, MetricAverageCallback
from ..local_sgd import problem_of_settings
from .written_once import Entry, assign_roles, entry_of, require_backups

logger = logging.getLogger(__name__)

# -- the values that the ranks exchange, and the decisions on the values of all ranks: pure ----------------------------
#
# The ranks may have different callbacks, for example a ModelCheckpoint on rank 0 only.

# These callbacks communicate, so all ranks must have them.
COLLECTIVE = (BroadcastGlobalVariablesCallback, MetricAverageCallback)
# These have a method that runs after a batch, but it ignores the logs or only displays them.
_READ_NO_LOGS = ("ProgbarLogger", "History", "BackupAndRestore")


@dataclass(frozen=True)
class Begin:
    """What a rank tells the other ranks when fit begins."""

    steps: int | None  # Steps of an epoch; None if Keras does not know
    epochs: int | None  # The number of the last epoch; None if Keras does not know
    weights: int  # The number of weights that the model has so far
    collective: tuple[str, ...]  # The classes of callbacks that communicate
    readers: tuple[str, ...]  # The classes of callbacks that decide by metrics which are not averaged
    averages_statistics: bool  # Whether fit averages the running statistics
    joins: bool = False  # Whether ranks with fewer steps join at the end of each epoch
    # Whether gradients are accumulated, so that ranks with different numbers of steps may make as many updates.
    accumulates: bool = False
    compares_weights: bool = False  # Whether fit compares weights in its first steps, instead of the reductions
    saves: tuple[SaveSchedule, ...] = ()  # When callbacks save the model within an epoch
    adapted: tuple[Adapted, ...] = ()  # The state that layers of the model and of tf.data pipelines have learned
    # Whether the model has local variables. Ranks may have different learned states for the layers of these.
    has_local: bool = False
    entries: tuple[Entry, ...] = ()  # The callbacks, as ranks that write files compare them
    # Whether a callback may read the logs of a batch, so that a strategy must reduce the logs. For a strategy only.
    reads_logs: bool = False
    # The optimizers' rates, with labels. For a strategy only; without a strategy the first step compares them.
    rates: tuple[tuple[str, float], ...] = ()
    total: bytes = b""  # A digest of the weights. For a strategy only.
    is_under_strategy: bool = False
    settings: str = ""  # How the ranks average their weights; "" if the weights are the same in every step
    divided: tuple[tuple[float, ...], ...] = ()  # Samples of the arrays that shard() has divided
    batch_size: int = 32  # The arguments of fit
    initial_epoch: int = 0

    def __str__(self) -> str:
        return "begin to train"


@dataclass(frozen=True)
class Progress:
    """What a rank tells the other ranks between two epochs: how far it is in fit."""

    epochs: int  # The number of finished epochs, including the epochs before initial_epoch
    has_ended: bool = False  # Whether the rank ends training here
    cause: str = ""  # The reason, if a callback has stopped the rank

    def __str__(self) -> str:
        return f"ended training after epoch {self.epochs}{self.cause}" if self.has_ended \
            else f"go on to epoch {self.epochs + 1}"


@dataclass(frozen=True)
class Step:
    """What a rank tells the other ranks before one of the first steps of an epoch: the step, weights and rates."""

    epochs: int  # The number of finished epochs
    step: int  # The number of the step in the epoch, from 1
    # The digest of each weight that is trained; () before the weights exist, or if they are not compared.
    weights: tuple[bytes, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()  # The optimizers' rates, with labels
    setters: tuple[str, ...] = ()  # The classes of callbacks that may set a learning rate

    def __str__(self) -> str:
        epoch = self.epochs + 1
        return f"begin step {self.step} of epoch {epoch}" if self.step > 1 else f"go on to epoch {epoch}"


State = Begin | Progress | Step


def readers(callbacks: Sequence[Callback]) -> list[str]:
    """Return the classes of callbacks that decide by metrics, and have no MetricAverageCallback before them."""
    found = []
    for callback in callbacks:
        if isinstance(callback, MetricAverageCallback):
            break
        if is_of_keras(callback, "EarlyStopping", "ReduceLROnPlateau") or (
                is_of_keras(callback, "ModelCheckpoint") and callback.save_best_only):
            found.append(type(callback).__name__)
    return found


def reads_logs(callback: Callback) -> bool:
    """Return whether a callback may read the logs of a batch."""
    if is_of_keras(callback, *_READ_NO_LOGS) or getattr(callback, "save_freq", None) == "epoch":
        return False
    if is_of_keras(callback, "TensorBoard"):
        return callback.update_freq != "epoch"
    if type(callback).__module__.startswith("mpistrat."):
        return is_of_keras(callback, "ModelCheckpoint")  # No other callback of mpistrat reads logs.
    return not all(getattr(getattr(callback, name), "_is_default", False)
                   for name in ("on_batch_end", "on_train_batch_end", "on_test_batch_end"))


def setters(callbacks: Sequence[Callback]) -> tuple[str, ...]:
    """Return the classes of callbacks that set learning rates, and all user-defined classes, which may do so."""
    return tuple(sorted({type(c).__name__ for c in callbacks if isinstance(c, LearningRateScheduleCallback)
                         or is_of_keras(c, "LearningRateScheduler", "ReduceLROnPlateau") or is_users(c)}))


def is_users(callback: Callback) -> bool:
    """Return whether a callback is user-defined: its class is neither one of Keras nor one of mpistrat."""
    return package_of(type(callback)) not in (*KERASES, "mpistrat")


def setters_on_some(steps: Sequence[Step]) -> str:
    """Return a message if only some ranks have a callback that may set a learning rate; "" otherwise."""
    some = {name: where for name in sorted({name for step in steps for name in step.setters})
            if len(where := [rank for rank, step in enumerate(steps) if name in step.setters]) < len(steps)}
    return " ".join(f"Only ranks {rank_list(where)} have a {name}: pass it to fit on all ranks."
                    for name, where in some.items())


def problem_of_rates(steps: Sequence[Step]) -> str:
    """Return a message, with advice, on the first optimizer rate that differs between the ranks; "" if none differs."""
    if len({len(step.rates) for step in steps}) > 1:
        return ""
    different = different_rate([step.rates for step in steps])
    if not different:
        return ""
    advice = setters_on_some(steps) or (
        "Compute the rate from values that are equal on all ranks, not from rank() or the rows of a rank. Give all "
        "ranks the same callbacks, with hvd.callbacks.MetricAverageCallback() before those that read metrics.")
    return f"{different} {advice}"


def problem_at_begin(begins: Sequence[Begin]) -> str:
    """Return a message on what differs between the ranks when fit begins, with advice; "" if nothing differs."""
    if problem := problem_of_settings([begin.settings for begin in begins]):
        return problem
    if len({begin.joins for begin in begins}) > 1:
        return f"only some ranks pass uneven='join': {_by_rank(begins, 'joins')}. Pass the same value on all ranks."
    steps = {begin.steps for begin in begins if begin.steps is not None}
    if begins[0].is_under_strategy:
        divides = "MPIStrategy divides each global batch: pass the same"
        for name, what, advice in (
                ("steps", "have different numbers of steps per epoch",
                 f"{divides} data, batch_size= and steps_per_epoch= on all ranks."),
                ("batch_size", "have different batch sizes", f"{divides} batch_size= on all ranks."),
                ("initial_epoch", "begin with different epochs", "Give initial_epoch= the same value on all ranks.")):
            if len({getattr(begin, name) for begin in begins} - {None}) > 1:
                return f"the ranks {what}: {_by_rank(begins, name)}. {advice}"
    if len(steps) > 1 and not begins[0].joins:
        return (f"the ranks have different numbers of steps per epoch: {_by_rank(begins, 'steps')}. Ranks with more "
                "steps would wait for gradients of the others. Give each rank the same number of rows: x, y = "
                f"hvd.shard(x, y) for arrays, dataset.take({min(steps)}), or steps_per_epoch={min(steps)}. Or let the "
                'ranks with fewer steps wait at the end of each epoch: DistributedOptimizer(..., uneven="join").')
    if len({begin.epochs for begin in begins} - {None}) > 1:
        return (f"the ranks have different numbers of epochs: {_by_rank(begins, 'epochs')}. Give epochs= the same "
                "value on all ranks.")
    for cls in COLLECTIVE:
        having = [rank for rank, begin in enumerate(begins) if cls.__name__ in begin.collective]
        if 0 < len(having) < len(begins):
            return (f"only ranks {rank_list(having)} have a {cls.__name__}, which calls collectives. Pass it "
                    "to fit on all ranks.")
    if BroadcastGlobalVariablesCallback.__name__ in begins[0].collective and len({b.weights for b in begins}) > 1:
        return (f"the ranks' models have different numbers of weights: {_by_rank(begins, 'weights')}. "
                "BroadcastGlobalVariablesCallback needs the same weights on all ranks, and a model without an Input "
                "layer has none before its first call. Build the model on all ranks, or on none.")
    if len({begin.averages_statistics for begin in begins}) > 1:
        return ("the ranks disagree on DistributedOptimizer(average_statistics=): "
                f"{_by_rank(begins, 'averages_statistics')}. Pass the same value on all ranks.")
    return ""


def _by_rank(begins: Sequence[Begin], name: str) -> str:
    values = [getattr(begin, name) for begin in begins]
    return describe_by_rank(["unknown" if value is None else value for value in values])


def problem_between_epochs(states: Sequence[State], is_under_strategy: bool) -> str:
    """Return the error message if ranks are at different places in fit; "" otherwise."""
    if len({(type(s), getattr(s, "epochs", 0), getattr(s, "step", 0), getattr(s, "has_ended", False))
            for s in states}) == 1:
        return ""
    if any(isinstance(state, Progress) and state.cause for state in states):
        advice = ("A rank that stops alone leaves the others without its gradients. Give all ranks the same callbacks"
                  + ("." if is_under_strategy else ", with hvd.callbacks.MetricAverageCallback() before the callbacks "
                     "that read metrics, so that all ranks read the same metrics."))
    else:
        advice = "Call fit with the same epochs=, initial_epoch= and callbacks on all ranks."
    return f"the ranks are at different places in fit: {describe_by_rank(states, 'ranks {ranks} {value}')}. {advice}"


def have_same_rows(digests: Sequence[int]) -> bool:
    """Return whether several ranks have equal digests of their rows. False if the digests are 0 (rows unknown)."""
    return len(digests) > 1 and digests[0] != 0 and len(set(digests)) == 1


# -- the callbacks that exchange and compare ---------------------------------------------------------------------------

_COMPARED_STEPS = 3  # The model may have no weights yet in the first step.
_FIRST_BATCHES = 10  # after which fit compares weights for the first time


class FitChecks(Callback):
    """Checks that the ranks train in the same way. Collective; fit adds this callback.

    The argument `wrapped` has the callbacks that fit runs in place of the user's `callbacks`. digest_of_rows returns
    `rows`, layers_of_inputs `layers`. When training begins, the callback `statistics` gets the schedules of all ranks'
    callbacks that save the model within an epoch, and `averages` the classes of those that decide by metrics.
    """

    async_safe = True  # Keras may call on_train_batch_end in another thread, but waits for it before on_epoch_end.

    def __init__(self, training: Training, callbacks: Sequence[Callback], wrapped: Sequence[Callback], rows: int,
                 statistics: AverageStatistics | None, averages: AverageMetrics,
                 layers: Sequence[keras.layers.Layer], batch_size: int, initial_epoch: int):
        super().__init__()
        self._layers, self._wrapped, self._averages = layers, wrapped, averages
        self._batch_size, self._initial_epoch = batch_size, initial_epoch
        self._training, self._callbacks, self._rows, self._statistics = training, callbacks, rows, statistics
        self._name, self._process_set = training.name, training.process_set
        self._broadcasts = [each for each in callbacks if isinstance(each, BroadcastGlobalVariablesCallback)]
        self._is_checked = runtime.current().settings.is_checked
        self._names_steps = self._compares_rates = False
        self._weights_to_compare = 0  # the number of steps in which to compare weights
        self._suspects = ""  # a sentence on callbacks that only some ranks have
        self._differed: set[str] = set()  # the kinds of values that differed in the latest comparison
        self._epochs: int | None = None
        self._batches = 0
        self.is_silent = False  # whether the first rank prints nothing

    def on_train_begin(self, logs: Logs = None) -> None:
        """Compare what the ranks begin with. Raises MismatchError, on every rank, if they begin differently."""
        self._epochs = None
        training, is_silent = self._training, not (self.params or {}).get("verbose", 0)
        usual_rows = training.usual_rows if isinstance(training, StrategyTraining) else 0
        try:
            begins, marks = self._exchange(self._begin(), [self._rows, usual_rows, is_silent])
        except CollectiveError as error:
            if not training.settings:
                raise
            raise type(error)(f"{error} On this rank fit averages weights, by {training.settings}: give this callback "
                              "to fit on all ranks.") from error
        self.is_silent = bool(marks[0][2])
        if isinstance(training, StrategyTraining):
            training.has_begun, values = True, step_values_of(self.model)
            values.train_rows = max(1, *(rows for _, rows, _ in marks))
            values.reads_logs = any(begin.reads_logs for begin in begins)
        if self._statistics is not None and not self._training.joins:
            self._statistics.schedules = [schedule for begin in begins for schedule in begin.saves]
        if self._is_checked:
            self._check_begin(begins, [digest for digest, *_ in marks])
        self._averages.begin([begin.readers for begin in begins])
        entries = [begin.entries for begin in begins]
        require_backups(entries, training)
        assign_roles(self._wrapped, entries, training)
        known = [begin.steps for begin in begins if begin.steps is not None]
        for callback in self._callbacks:
            if training.joins and known and isinstance(callback, LearningRateScheduleCallback):
                # So that all ranks have equal rates: the steps per epoch of the rank with the most batches.
                callback.steps_per_epoch = callback.steps_per_epoch or max(known)
        for broadcast in self._broadcasts:
            broadcast.first_steps = training.first_steps

    def _begin(self) -> Begin:
        """Return what this rank tells the other ranks."""
        training, params = self._training, self.params or {}
        entries = tuple(entry_of(callback, training) for callback in self._callbacks)
        saves = schedules_of(self._callbacks)
        if training.is_under_strategy:
            total = b"".join(digests_of_weights(self._trained())) if self._is_checked else b""
            return Begin(params.get("steps"), params.get("epochs"), 0, (), (), True, saves=saves, entries=entries,
                         reads_logs=any(map(reads_logs, self._callbacks)), rates=rates_of(training.parts),
                         total=hashlib.blake2b(total, digest_size=8).digest(), is_under_strategy=True,
                         batch_size=self._batch_size, initial_epoch=self._initial_epoch)
        adapted: tuple[Adapted, ...] = ()
        if self._is_checked:
            layers = IdentitySet(all_layers(self.model))
            adapted = adapted_in(layers, bool(self._broadcasts)) \
                + adapted_in([each for each in self._layers if each not in layers], False)
        return Begin(
            params.get("steps"), params.get("epochs"), len(weights_of(self.model)),
            tuple(sorted({cls.__name__ for cls in COLLECTIVE for c in self._callbacks if isinstance(c, cls)})),
            tuple(readers(self._callbacks)), training.averages_statistics, self._training.joins, training.accumulates,
            training.leaves_weights_uncompared, saves, adapted, training.has_local, entries, settings=training.settings,
            divided=samples_of(training.process_set), batch_size=self._batch_size)

    def _trained(self) -> list[Variable]:
        return self._training.shared([weight for weight in weights_of(self.model) if weight.trainable])

    def _check_begin(self, begins: list[Begin], rows: list[int]) -> None:
        """Raise MismatchError if the ranks begin differently. Otherwise prepare the later checks."""
        problem = problem_at_begin(begins)
        warning, may_go_on = problem_of_adapted([begin.adapted for begin in begins])
        if problem or not (may_go_on or any(begin.has_local for begin in begins)):
            raise MismatchError(f"fit{self._numbering()}: {problem or warning}")
        require_equal_rates([begin.rates for begin in begins], "fit: when training begins")
        if len({begin.total for begin in begins}) > 1:
            require_equal_weights(self._trained(), f"{self._name}/weights", "fit: when training begins",
                                  causes=self._training.causes)
        if warning and self._process_set.rank() == 0:
            logger.warning("mpistrat: fit%s: %s", self._numbering(), warning)
        if self._process_set.rank() == 0 and have_same_rows(rows):
            warn_of_equal_data("fit got the same rows on all of them")
        if self._process_set.rank() == 0 and len({begin.batch_size for begin in begins}) > 1:
            logger.warning("mpistrat: fit%s: the ranks have different batch sizes: %s. So the rows of the ranks do not "
                           "count equally. Pass the same batch_size= on all ranks.", self._numbering(),
                           _by_rank(begins, "batch_size"))
        if self._process_set.rank() == 0 and not are_alike([begin.divided for begin in begins]):
            logger.warning("mpistrat: fit%s: hvd.shard() got arrays that differ among the ranks, so some rows may be "
                           "on several ranks, and others on none. Shuffle after hvd.shard(), or with one seed on all "
                           "ranks.", self._numbering())
        # With "join" the ranks may have different steps.
        if any(begin.compares_weights for begin in begins) and not self._training.joins:
            self._weights_to_compare = _COMPARED_STEPS
            # After the first step local weights differ in any case, and weights of sharded optimizers never do.
            if self._training.settings or self._training.shards_state:
                self._differed = {"weights"}
        self._names_steps = not self._training.joins and any(begin.steps is None for begin in begins) \
            and not any(begin.accumulates for begin in begins) and not self._training.is_under_strategy

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Raise MismatchError if the ranks' epochs differ, with "join" or a strategy; else the first step does so."""
        is_later = self._epochs is not None
        if self._is_checked and (self._training.joins or (self._training.is_under_strategy and is_later)):
            self._exchange(Progress(epoch))  # With "join" also in the first: initial_epoch may differ.
        self._epochs, self._batches, self._compares_rates = epoch, 0, not self._training.is_under_strategy

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Compare weights and rates. Raises MismatchError, on every rank, if they differ before two successive steps.

        They may differ once, because a broadcast may follow the first step.
        """
        if not self._is_checked or not (self._weights_to_compare or self._compares_rates):
            return
        variables = self._trained() if self._weights_to_compare and self._training.is_synchronised else []
        states, _ = self._exchange(Step(self._epochs or 0, batch + 1, tuple(digests_of_weights(variables)),
                                        rates_of(self._training.parts), setters(self._callbacks)))
        problems = {}
        if self._weights_to_compare:
            self._weights_to_compare -= 1
            digests = [[b"", *state.weights] for state in states]
            if differing(digests):
                ranks = self._process_set.group(self._name).topology.job_ranks
                problems["weights"] = describe_weights([label_of(v) for v in variables], digests, ranks)
            elif all(state.weights for state in states):
                self._weights_to_compare = 0
        # With "join" a rank without batches is missing.
        rates = problem_of_rates(states) if len(states) == self._process_set.size() else ""
        if rates:
            problems["rates"] = f"fit{self._numbering()}: in epoch {states[0].epochs + 1} {rates}"
        for kind, problem in problems.items():
            if kind in self._differed:
                raise MismatchError(problem)
        self._differed, self._compares_rates = set(problems), bool(rates)
        # This sentence has ranks of the process set, and the sentence on the weights has ranks of the job.
        self._suspects = setters_on_some(states) if self._process_set.process_set_id == 0 else ""

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches = batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compare the weights. Raises MismatchError, on every rank, if they differ.

        Raises CollectiveError if this rank has stopped within the epoch, and other ranks continue.
        """
        self._epochs = epoch + 1
        if not self._is_checked:
            return
        is_within = self._batches < ((self.params or {}).get("steps") or 0)
        if self._names_steps:
            self._require_ended(f"ended epoch {self._epochs} after {self._batches} steps")
        elif self.model.stop_training and is_within and not self._training.joins \
                and not self._training.is_under_strategy:  # The others go on without a rank that joins.
            self._require_ended(f"stopped within epoch {self._epochs}")
        for first_steps in self._training.first_steps:
            first_steps.conclude()  # Its error says more about weights that were never equal.
        self.require_equal_weights(f"fit: at the end of epoch {self._epochs}")

    def on_train_end(self, logs: Logs = None) -> None:
        """Raise MismatchError on every rank, unless all ranks end training after the same epoch."""
        # Under a strategy the ranks know that all of them end after the last epoch.
        is_early = (self._epochs or 0) < ((self.params or {}).get("epochs") or 0)
        if self._is_checked and (is_early or not self._training.is_under_strategy):
            self._exchange(Progress(self._epochs or 0, True, self._cause()))

    def require_equal_weights(self, place: str) -> None:
        """Compare the weights and the optimizer state that must be the same on all ranks. Collective.

        Raises MismatchError, on every rank, if they differ and MPISTRAT_CHECK_ACTION is abort. The message begins
        with `place`, such as "fit: at the end of epoch 3".
        """
        training = self._training
        own = IdentitySet(variable for broadcast in self._broadcasts for variable in broadcast.local)
        rates = rates_of(training.parts) if training.is_under_strategy else ()
        suspects = " ".join(filter(None, (self._suspects, training.undistributed)))
        require_equal_weights([v for v in training.compared() if v not in own], f"{self._name}/weights", place,
                              self._process_set, suspects, training.causes, runtime.current().settings.check_action,
                              (repr(rates).encode(), lambda: require_equal_rates(array_ops.allgather_object(
                                  rates, f"{self._name}/rates", self._process_set), place)))

    def _exchange(self, state: State, marks: Sequence[int] = (0, 0, 0)) -> tuple[list[Any], list[list[int]]]:
        """Return the `state` and the `marks` (any integers) of each rank, by rank. Collective; see Group.exchange.

        Raises MismatchError if the ranks are at different places in fit. The caller compares states of the class Begin.
        """
        states: list[Any]
        states, of_ranks = array_ops.exchange(state, marks, f"{self._name}/fit", self._process_set)
        are_begins = all(isinstance(each, Begin) for each in states)
        if not are_begins and (problem := problem_between_epochs(states, self._training.is_under_strategy)):
            raise MismatchError(f"fit{self._numbering()}: {problem}")
        return states, of_ranks

    def _numbering(self) -> str:
        """Return a note that a message numbers the ranks within the process set; "" for the set of all ranks."""
        return "" if self._process_set.process_set_id == 0 else \
            f" (in the process set of ranks {rank_list(self._process_set.ranks or ())}, here numbered from 0)"

    def _require_ended(self, progress: str) -> None:
        """Wait until all ranks have ended this epoch after the same batch. Raises CollectiveError if others continue.

        They wait for this rank's gradients then. `progress` says where this rank is, such as "stopped within epoch 3".
        """
        try:
            array_ops.barrier(f"{self._name}/{progress}", self._process_set)
        except CollectiveError as error:
            if not self.model.stop_training:
                raise
            raise type(error)(f"{error} This rank has {progress}{self._cause()}, and other ranks have not. All ranks "
                              "must stop after the same batch.") from error

    def _cause(self) -> str:
        """Return a note on the callback that has probably stopped this rank; "" if nothing has stopped it."""
        if not self.model.stop_training:
            return ""
        stoppers = [c for c in self._callbacks if getattr(c, "stopped_epoch", 0)] \
            or [c for c in self._callbacks if is_of_keras(c, "TerminateOnNaN")] \
            or [c for c in self._callbacks if is_users(c)]
        names = " or ".join(sorted({type(c).__name__ for c in stoppers}))
        return f" (stopped by {names})" if names else " (model.stop_training is set)"


class ChecksWithinEpochs(Callback):
    """Calls `check` each time `every` batches of an epoch are done, to find weights that drift apart. Collective.

    fit adds this callback. In the first epoch, the first call comes after ten batches at the latest. `check` is called
    before the next batch, because Keras may call callbacks after a batch in a different thread, while the next step
    runs. With steps_per_execution it is called before the next execution. If each rank trains its own weights for some
    steps (LocalSGD), the call is delayed to a batch before which all ranks have the same weights.
    """

    def __init__(self, check: Callable[[str], None], every: int, training: Training):
        super().__init__()
        self._check, self._every, self._training = check, every, training
        self._epoch, self._next, self._first = 0, every, min(_FIRST_BATCHES, every)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._next, self._first = epoch, self._first, self._every

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if batch >= self._next and self._training.is_synchronised:
            self._next = batch + self._every
            self._check(f"fit: before batch {batch + 1} of epoch {self._epoch + 1}")
