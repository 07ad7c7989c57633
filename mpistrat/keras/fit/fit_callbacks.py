"""The replacement of Model.fit. It adds mpistrat's own callbacks if several ranks train a model together.

If several ranks pass a callback that writes files to the same path, only one rank runs it; see written_once.py.

evaluate, predict and CallbackList are not replaced, because users may call them on one rank only.
"""

import functools
import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf

from ...api import array_ops, runtime
from ...api.process_sets import global_process_set
from ...api.runtime import waits_between
from ...api.sharding import OWN_ORDER, is_sharded_in_own_order, take_divided
from ...core.errors import InvalidRequestError, MismatchError
from ...elastic import membership
from ...process import step_timer
from ...process.step_timer import StepTimer
from ...tensorflow.bridge.names import eager
from ...tensorflow.consistency import some_rows
from ...tensorflow.kerases import is_keras2, is_of_keras, package_of
from ...tensorflow.ops import broadcast_, was_broadcast
from ..bridge.compared import layers_of_inputs
from ..bridge.measures import AverageMetrics, FitThroughput, row_count_of
from ..bridge.patches import Function, bound, replaces
from ..bridge.private_names import Callback, Logs, TensorFlowTrainer, weights_of
from ..bridge.training import (
    AverageStatistics,
    DistributedTraining,
    Training,
    in_fit,
    is_under_strategy,
    training_of,
)
from ..callbacks import AveragingCheck, BroadcastGlobalVariablesCallback
from ..clone import follow_ranks
from ..elastic import Elastic, run_fit
from ..local_sgd import LOCAL_SGD, LocalTraining, PeriodicAveraging
from .fit_checks import Begin, ChecksWithinEpochs, FitChecks, is_users, problem_at_begin
from .written_once import written_once

logger = logging.getLogger(__name__)
_COMMITS_IN_KERAS_2 = ("With Keras 2 (tf_keras), call fit in a function that @hvd.elastic.run decorates, and pass fit "
                       "the callback hvd.elastic.CommitStateCallback(state), where state is an hvd.elastic.KerasState.")


@replaces(TensorFlowTrainer, "fit", "the ranks would not be compared, nor their running statistics averaged",
          "callbacks.on_train_begin()")
def fit(original: Function, self: keras.Model, *args: object, **kwargs: object) -> Any:
    call = bound(original, self, *args, **kwargs)
    users = users_callbacks(call.arguments.get("callbacks"))
    elastic = next((each for each in users if isinstance(each, Elastic)), None)
    job = membership.current()
    if elastic is None or job is None:
        if job is not None and runtime.is_initialized() and not job.has_state and runtime.current().topology.rank == 0:
            _say_that_nothing_commits(_COMMITS_IN_KERAS_2 if is_keras2(self) else
                                      "Type model.fit(..., callbacks=[..., hvd.callbacks.Elastic()])")
        return _fit_once(original, self, call)
    if is_keras2(self):
        raise InvalidRequestError(f"the callback Elastic needs a model of Keras 3. {_COMMITS_IN_KERAS_2}")

    def from_epoch(epoch: int) -> Any:
        call.arguments["initial_epoch"] = epoch
        return _fit_once(original, self, call)
    return run_fit(elastic, from_epoch, self, call.arguments.get("initial_epoch", 0), trains_apart(users))


@functools.cache
def _say_that_nothing_commits(remedy: str) -> None:
    logger.warning("mpistrat: this job is elastic, but fit has no callback that commits, so training begins anew "
                   "after each loss of a rank. %s", remedy)


_trained_together: "WeakSet[keras.Model]" = WeakSet()
_checked: "WeakSet[keras.Model]" = WeakSet()


def _fit_once(original: Function, model: keras.Model, call: inspect.BoundArguments) -> Any:
    users, timer = users_callbacks(call.arguments.get("callbacks")), step_timer.current()
    averaging = trains_apart(users)
    training = training_of(model) if averaging is None else averaging.training(model)
    if averaging is None:
        _require_no_averaging(training, users)
    if training is not None and not training.is_under_strategy:
        follow_ranks(model)
    if training is None and (check := _averaging_check(model, users)):
        return _fit_with([check], [*users, check], original, model, call)
    if training is None or not (training.process_set.has_others() or timer):
        return original(*call.args, **call.kwargs)
    _trained_together.add(model)
    if training.shards_state and any(is_of_keras(callback, "SwapEMAWeights") for callback in users):
        raise InvalidRequestError("SwapEMAWeights does not work with a sharded optimizer, which on each rank has "
                                  "moving averages of a part of the weights only. Use hvd.DistributedOptimizer, "
                                  'or MPIStrategy(variables="mirrored").')
    own: list[Callback] = []
    if training.process_set.has_others():
        if averaging is not None:  # The averaging comes before all callbacks that compare, read or save weights.
            own, users = [averaging], [callback for callback in users if callback is not averaging]
        wrapped = written_once(users, training)
        own += own_callbacks(training, users, wrapped, call.arguments)
        users = wrapped
    if timer is not None:
        own, timer.is_in_fit = [*own, TimedSteps(timer, training.is_under_strategy)], True
    before = in_fit.get(model)
    try:
        in_fit[model] = training
        return _fit_with(own, [*own, *users], original, model, call)
    finally:
        if before is None:
            del in_fit[model]
        else:
            in_fit[model] = before
        if timer is not None:
            timer.is_in_fit = False


