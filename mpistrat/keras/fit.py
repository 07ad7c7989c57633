"""Makes fit add mpistrat's own callbacks, if the model's optimizer is distributed and there are several ranks.

Model.fit is wrapped, by public names of Keras only. CallbackList is left alone: users call its methods in loops of
their own, maybe on one rank. So are evaluate and predict, which may run on one rank.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import Callback, CallbackList
from keras.optimizers import Optimizer

from ..api import runtime
from ..tensorflow.gradients import GradientReducer
from .fit_checks import FitChecks
from .running_statistics import AverageStatistics
from .uneven import JoinEpochs

logger = logging.getLogger(__name__)


def wrap_fit(distributed_in: Callable[[Optimizer | None], Any]) -> None:
    """Make fit of all models add the callbacks of `own_callbacks`. Further calls do nothing.

    Args:
        distributed_in: Returns the optimizer itself, or the one inside of it, that is distributed, if any.
    """
    original = keras.Model.fit
    if getattr(original, "_mpistrat", False):
        return
    signature = inspect.signature(original)
    if "callbacks" not in signature.parameters:
        logger.warning("Model.fit of Keras %s has no argument callbacks: fit does not check that the ranks train "
                       "alike, and does not average running statistics.", keras.__version__)
        return

    @functools.wraps(original)
    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        optimizer = distributed_in(getattr(self, "optimizer", None))
        if optimizer is None or not optimizer._mpistrat_reducer.process_set.has_others():
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        with _extended(call.arguments.get("callbacks"), self, optimizer) as callbacks:
            call.arguments["callbacks"] = callbacks
            return original(*call.args, **call.kwargs)

    fit._mpistrat = True  # type: ignore[attr-defined]
    keras.Model.fit = fit


def own_callbacks(optimizer: Optimizer, callbacks: list[Callback]) -> list[Callback]:
    """The callbacks that fit adds before those of the user."""
    reducer: GradientReducer = optimizer._mpistrat_reducer
    averages = optimizer._mpistrat_averages_statistics
    own: list[Callback] = [JoinEpochs(reducer)] if optimizer._mpistrat_joins else []
    if reducer.checks is not None and not runtime.current().settings.consistency_check_disable:
        own.append(FitChecks(reducer.name, callbacks, averages, optimizer._mpistrat_joins, reducer.checks,
                             reducer.process_set))
    if averages:
        own.append(AverageStatistics(reducer.name, reducer))
    return own


@contextmanager
def _extended(callbacks: Any, model: keras.Model, optimizer: Optimizer) -> Iterator[Any]:
    """A context with the callbacks that fit gets instead of the user's: one, a nested structure or a CallbackList."""
    if not isinstance(callbacks, CallbackList):
        flat = tf.nest.flatten(callbacks) if callbacks else []
        yield [*own_callbacks(optimizer, flat), *flat]
        return
    users = list(callbacks.callbacks)
    own = own_callbacks(optimizer, users)
    for callback in own:
        callback.set_params(callbacks.params)
        callback.set_model(model)
    callbacks.callbacks = [*own, *users]
    try:
        yield callbacks
    finally:
        callbacks.callbacks = users
