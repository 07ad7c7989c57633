"""Makes fit add mpistrat's own callbacks, if several ranks train a model: those of its distributed optimizers, or of an
MPIStrategy, which has its own checks and gets only the callback that measures.

It also lets one rank run a callback that writes files to a path which other ranks name too; see written_once.py.

CallbackList is left alone: users call its methods in loops of their own, maybe on one rank. So are evaluate and
predict, which may run on one rank.
"""

import hashlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import Callback, CallbackList

from ...api import runtime
from ...api.process_sets import global_process_set
from ...api.sharding import OWN_ORDER, is_sharded_in_own_order
from ...elastic import membership
from ...process import step_timer
from ...process.step_timer import StepTimer
from ...tensorflow.names import eager
from ...tensorflow.same_data import some_rows
from .. import xla
from ..callbacks import Logs
from ..keras2_arguments import bound
from ..patches import Function, replaces
from .adapted import layers_of_inputs
from .elastic_fit import Elastic, run_fit
from .fit_checks import ChecksWithinEpochs, FitChecks
from .fit_optimizers import FitOptimizers, fit_optimizers_of, is_under_strategy
from .join_epochs import JoinEpochs
from .row_counts import RowCount
from .running_statistics import AverageStatistics
from .throughput import FitThroughput
from .written_once import written_once

logger = logging.getLogger(__name__)


@replaces(keras.Model, "fit", "the ranks would not be compared, nor their running statistics averaged",
          "callbacks.on_train_begin()")
def fit(original: Function, self: keras.Model, *args: object, **kwargs: object) -> Any:
    call = bound(original, self, *args, **kwargs)
    elastic = next((each for each in _users(call.arguments.get("callbacks")) if isinstance(each, Elastic)), None)
    if elastic is None or membership.current() is None:
        return _fit_once(original, self, call)

    def from_epoch(epoch: int) -> Any:
        call.arguments["initial_epoch"] = epoch
        return _fit_once(original, self, call)
    return run_fit(elastic, from_epoch, self, call.arguments.get("initial_epoch", 0))


def _fit_once(original: Function, model: keras.Model, call: inspect.BoundArguments) -> Any:
    optimizers = fit_optimizers_of(model)
    if optimizers is not None:
        xla.follow_ranks(model)
    is_strategys = is_under_strategy(model)
    process_set = optimizers.process_set if optimizers is not None else global_process_set
    timer = step_timer.current()
    if (optimizers is None and not is_strategys) or not (process_set.has_others() or timer):
        return original(*call.args, **call.kwargs)
    given = call.arguments.get("callbacks")
    own: list[Callback] = []
    users = _users(given)
    if process_set.has_others():
        if optimizers is None:
            own = [FitThroughput(eager("strategy/throughput"), global_process_set)]
        else:
            own = own_callbacks(optimizers, users, [call.arguments.get("x"), call.arguments.get("y")])
            users = written_once(users, model, optimizers)
    if timer is not None:
        own, timer.is_in_fit = [*own, TimedSteps(timer, is_strategys)], True
    try:
        with _extended(given, model, own, users) as callbacks:
            call.arguments["callbacks"] = callbacks
            return original(*call.args, **call.kwargs)
    finally:
        call.arguments["callbacks"] = given
        if timer is not None:
            timer.is_in_fit = False


def _users(callbacks: object) -> list[Callback]:
    """The callbacks that the user has given to fit: one, a nested structure or a CallbackList."""
    if isinstance(callbacks, CallbackList):
        return list(callbacks.callbacks)
    return list(tf.nest.flatten(callbacks)) if callbacks else []


def own_callbacks(optimizers: FitOptimizers, callbacks: list[Callback], inputs: list[Any]) -> list[Callback]:
    """The callbacks that fit adds before those of the user. `inputs` are the arguments x and y of fit."""
    own: list[Callback] = [JoinEpochs(optimizers)] if optimizers.joins else []
    is_checked = not runtime.current().settings.consistency_check_disable
    statistics = AverageStatistics(optimizers, callbacks, exchanges=not is_checked and not optimizers.joins) \
        if optimizers.averages_statistics else None
    if is_checked:
        if optimizers.process_set.rank() == 0 and any(map(is_sharded_in_own_order, tf.nest.flatten(inputs))):
            logger.warning("mpistrat: fit got a dataset that each rank shuffles in an order of its own before it takes "
                           "its shard, so rows are read by several ranks or by none. %s", OWN_ORDER)
        checks = FitChecks(optimizers, callbacks, digest_of_rows(inputs), statistics, layers_of_inputs(inputs))
        own.append(checks)
        every = runtime.current().settings.check_every
        if every and not optimizers.joins:  # A rank that has joined makes no steps.
            own.append(ChecksWithinEpochs(checks.require_equal_weights, every))
    if statistics is not None:
        own.append(statistics)
    if is_checked:  # Only then: what checks that all ranks end fit together comes before it.
        own.append(FitThroughput(f"{optimizers.name}/throughput", optimizers.process_set))
    return own


@contextmanager
def _extended(given: object, model: keras.Model, own: list[Callback], users: list[Callback]) -> Iterator[Any]:
    """A context with what fit gets in place of the callbacks that are given: its own, and then the user's."""
    if not isinstance(given, CallbackList):
        yield [*own, *users]
        return
    for callback in own:
        callback.set_params(given.params)
        callback.set_model(model)
    before, given.callbacks = given.callbacks, [*own, *users]
    try:
        yield given
    finally:
        given.callbacks = before


class TimedSteps(Callback):
    """Counts the steps and rows of fit for `mpistrat run --efficiency`, and ends the script after the last step timed.

    Local; fit adds it on all ranks, and on one rank alone. See process/step_timer.py.
    """

    def __init__(self, timer: StepTimer, is_global: bool):
        super().__init__()
        self._timer, self._is_global = timer, is_global

    def on_train_begin(self, logs: Logs = None) -> None:
        self._rows = RowCount.of(self.model, "train_step")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps = 0  # of this epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        ended, self._steps = batch + 1 - self._steps, batch + 1
        self._timer.end_step(ended, self._rows.rows or None, self._is_global)
        self._timer.end_script()


def digest_of_rows(inputs: object) -> bytes:
    """A digest of the shapes, and of rows at equal distances; b"" unless all inputs are arrays or tensors of numbers.

    `inputs` are the arguments x and y of fit: arrays in any structure. None is left out.
    """
    digest = hashlib.blake2b(digest_size=8)
    arrays = [each for each in tf.nest.flatten(inputs) if each is not None]
    for array in arrays:
        if not isinstance(array, np.ndarray | tf.Tensor) or not array.ndim or not len(array):
            return b""
        rows = some_rows(array)
        if rows.dtype.hasobject:
            return b""
        digest.update(f"{tuple(array.shape)} {rows.dtype}".encode())
        # By way of bytes: hashlib does not take bfloat16.
        digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return digest.digest() if arrays else b""