def _fit_with(new: list[Callback], callbacks: list[Callback], original: Function, model: keras.Model,
              call: inspect.BoundArguments) -> Any:
    """Call Keras' fit with `callbacks` in place of those of the call. `new`: Those that Keras has not seen yet."""
    given: Any = call.arguments.get("callbacks")
    is_list = is_of_keras(given, "CallbackList")
    listed = given.callbacks if is_list else None
    try:
        if is_list:
            for callback in new:
                callback.set_params(given.params)
                callback.set_model(model)
            given.callbacks = callbacks
            given._should_call_train_batch_hooks = True  # Keras 2 sets it when the list is made.
        else:
            call.arguments["callbacks"] = callbacks
        return original(*call.args, **call.kwargs)
    finally:
        call.arguments["callbacks"] = given
        if is_list:
            given.callbacks = listed


def _averaging_check(model: keras.Model, callbacks: list[Callback]) -> AveragingCheck | None:
    """Return a check that the ranks do not train alone, if they seem to train together a model without a Training."""
    if model in in_fit or is_under_strategy(model) or not runtime.is_initialized():
        return None
    own = next((callback for callback in callbacks if package_of(type(callback)) == "mpistrat"), None)
    process_set = getattr(own, "process_set", global_process_set)
    if own is not None:
        sign = f"fit has a {type(own).__name__}"
    elif model in _checked:  # A script that averages weights itself after each fit is told once.
        return None
    elif model in _trained_together:
        sign = "an earlier fit of the model averaged gradients"
    elif any(map(was_broadcast, weights_of(model))):
        sign = "the script has broadcast the model's weights (unless the script averages them itself after fit)"
    elif take_divided(process_set):  # Once, since a script may train many models.
        sign = "the script has divided data by hvd.shard() (unless each rank is to train its own model)"
    else:
        return None
    _checked.add(model)
    has_users_own = any(is_users(callback) or is_of_keras(callback, "LambdaCallback") for callback in callbacks)
    return AveragingCheck(sign, process_set, has_users_own) if process_set.has_others() else None


def _require_no_averaging(training: Training | None, callbacks: Sequence[Callback]) -> None:
    """Raise MismatchError if other ranks pass LocalSGD or DiLoCo to fit, and this rank does not. Collective.

    Does nothing if fit has no BroadcastGlobalVariablesCallback over all ranks: this rank may then be alone in fit.
    """
    is_for_all = any(isinstance(callback, BroadcastGlobalVariablesCallback)
                     and callback.process_set.process_set_id == 0 for callback in callbacks)
    has_met = training is not None and (training.is_under_strategy or training.process_set.process_set_id == 0)
    if is_for_all and not has_met and global_process_set.has_others():
        begins, _ = array_ops.exchange(Begin(None, None, 0, (), (), True), (0, 0, 0), f"{eager(LOCAL_SGD)}/fit",
                                       global_process_set)
        if problem := problem_at_begin(begins):
            raise MismatchError(f"fit: {problem}")


def trains_apart(callbacks: Sequence[Callback]) -> PeriodicAveraging | None:
    """Return the LocalSGD or DiLoCo among the callbacks, or None. Raises InvalidRequestError if there are several."""
    found = [callback for callback in callbacks if isinstance(callback, PeriodicAveraging)]
    if len(found) > 1:
        raise InvalidRequestError(f"fit has {' and '.join(type(each).__name__ for each in found)} among its callbacks. "
                                  "Each averages the weights in its own way. Keep one of them.")
    return found[0] if found else None


def users_callbacks(callbacks: Any) -> list[Callback]:
    """Return the `callbacks` argument of fit as a list. It may be a callback, a nested structure or a CallbackList."""
    if is_of_keras(callbacks, "CallbackList"):
        return list(callbacks.callbacks)
    return list(tf.nest.flatten(callbacks)) if callbacks else []


