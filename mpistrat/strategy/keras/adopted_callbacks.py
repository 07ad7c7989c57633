"""The callbacks of Keras' evaluate under MPIStrategy. mpistrat/keras/fit has the callbacks of fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.callbacks import CallbackList

from ...api import array_ops
from ...keras.bridge.patches import Function, bound
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.training import StrategyTraining, step_values_of
from ...keras.fit.fit_callbacks import users_callbacks
from ...keras.fit.fit_checks import reads_logs
from ...keras.fit.written_once import assign_roles, entry_of, written_once
from .step_state import strategy_of
from .trainer import Trainer, average


@replaces(Trainer, "evaluate", "the ranks would evaluate models with different running statistics",
          "self.make_test_function()")
def evaluate(original: Function, self: keras.Model, *args: object, **kwargs: object) -> object:
    strategy = strategy_of(self)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return original(self, *args, **kwargs)
    training = average(self)
    call = bound(original, self, *args, **kwargs)
    given = call.arguments.get("callbacks")
    if isinstance(given, CallbackList):  # fit validates, and has looked at its callbacks.
        return original(*call.args, **call.kwargs)
    with _evaluating(training, users_callbacks(given)) as callbacks:
        call.arguments["callbacks"] = callbacks
        return original(*call.args, **call.kwargs)


@contextmanager
def _evaluating(training: StrategyTraining, callbacks: list[Any]) -> Iterator[list[Any]]:
    """A context with the callbacks of an evaluation on this rank. Collective.

    The ranks may have different callbacks. If no callback reads the logs of a step, they are not reduced.
    """
    own = tuple(entry_of(callback, training) for callback in callbacks), any(map(reads_logs, callbacks))
    of_ranks = array_ops.allgather_object(own, f"{training.name}/evaluate")
    wrapped = written_once(callbacks, training)
    assign_roles(wrapped, [entries for entries, _ in of_ranks], training)
    values = step_values_of(training.model)
    before, values.reads_logs = values.reads_logs, any(reads for _, reads in of_ranks)
    try:
        yield wrapped
    finally:
        values.reads_logs = before
