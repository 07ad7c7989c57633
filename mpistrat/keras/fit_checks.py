"""FitChecks: the ranks make as many steps and epochs in fit, with callbacks that fit together, and stop together.

All ranks exchange a few values when training begins, before each further epoch and when training ends, under one name.
So a rank that stops alone meets the others' exchange, and every rank raises an error that says so. The decisions are
functions of the values of all ranks; the ranks may have different callbacks, as with a ModelCheckpoint on the chief.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, TerminateOnNaN

from ..api import ops as array_ops
from ..api.process_sets import ProcessSet
from ..core.errors import CollectiveError, MismatchError
from ..core.topology import describe_by_rank, rank_list
from ..tensorflow.first_steps import FirstSteps
from .callbacks import BroadcastGlobalVariablesCallback, Logs, MetricAverageCallback
from .uneven import use_longest_epoch

logger = logging.getLogger(__name__)

# They communicate, so all ranks must have them.
_COLLECTIVE = (BroadcastGlobalVariablesCallback, MetricAverageCallback)


@dataclass(frozen=True)
class Begin:
    """What one rank begins fit with.

    Attributes:
        steps: Steps of an epoch; None if Keras does not know.
        epochs: The number of the last epoch; None if Keras does not know.
        weights: How many weights the model has already.
        collective: The classes of callbacks that communicate.
        readers: The classes of callbacks that decide by metrics which are not averaged.
        averages_statistics: Whether fit averages the running statistics.
        joins: Whether ranks with fewer steps join at the end of each epoch.
    """

    steps: int | None
    epochs: int | None
    weights: int
    collective: tuple[str, ...]
    readers: tuple[str, ...]
    averages_statistics: bool
    joins: bool = False

    def __str__(self) -> str:
        return "begin to train"


@dataclass(frozen=True)
class Progress:
    """Where one rank is between two epochs.

    Attributes:
        epochs: How many epochs are behind it, those before the initial epoch included.
        has_ended: Whether it ends training here.
        cause: Why, if a callback has stopped it.
    """

    epochs: int
    has_ended: bool = False
    cause: str = ""

    def __str__(self) -> str:
        return f"ended training after epoch {self.epochs}{self.cause}" if self.has_ended \
            else f"go on to epoch {self.epochs + 1}"


class FitChecks(Callback):
    """Checks that the ranks train alike, and averages the metrics that other callbacks read. Collective; fit adds it.

    Args:
        name: That of the optimizer, the same on all ranks.
        callbacks: The callbacks of fit on this rank.
        averages_statistics: Whether fit averages the running statistics.
        joins: Whether ranks with fewer steps join at the end of each epoch.
        first_steps: Checks the optimizer's first reductions.
        process_set: That of the optimizer.
    """

    async_safe = True  # Keras may call on_train_batch_end in another thread; it waits for it before on_epoch_end.

    def __init__(self, name: str, callbacks: Sequence[Callback], averages_statistics: bool, joins: bool,
                 first_steps: FirstSteps, process_set: ProcessSet):
        super().__init__()
        self._name, self._callbacks = name, callbacks
        self._averages_statistics, self._joins, self._first_steps = averages_statistics, joins, first_steps
        self._process_set = process_set
        self._averages_metrics = self._has_warned = False
        self._epochs: int | None = None
        self._batches = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raises MismatchError on every rank, when the ranks begin differently."""
        self._epochs = None
        params = self.params or {}
        begins = self._exchange(Begin(
            params.get("steps"), params.get("epochs"), len(self.model.weights),
            tuple(sorted({cls.__name__ for cls in _COLLECTIVE for c in self._callbacks if isinstance(c, cls)})),
            tuple(readers(self._callbacks)), self._averages_statistics, self._joins))
        problem = problem_at_begin(begins)
        if problem:
            raise MismatchError(f"fit{self._numbering()}: {problem}")
        if self._joins:
            use_longest_epoch(self._callbacks, [begin.steps for begin in begins])
        found = {rank: begin.readers for rank, begin in enumerate(begins) if begin.readers}
        self._averages_metrics = bool(found)
        if found and self._process_set.rank() == 0:
            logger.info("rank 0: fit averages the metrics over the ranks at the end of each epoch, for %s on ranks %s",
                        ", ".join(sorted({name for names in found.values() for name in names})), rank_list(found))
        for callback in self._callbacks:
            if isinstance(callback, BroadcastGlobalVariablesCallback):
                callback.first_steps = self._first_steps

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Raises MismatchError on every rank, when some rank is elsewhere."""
        if self._epochs is not None:
            self._require_together(Progress(epoch))
        self._epochs = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches = batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Raises an error of the engine, when this rank has stopped within the epoch, and others go on."""
        self._epochs = epoch + 1
        is_within = self._batches < ((self.params or {}).get("steps") or 0)
        if self.model.stop_training and is_within and not self._joins:  # If it joins, the others go on without it.
            self._require_stopped()
        if self._averages_metrics:
            self._average({} if logs is None else logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """As on_epoch_begin."""
        self._require_together(Progress(self._epochs or 0, True, self._cause()))
        self._first_steps.conclude()

    def _exchange(self, state: Begin | Progress) -> list[Any]:
        """The states of all ranks, all of one class. Collective."""
        states: list[Any] = array_ops.allgather_object(state, f"{self._name}/fit", self._process_set)
        if len(set(map(type, states))) > 1:
            raise MismatchError(f"fit{self._numbering()}: {problem_between_epochs(states)}")
        return states

    def _numbering(self) -> str:
        """How to read the numbers of ranks in a message."""
        return "" if self._process_set.process_set_id == 0 else \
            f" (ranks 0, 1, ... of the process set of ranks {rank_list(self._process_set.ranks or ())})"

    def _require_together(self, state: Progress) -> None:
        problem = problem_between_epochs(self._exchange(state))
        if problem:
            raise MismatchError(f"fit{self._numbering()}: {problem}")

    def _require_stopped(self) -> None:
        """Wait until all ranks have stopped within this epoch. Those that have not wait for gradients."""
        try:
            # A report of the wait names this barrier, so the name describes what this rank does.
            array_ops.barrier(f"{self._name}/stopped within epoch {self._epochs}", self._process_set)
        except CollectiveError as error:
            raise type(error)(f"{error} This rank has stopped within epoch {self._epochs}{self._cause()}, and others "
                              "have not: all ranks must stop after the same batch.") from error

    def _cause(self) -> str:
        """Which callback has stopped this rank, as far as that is known."""
        if not self.model.stop_training:
            return ""
        stoppers = [c for c in self._callbacks if getattr(c, "stopped_epoch", 0)] \
            or [c for c in self._callbacks if isinstance(c, TerminateOnNaN)] \
            or [c for c in self._callbacks if type(c).__module__.partition(".")[0] not in ("keras", "mpistrat")]
        names = " or ".join(sorted({type(c).__name__ for c in stoppers}))
        return f" (stopped by {names})" if names else " (model.stop_training is set)"

    def _average(self, logs: dict[str, Any]) -> None:
        own = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str)}
        of_ranks = array_ops.allgather_object(own, f"{self._name}/metrics", self._process_set)
        means, missing = means_of(of_ranks)
        logs.update({name: mean for name, mean in means.items() if name in own})
        if missing and not self._has_warned and self._process_set.rank() == 0:
            logger.warning("rank 0: fit cannot average metrics that only some ranks have: %s. Callbacks that read them "
                           "may decide differently on each rank: give validation_data to all ranks.",
                           "; ".join(f"{name} on ranks {rank_list(ranks)}" for name, ranks in missing.items()))
        self._has_warned |= bool(missing)