def own_callbacks(training: Training, callbacks: list[Callback], wrapped: list[Callback],
                  arguments: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks that fit adds. `wrapped` replaces the user's `callbacks`. `arguments`: Those of fit."""
    own: list[Callback] = []
    inputs = [arguments.get("x"), arguments.get("y")]
    if training.joins and isinstance(training, DistributedTraining | LocalTraining):
        own.append(JoinEpochs(training))
    settings = runtime.current().settings
    is_checked = settings.is_checked
    has_own_state = training.averages_statistics or training.shards_state
    statistics = AverageStatistics(training, callbacks) if has_own_state else None
    has_own_rows = is_checked and not training.is_under_strategy
    if has_own_rows and training.process_set.rank() == 0 and any(map(is_sharded_in_own_order, tf.nest.flatten(inputs))):
        logger.warning("mpistrat: fit got a dataset that each rank shuffles in a different order before it takes "
                       "its shard, so some rows are read by several ranks, and some by none. %s", OWN_ORDER)
    averages = AverageMetrics(f"{training.name}/metrics", training.process_set)
    checks = FitChecks(training, callbacks, wrapped, digest_of_rows(inputs) if has_own_rows else 0, statistics,
                       averages, layers_of_inputs(inputs) if has_own_rows else [],
                       int(arguments.get("batch_size") or 32), int(arguments.get("initial_epoch") or 0))
    own += [checks, averages]
    if is_checked and settings.check_every and not training.joins:  # A rank that has joined makes no steps.
        own.append(ChecksWithinEpochs(checks.require_equal_weights, settings.check_every, training))
    if statistics is not None:
        own.append(statistics)
    if is_checked or training.is_under_strategy:  # After the check that all ranks end fit together.
        own.append(FitThroughput(f"{training.name}/throughput", training.process_set, lambda: checks.is_silent))
    return own


class TimedSteps(Callback):
    """Counts the steps and rows of fit for `mpistrat run --efficiency`. Ends the script after the last timed step.

    Local. With this option fit adds the callback for any number of ranks, also for one rank. See process/step_timer.py.
    """

    def __init__(self, timer: StepTimer, is_global: bool):
        super().__init__()
        self._timer, self._is_global = timer, is_global

    def on_train_begin(self, logs: Logs = None) -> None:
        self._rows = row_count_of(self.model, "train_step")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._steps = 0  # of this epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        ended, self._steps = batch + 1 - self._steps, batch + 1
        self._timer.end_step(ended, self._rows.sum() or None, self._is_global, waits_between)
        self._timer.end_script()


class JoinEpochs(Callback):
    """Calls join() after this rank's last batch of each epoch. Collective. fit adds it if uneven="join".

    Until all ranks have joined, the ranks that still have batches average their gradients. A rank with the most batches
    has made all updates. So it broadcasts its trainable weights and optimizer state, except local variables, before the
    validation of the epoch, and before callbacks read or save the model. This rank need not be the last to join: if
    gradients are accumulated, some batches do not communicate.
    """

    def __init__(self, training: DistributedTraining | LocalTraining):
        super().__init__()
        self._training = training
        self._has_joined = True

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._has_joined = False

    def on_test_begin(self, logs: Logs = None) -> None:
        self._join()  # Keras validates before the epoch ends for callbacks.

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._join()

    def _join(self) -> None:
        if self._has_joined:
            return
        self._has_joined = True
        process_set = self._training.process_set
        array_ops.join(process_set)
        calls = array_ops.allgather([self._training.calls], f"{self._training.name}/calls", process_set)
        variables = [*self.model.trainable_variables, *self._training.variables]
        ranks = process_set.ranks
        assert ranks is not None  # The set is registered, since it has joined.
        most = ranks[int(np.argmax(calls))]  # The first of ranks with as many batches; the root is a rank of the job.
        broadcast_(self._training.shared(variables), most, f"{self._training.name}/joined", process_set)


def digest_of_rows(inputs: object) -> int:
    """Return a hash of shapes and evenly spaced rows of `inputs`; 0 unless all are non-empty arrays of numbers.

    `inputs` are the arguments x and y of fit: arrays or tensors, in any structure. None is skipped.
    """
    digest = hashlib.blake2b(digest_size=7)
    arrays = [each for each in tf.nest.flatten(inputs) if each is not None]
    for array in arrays:
        if not isinstance(array, np.ndarray | tf.Tensor) or not array.ndim or not len(array):
            return 0
        rows = some_rows(array)
        if rows.dtype.hasobject:
            return 0
        digest.update(f"{tuple(array.shape)} {rows.dtype}".encode())
        # As bytes, since hashlib does not take bfloat16.
        digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") if arrays else 0
