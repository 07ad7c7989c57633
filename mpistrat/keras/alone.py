"""A warning if each rank trains a model alone, although the script means the ranks to train one model together.

BroadcastGlobalVariablesCallback calls this module in the thread of fit. Local.
"""

import logging
from collections.abc import Callable

import keras

from ..api import runtime
from ..api.process_sets import ProcessSet
from ..tensorflow.kerases import KERASES, package_of
from .bridge.nested_optimizers import parts_of
from .bridge.training import in_fit, training_of

logger = logging.getLogger(__name__)

_uncounted = 0


class Alone:
    """Watches one fit with a callback that communicates among the ranks of a process set."""

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self._why = ""
        self._executed: int | None = None

    def begin(self, model: keras.Model, may_average: bool) -> None:
        """Warn now if the train step and the optimizer are Keras' own, which average nothing.

        Otherwise, and if a callback may average weights by hand, `end_epoch` decides after the first epoch.
        """
        self._why, self._advice, self._executed = "", "", None
        if not self._process_set.has_others() or training_of(model) is not None or model in in_fit:
            return
        optimizer = model.optimizer
        is_known = type(model).train_step.__module__.partition(".")[0] in KERASES and optimizer is not None \
            and all(package_of(type(part)) in KERASES for part in parts_of(optimizer))
        if is_known:
            name = type(optimizer).__name__
            self._advice = (
                f"the optimizer of compile() is {name}, which does not average gradients. Write "
                f"model.compile(hvd.DistributedOptimizer(keras.optimizers.{name}(...)), ...) wherever the script "
                "compiles, or use hvd.load_model(path) in place of keras.models.load_model(path).")
            if not may_average:
                self._warn(self._advice)
                return
        self._executed = _executed()

    def end_epoch(self) -> None:
        """Warn if no operation has averaged in the first epoch, including the callbacks at the epoch's end."""
        if self._executed is not None and self._executed == _executed():
            self._warn(self._advice or "no step has communicated. Give compile() an hvd.DistributedOptimizer, or wrap "
                       "the tape of a train_step in hvd.DistributedGradientTape.")
        self._executed = None

    def end(self) -> None:
        """Repeat the warning at the end of the output."""
        before = self._why
        self.end_epoch()
        if before:
            self._warn(before)

    def _warn(self, why: str) -> None:
        self._why = why
        if self._process_set.rank() == 0:
            logger.warning("mpistrat: EACH RANK TRAINS A MODEL OF ITS OWN, although fit has a "
                           "BroadcastGlobalVariablesCallback: %s The weights of the ranks drift apart.", why)


def uncounted(communicate: Callable[[], None]) -> None:
    """Call a function whose operations average neither gradients nor weights."""
    global _uncounted
    before = _executed()
    communicate()
    _uncounted += _executed() - before


def _executed() -> int:
    """Return the number of operations that this rank has executed and that may average, in all its process sets."""
    return sum(group.executed for group in runtime.current().registry.groups.values()) - _uncounted
