"""FitOptimizers: the distributed optimizers that a model trains with in fit.

Called by what mpistrat adds to fit, in the thread of fit; local.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.optimizers import Optimizer

from ..tensorflow.first_steps import FirstSteps
from ..tensorflow.gradients import GradientReducer
from ..tensorflow.types import Variable


class FitOptimizers:
    """Distributed optimizers of one process set.

    Args:
        optimizers: At least one. The first, which is the same on all ranks, gives the name and the process set. Those
            of other process sets are left out.

    Attributes:
        name: Begins the names of collectives.
        process_set: The ranks that take part.
        reducers: One for each optimizer.
        averages_statistics: Whether fit averages the running statistics.
        joins: Whether ranks with fewer steps join at the end of each epoch.
        accumulates: Whether gradients are accumulated.
    """

    def __init__(self, optimizers: Sequence[Optimizer]):
        first: GradientReducer = optimizers[0]._mpistrat_reducer
        self.name, self.process_set = first.name, first.process_set
        number = self.process_set.process_set_id
        self._optimizers = [o for o in optimizers if o._mpistrat_reducer.process_set.process_set_id == number]
        self.reducers: list[GradientReducer] = [o._mpistrat_reducer for o in self._optimizers]
        self.averages_statistics = all(o._mpistrat_averages_statistics for o in self._optimizers)
        self.joins = any(o._mpistrat_joins for o in self._optimizers)
        self.accumulates = any(o.gradient_accumulation_steps for o in self._optimizers)

    @property
    def first_steps(self) -> list[FirstSteps]:
        """What checks the first reductions."""
        return [reducer.checks for reducer in self.reducers if reducer.checks is not None]

    @property
    def leaves_weights_uncompared(self) -> bool:
        """Whether first reductions are to come that cannot compare the weights, as with weight decay."""
        return any(reducer.changes_early and reducer.checks is not None and not reducer.checks.is_done
                   for reducer in self.reducers)

    @property
    def variables(self) -> list[keras.Variable]:
        """The state of the optimizers."""
        return [variable for optimizer in self._optimizers for variable in optimizer.variables]

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        """Those of the variables that are not local to each rank."""
        return [v for v in variables if not any(reducer.is_local(v) for reducer in self.reducers)]


def fit_optimizers_of(model: keras.Model, distributed_in: Callable[[Optimizer | None], Any]) -> FitOptimizers | None:
    """The distributed optimizers of a model, if it has any: that of `compile`, then those in its attributes.

    A model with several optimizers has them in public attributes, or in lists, tuples or dicts of these.

    Args:
        model: The model.
        distributed_in: Returns the optimizer itself, or the one inside of it, that is distributed, if any.
    """
    compiled = distributed_in(getattr(model, "optimizer", None))
    candidates = (o for name, value in vars(model).items() if not name.startswith("_") for o in _optimizers_in(value))
    found = {id(o): o for o in map(distributed_in, candidates) if o is not None and o is not compiled}
    # By the wire name, because the order of attributes may differ among the ranks.
    others = sorted(found.values(), key=lambda o: (len(o._mpistrat_reducer.name), o._mpistrat_reducer.name))
    optimizers = others if compiled is None else [compiled, *others]
    return FitOptimizers(optimizers) if optimizers else None


def _optimizers_in(value: object) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _optimizers_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _optimizers_in(each)
