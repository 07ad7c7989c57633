"""DistributedOptimizer and XLA: if XLA cannot compile collectives here, compile(jit_compile="auto") means False.

Keras decides in Model.compile whether to use XLA. load_model calls `switch_off` for a model that is compiled
already.
"""

import functools
import logging

import keras

from ..api import runtime
from ..tensorflow.xla.context import why_not
from .bridge.keras2_arguments import bound
from .bridge.nested_optimizers import distributed_in
from .bridge.patches import Function, replaces
from .bridge.private_names import BaseTrainer
from .bridge.training import is_under_strategy

logger = logging.getLogger(__name__)


# Keras compares the `compile` of a model's class with that of Keras' base class, so the base class' is replaced.
@replaces(BaseTrainer, "compile", "XLA cannot compile collectives, and under a strategy optimizer and "
          "metrics would not be those of its scope", "self._resolve_auto_jit_compile()")
def compile(original: Function, self: keras.Model, *args: object, **kwargs: object) -> None:
    """Take jit_compile="auto" as False for a distributed optimizer, if XLA cannot compile collectives here.

    By default Keras compiles the training step on a machine with a GPU. An explicit True is not changed; then the
    collective raises an error that says what to write. Under a strategy, compile runs in the strategy's scope.
    """
    if is_under_strategy(self):
        with self.distribute_strategy.scope():
            return original(self, *args, **kwargs)
    given = bound(original, self, *args, **kwargs)
    given.apply_defaults()
    if given.arguments["jit_compile"] == "auto" and distributed_in(given.arguments["optimizer"]) and why_not():
        given.arguments["jit_compile"] = False
        _log_once(why_not())
    return original(*given.args, **given.kwargs)


def switch_off(model: keras.Model) -> None:
    """Turn XLA off for a compiled model that has got a distributed optimizer, if XLA cannot compile collectives."""
    if model.jit_compile and (reason := why_not()):
        _log_once(reason)
        model.jit_compile = False


def follow_ranks(model: keras.Model) -> None:
    """Make Keras trace the compiled step of a model again if the number of ranks has changed since the last fit.

    Sparse gradients are gathered, and the shape of a gather's result depends on the number of ranks.
    """
    if not model.jit_compile or not runtime.is_initialized():
        return
    ranks = runtime.current().topology.size
    if getattr(model, "_mpistrat_ranks", ranks) != ranks:
        model.train_function = None
    model._mpistrat_ranks = ranks


@functools.cache
def _log_once(reason: str) -> None:
    rank = runtime.current().topology.rank if runtime.is_initialized() else 0
    logger.log(logging.DEBUG if rank else logging.INFO, "rank %d: models with a DistributedOptimizer are trained "
               "without XLA (jit_compile=False), which cannot compile collectives: %s", rank, reason)
