"""A warning for models that each rank trains alone, although the script means them to be trained together.

BroadcastGlobalVariablesCallback calls it, in the thread of fit; local.
"""

import logging
from collections.abc import Callable

import keras

from ..api import runtime
from ..api.process_sets import ProcessSet
from ..tensorflow.kerases import KERASES, package_of
from .fit.training import training_of
from .nested_optimizers import parts_of

logger = logging.getLogger(__name__)


class Alone:
    """Watches one fit with a callback that communicates among the ranks of a process set."""

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self._why = ""
        self._executed: int | None = None

    def begin(self, model: keras.Model) -> None:
        """Warn if the step and the optimizer are Keras' own, which average nothing. Otherwise the first epoch tells."""
        self._why, self._executed = "", None
        if not self._process_set.has_others() or training_of(model) is not None:
            return
        optimizer = model.optimizer
        is_known = type(model).train_step.__module__.partition(".")[0] in KERASES and optimizer is not None \
            and all(package_of(type(part)) in KERASES for part in parts_of(optimizer))
        if is_known:
            name = type(optimizer).__name__
            self._warn(f"the optimizer of compile() is {name}, which does not average gradients. Write "
                       f"model.compile(hvd.DistributedOptimizer(keras.optimizers.{name}(...)), ...), also after "
                       "another compile(); hvd.load_model(path) in place of keras.models.load_model(path) does it too.")
        else:
            self._executed = _executed()

    def uncounted(self, communicate: Callable[[], None]) -> None:
        """Call a function whose operations do not average gradients."""
        before = _executed()
        communicate()
        if self._executed is not None:
            self._executed += _executed() - before

    def end_epoch(self) -> None:
        """Warn if the steps so far have communicated nothing."""
        if self._executed is not None and self._executed == _executed():
            self._warn("no step has communicated. Give compile() an hvd.DistributedOptimizer, or wrap the tape of a "
                       "train_step in hvd.DistributedGradientTape.")
        self._executed = None

    def end(self) -> None:
        """Say it again where the output ends."""
        if self._why:
            self._warn(self._why)

    def _warn(self, why: str) -> None:
        self._why = why
        if self._process_set.rank() == 0:
            logger.warning("mpistrat: EACH RANK TRAINS A MODEL OF ITS OWN, although fit has a "
                           "BroadcastGlobalVariablesCallback: %s The weights of the ranks drift apart.", why)


def _executed() -> int:
    """How many operations this rank has executed, in all its process sets."""
    return sum(group.executed for group in runtime.current().registry.groups.values())
