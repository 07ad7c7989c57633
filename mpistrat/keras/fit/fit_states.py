"""The values that the ranks exchange in fit, and the decisions that depend on the values of all ranks. Pure.

The ranks may have different callbacks, for example a ModelCheckpoint on rank 0 only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.topology import describe_by_rank, rank_list
from ...tensorflow.kerases import KERASES, is_of_keras, package_of
from ..bridge.adapted import Adapted
from ..bridge.private_names import Callback
from ..bridge.rates import different_rate
from ..bridge.running_statistics import SaveSchedule
from ..bridge.training import problem_of_settings
from ..callbacks import BroadcastGlobalVariablesCallback, LearningRateScheduleCallback, MetricAverageCallback
from .written_once import Entry

# These callbacks communicate, so all ranks must have them.
COLLECTIVE = (BroadcastGlobalVariablesCallback, MetricAverageCallback)
# These have a method that runs after a batch, but it ignores the logs or only displays them.
_READ_NO_LOGS = ("ProgbarLogger", "History", "BackupAndRestore")


@dataclass(frozen=True)
class Begin:
    """The state of one rank when fit begins."""

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
    settings: str = ""  # How the ranks average their weights; "" if the weights are the same in every step

    def __str__(self) -> str:
        return "begin to train"


@dataclass(frozen=True)
class Progress:
    """How far one rank has come, recorded between two epochs."""

    epochs: int  # The number of finished epochs, including the epochs before initial_epoch
    has_ended: bool = False  # Whether the rank ends training here
    cause: str = ""  # The reason, if a callback has stopped the rank

    def __str__(self) -> str:
        return f"ended training after epoch {self.epochs}{self.cause}" if self.has_ended \
            else f"go on to epoch {self.epochs + 1}"


@dataclass(frozen=True)
class Step:
    """The place of one rank before one of the first steps of an epoch."""

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
    """Return the classes of callbacks that decide by metrics, and come before any MetricAverageCallback."""
    found = []
    for callback in callbacks:
        if isinstance(callback, MetricAverageCallback):
            break
        if is_of_keras(callback, "EarlyStopping", "ReduceLROnPlateau") or (
                is_of_keras(callback, "ModelCheckpoint") and callback.save_best_only):
            found.append(type(callback).__name__)
    return found


def reads_logs(callback: Callback) -> bool:
    """Whether a callback may read the logs of a batch."""
    if is_of_keras(callback, *_READ_NO_LOGS) or getattr(callback, "save_freq", None) == "epoch":
        return False
    if is_of_keras(callback, "TensorBoard"):
        return callback.update_freq != "epoch"
    if type(callback).__module__.startswith("mpistrat."):
        return is_of_keras(callback, "ModelCheckpoint")  # No other callback of mpistrat reads logs.
    return not all(getattr(getattr(callback, name), "_is_default", False)
                   for name in ("on_batch_end", "on_train_batch_end", "on_test_batch_end"))


def setters(callbacks: Sequence[Callback]) -> tuple[str, ...]:
    """Return the classes of callbacks that set learning rates, and of user-defined callbacks, which may set them."""
    return tuple(sorted({type(c).__name__ for c in callbacks if isinstance(c, LearningRateScheduleCallback)
                         or is_of_keras(c, "LearningRateScheduler", "ReduceLROnPlateau") or is_users(c)}))


def is_users(callback: Callback) -> bool:
    """Whether the class of a callback is neither Keras' nor mpistrat's."""
    return package_of(type(callback)) not in (*KERASES, "mpistrat")


def setters_on_some(steps: Sequence[Step]) -> str:
    """Return a message on callbacks that may set a learning rate and that only some ranks have; "" if none."""
    some = {name: where for name in sorted({name for step in steps for name in step.setters})
            if len(where := [rank for rank, step in enumerate(steps) if name in step.setters]) < len(steps)}
    return " ".join(f"Only ranks {rank_list(where)} have a {name}: give it to the callbacks of all ranks."
                    for name, where in some.items())


def problem_of_rates(steps: Sequence[Step]) -> str:
    """Return a message on the rate of the optimizers that differs between the ranks, with advice; "" if none."""
    if len({len(step.rates) for step in steps}) > 1:
        return ""
    different = different_rate([step.rates for step in steps])
    if not different:
        return ""
    advice = setters_on_some(steps) or (
        "Compute the rate from values that are equal on all ranks, not from rank() or this rank's rows. Give all ranks "
        "the same callbacks, after an hvd.callbacks.MetricAverageCallback() if they read metrics.")
    return f"{different} {advice}"


def problem_at_begin(begins: Sequence[Begin]) -> str:
    """Return a message on what differs between the ranks when fit begins, with advice; "" if nothing differs."""
    if problem := problem_of_settings([begin.settings for begin in begins]):
        return problem
    if len({begin.joins for begin in begins}) > 1:
        return f"only some ranks pass uneven='join': {_by_rank(begins, 'joins')}. Pass the same value on all ranks."
    steps = {begin.steps for begin in begins if begin.steps is not None}
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
            return (f"only ranks {rank_list(having)} have a {cls.__name__}, which communicates. Give it to the "
                    "callbacks of all ranks.")
    if BroadcastGlobalVariablesCallback.__name__ in begins[0].collective and len({b.weights for b in begins}) > 1:
        return (f"the ranks' models have different numbers of weights: {_by_rank(begins, 'weights')}. "
                "BroadcastGlobalVariablesCallback broadcasts the weights that exist. A model without an Input layer is "
                "built by its first call. Build the model on all ranks, or on none.")
    if len({begin.averages_statistics for begin in begins}) > 1:
        return ("the ranks disagree on DistributedOptimizer(average_statistics=): "
                f"{_by_rank(begins, 'averages_statistics')}. Pass the same value on all ranks.")
    return ""


def _by_rank(begins: Sequence[Begin], name: str) -> str:
    values = [getattr(begin, name) for begin in begins]
    return describe_by_rank(["unknown" if value is None else value for value in values])


def problem_between_epochs(states: Sequence[State]) -> str:
    """Return the error message if ranks are at different places in fit; "" otherwise."""
    if len({(type(s), getattr(s, "epochs", 0), getattr(s, "step", 0), getattr(s, "has_ended", False))
            for s in states}) == 1:
        return ""
    if any(isinstance(state, Progress) and state.cause for state in states):
        advice = ("A rank that stops alone leaves the others without its gradients. Give all ranks the same callbacks, "
                  "with hvd.callbacks.MetricAverageCallback() before the callbacks that read metrics, so that all "
                  "ranks read the same metrics.")
    else:
        advice = "Call fit with the same epochs=, initial_epoch= and callbacks on all ranks."
    return f"the ranks are at different places: {describe_by_rank(states, 'ranks {ranks} {value}')}. {advice}"


def have_same_rows(digests: Sequence[int]) -> bool:
    """Return whether all ranks got the same rows, by their digests of some rows. A digest of 0 is not compared."""
    return len(digests) > 1 and digests[0] != 0 and len(set(digests)) == 1
