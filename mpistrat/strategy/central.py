"""variables="central": the optimizer's slots are on the chief only, which broadcasts the values that it computes.

Every rank has a working copy of the model's variables. An optimizer's slots (momenta, averages) are on the chief, so
only the chief can apply an update. It broadcasts the new values in one collective.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..api import runtime
from ..tensorflow.gradients import label_of
from . import collectives
from .variables import CLASSES, RankMirroredVariable, create, create_alone


class RemoteSlotVariable(RankMirroredVariable):
    """A slot on a rank other than the chief: it has no elements, and ignores what is assigned to it."""

    def _update(self, update_fn: Callable, value: object, **kwargs: object) -> "RemoteSlotVariable":
        return self


_MARK = "_mpistrat_is_slot"
_ELSEWHERE = {tf.VariableSynchronization.ON_WRITE: RemoteSlotVariable}


def is_everywhere(variable: tf.Variable) -> bool:
    """Whether all ranks have the contents of a variable, and not only the chief or its owner; the same on all ranks."""
    return _MARK not in vars(variable)  # Not by hasattr, which may run a collective; see checkpoints.


class Slots:
    """The optimizers' variables of one strategy. `variables` is as for MPIStrategy."""

    def __init__(self, strategy: tf.distribute.Strategy, variables: str):
        topology = runtime.current().topology
        self._strategy = strategy
        # With one rank neither is so.
        self.are_central = variables == "central" and topology.size > 1  # Whether the chief alone has them.
        self.are_sharded = variables == "sharded" and topology.size > 1  # Whether each rank has its part of them.
        self.are_here = not self.are_central or topology.rank == 0  # Whether this rank has them.
        self._creates_slots = False
        if self.are_central:
            runtime.current().losses.irreplaceable[0] = ('Only it had the optimizers\' slots: MPIStrategy(variables='
                                                         '"central").')
        if self.are_sharded:
            runtime.current().losses.irreplaceable.update(dict.fromkeys(range(topology.size), (
                'Only it had its part of the optimizers\' slots: MPIStrategy(variables="sharded").')))

    @contextmanager
    def created(self) -> Iterator[None]:
        """A context in which new variables are slots."""
        before, self._creates_slots = self._creates_slots, self.are_central or self.are_sharded
        try:
            yield
        finally:
            self._creates_slots = before

    def create(self, device: str, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        """Create a variable, which may be a slot. Collective, unless it is one."""
        if not self._creates_slots:
            return create(self._strategy, device, next_creator, **kwargs)
        if not self.are_here:
            dtype = kwargs["dtype"]
            kwargs["initial_value"] = lambda: tf.zeros([0], dtype)
        slot = create_alone(self._strategy, device, next_creator, CLASSES if self.are_here else _ELSEWHERE, **kwargs)
        setattr(slot, _MARK, True)
        return slot

    def share(self, variables: Sequence[tf.Variable]) -> None:
        """Broadcast the chief's values of variables, in one collective. Collective; does nothing if none are central.

        The variables are the strategy's, or Keras variables that have one, the same on all ranks. Raises ValueError for
        others.
        """
        if not self.are_central or not variables:
            return
        components = [self._strategy.extended.component(v if isinstance(v, tf.Variable) else v.value)
                      for v in variables]
        values = collectives.broadcast_list_from_first([component.read_value() for component in components], "central",
                                                       [label_of(v) for v in variables])
        if not self.are_here:
            for component, value in zip(components, values, strict=True):
                component.assign(value)
