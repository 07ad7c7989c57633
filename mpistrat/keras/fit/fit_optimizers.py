"""FitOptimizers: the distributed optimizers that a model trains with in fit.

Called by what mpistrat adds to fit, in the thread of fit; local.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras.optimizers import Optimizer

from ...api.process_sets import ProcessSet
from ...tensorflow.consistency import FirstSteps
from ...tensorflow.gradients import GradientReducer
from ...tensorflow.identity_set import IdentitySet
from ...tensorflow.names import eager
from ...tensorflow.types import Variable
from .._private import trained_by
from ..nested_optimizers import distributed_in, optimizers_in, parts_of


class FitOptimizers:
    """Distributed optimizers of one process set.

    Args:
        optimizers: At least one. The first, which is the same on all ranks, gives the name and the process set. Those
            of other process sets are left out: fit neither checks them nor averages statistics for them.
        wholes: The optimizers of the model that these are, or are in.

    Attributes:
        name: Begins the names of collectives.
        process_set: The ranks that take part.
        reducers: One for each optimizer.
        averages_statistics: Whether fit averages the running statistics.
        joins: Whether ranks with fewer steps join at the end of each epoch.
        accumulates: Whether gradients are accumulated.
    """

    def __init__(self, optimizers: Sequence[Optimizer], wholes: Sequence[Optimizer]):
        first: GradientReducer = optimizers[0]._mpistrat.reducer
        self.name, self.process_set = first.name, first.process_set
        number = self.process_set.process_set_id
        self._optimizers = [o for o in optimizers if o._mpistrat.reducer.process_set.process_set_id == number]
        self._elsewhere = [o for o in optimizers if o not in IdentitySet(self._optimizers)]
        self._wholes = wholes
        self.reducers: list[GradientReducer] = [o._mpistrat.reducer for o in self._optimizers]
        self.averages_statistics = all(o._mpistrat.arguments.average_statistics for o in self._optimizers)
        self.joins = any(o._mpistrat.arguments.uneven == "join" for o in self._optimizers)
        self.accumulates = any(o.gradient_accumulation_steps for o in self._optimizers)

    @property
    def first_steps(self) -> list[FirstSteps]:
        return [reducer.checks for reducer in self.reducers if reducer.checks is not None]

    @property
    def leaves_weights_uncompared(self) -> bool:
        """Whether first reductions are to come that cannot compare the weights, as with weight decay."""
        return any(reducer.changes_early and reducer.checks_weights and reducer.checks is not None
                   and not reducer.checks.is_done for reducer in self.reducers)

    @property
    def parts(self) -> list[Optimizer]:
        """The optimizers, those in them and those around them, in the same order on all ranks."""
        return list(IdentitySet(part for optimizer in self._optimizers for whole in self._wholes
                                if optimizer in IdentitySet(parts_of(whole)) for part in parts_of(whole)))

    @property
    def calls(self) -> int:
        """How often this rank has called `apply`. The public `iterations` is less, if gradients are accumulated."""
        return sum(int(optimizer._iterations) for optimizer in self._optimizers)

    @property
    def variables(self) -> list[keras.Variable]:
        return [variable for optimizer in self._optimizers for variable in optimizer.variables]

    @property
    def accumulators(self) -> list[keras.Variable]:
        return accumulators_in(self._optimizers)

    def shared(self, variables: Sequence[Variable]) -> list[Variable]:
        """Those of the variables that are neither local to each rank nor trained in another process set.

        An optimizer's state of a local variable is local.
        """
        local = IdentitySet(slot for optimizer, reducer in zip(self._optimizers, self.reducers, strict=True)
                            for slot in _local_slots(optimizer, reducer))
        elsewhere = IdentitySet(v for optimizer in self._elsewhere for part in parts_of(optimizer)
                                for v in trained_by(part))
        return [v for v in variables if v not in local and v not in elsewhere
                and not any(reducer.is_local(v) for reducer in self.reducers)]


def fit_optimizers_of(model: keras.Model) -> FitOptimizers | None:
    """The distributed optimizers of a model, if it has any: those of `compile`, then those in its attributes."""
    wholes = optimizers_of(model)
    found = _by_place(distributed_in(getattr(model, "optimizer", None))) \
        | _by_place(distributed for optimizer in wholes for distributed in distributed_in(optimizer))
    return FitOptimizers(list(found.values()), wholes) if found else None


def name_in_fit(model: keras.Model, operation: str, process_set: ProcessSet) -> str:
    """The name of a callback's collective: that of the optimizers of fit, if their ranks take part, else the thread's.

    Raises:
        InvalidRequestError: As names.eager.
    """
    optimizers, number = fit_optimizers_of(model), process_set.process_set_id
    if optimizers is not None and optimizers.process_set.process_set_id == number:
        return f"{optimizers.name}/{operation}"
    return eager(operation, number or 0)


def is_under_strategy(model: keras.Model) -> bool:
    """Whether a model is one of an MPIStrategy, which has the ranks train it together."""
    return getattr(model.distribute_strategy, "is_mpi_strategy", False)


def optimizers_of(model: keras.Model) -> list[Optimizer]:
    """The optimizer of `compile`, then those in public attributes of a model, or in lists, tuples or dicts of these."""
    public = [value for name, value in vars(model).items() if not name.startswith("_")]
    return list(IdentitySet(optimizers_in([getattr(model, "optimizer", None), *public])))


def accumulators_in(optimizers: Iterable[Optimizer]) -> list[keras.Variable]:
    return [variable for optimizer in optimizers if optimizer.built and optimizer.gradient_accumulation_steps
            for variable in optimizer._accumulated_gradients]


def compared_in(optimizers: Iterable[Optimizer]) -> list[keras.Variable]:
    """The state of optimizers that is the same on all ranks in a right program, but for that of local variables.

    Sums of gradients are of each rank's rows. The counter of steps counts one more on a rank that finds the end of its
    data by an error: it does not depend on the data, and TensorFlow runs it before the step fails.
    """
    optimizers = list(optimizers)
    own = IdentitySet([*accumulators_in(optimizers), *(optimizer._iterations for optimizer in optimizers)])
    return [variable for optimizer in optimizers for variable in optimizer.variables if variable not in own]


def _local_slots(optimizer: Optimizer, reducer: GradientReducer) -> list[keras.Variable]:
    """The variables of an optimizer that belong to local variables of its reducer.

    Their names begin with the path of the variable that is trained.
    """
    if not reducer.has_local:
        return []
    prefixes = {f"{v.path.replace('/', '_')}_": reducer.is_local(v)
                for part in parts_of(optimizer) for v in trained_by(part)}
    slots = []
    for slot in optimizer.variables:
        fitting = [prefix for prefix in prefixes if slot.name.replace("/", "_").startswith(prefix)]
        if fitting and prefixes[max(fitting, key=len)]:
            slots.append(slot)
    return slots


def _by_place(optimizers: Iterable[Any]) -> dict[int, Any]:
    """Distributed optimizers in the order in which they were made: that of attributes may differ among the ranks."""
    found = {o._mpistrat.reducer.optimizer.place: o for o in optimizers}
    return dict(sorted(found.items()))