def readers(callbacks: Sequence[Callback]) -> list[str]:
    """The classes of the callbacks that decide by metrics, and come before a MetricAverageCallback."""
    found = []
    for callback in callbacks:
        if isinstance(callback, MetricAverageCallback):
            break
        if isinstance(callback, EarlyStopping | ReduceLROnPlateau) or (
                isinstance(callback, ModelCheckpoint) and callback.save_best_only):
            found.append(type(callback).__name__)
    return found


def means_of(metrics: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, list[int]]]:
    """The mean of each metric that all ranks have, and the ranks of each other metric."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(metrics):
        for name in of_rank:
            ranks.setdefault(name, []).append(rank)
    missing = {name: where for name, where in ranks.items() if len(where) < len(metrics)}
    return {name: float(np.mean([m[name] for m in metrics])) for name in ranks if name not in missing}, missing


def problem_at_begin(begins: Sequence[Begin]) -> str:
    """What the ranks begin differently, with the way out; "" if nothing."""
    if len({begin.joins for begin in begins}) > 1:
        return f"the ranks disagree on DistributedOptimizer(uneven=) being 'join': {_by_rank(begins, 'joins')}."
    steps = {begin.steps for begin in begins if begin.steps is not None}
    if len(steps) > 1 and not begins[0].joins:
        return (f"the ranks have different numbers of steps per epoch: {_by_rank(begins, 'steps')}. The ranks with "
                "more would wait for gradients of the others. Give each rank as many rows: x, y = hvd.shard(x, y) for "
                f"arrays, dataset.take({min(steps)}), or steps_per_epoch={min(steps)}. Or let the ranks with fewer "
                'wait at the end of each epoch: DistributedOptimizer(..., uneven="join").')
    if len({begin.epochs for begin in begins} - {None}) > 1:
        return (f"the ranks have different numbers of epochs: {_by_rank(begins, 'epochs')}. Give epochs= the same "
                "value on all ranks.")
    for cls in _COLLECTIVE:
        having = [rank for rank, begin in enumerate(begins) if cls.__name__ in begin.collective]
        if 0 < len(having) < len(begins):
            return (f"only ranks {rank_list(having)} have a {cls.__name__}. It communicates: give it to the callbacks "
                    "of all ranks.")
    if BroadcastGlobalVariablesCallback.__name__ in begins[0].collective and len({b.weights for b in begins}) > 1:
        return (f"the ranks' models have different numbers of weights: {_by_rank(begins, 'weights')}. "
                "BroadcastGlobalVariablesCallback broadcasts those that exist. A model without an Input layer is built "
                "by its first call: build it on all ranks, or on none.")
    if len({begin.averages_statistics for begin in begins}) > 1:
        return ("the ranks disagree on DistributedOptimizer(average_statistics=): "
                f"{_by_rank(begins, 'averages_statistics')}.")
    return ""


def _by_rank(begins: Sequence[Begin], name: str) -> str:
    values = [getattr(begin, name) for begin in begins]
    return describe_by_rank(["unknown" if value is None else value for value in values])


def problem_between_epochs(states: Sequence[Begin | Progress]) -> str:
    """What is wrong if the ranks are not all at the same place of fit; "" if they are."""
    if len({(type(s), getattr(s, "epochs", 0), getattr(s, "has_ended", False)) for s in states}) == 1:
        return ""
    if any(isinstance(state, Progress) and state.cause for state in states):
        advice = ("A rank that stops alone leaves the others without its gradients. Give all ranks the same callbacks, "
                  "and let them read the same metrics: hvd.callbacks.MetricAverageCallback() before the callbacks "
                  "that read them.")
    else:
        advice = "Call fit with the same epochs=, initial_epoch= and callbacks on all ranks."
    return f"the ranks are at different places: {describe_by_rank(states, 'ranks {ranks} {value}')}. {advice}"
