"""variables="central": what the chief alone keeps, and how the others get the values that it computes.

Every rank has a working copy of the model's variables, for it computes with them. What an optimizer remembers of them
(its slots: momenta, averages) is on the chief only, and so the chief alone can update. It hands out the new values in
one exchange.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ...api import runtime
from ..gradients import label_of
from . import collectives
from .variables import CLASSES, RankMirroredVariable, create, create_alone


class RemoteSlotVariable(RankMirroredVariable):
    """A variable that only the chief has, as another rank has it: without elements. What is assigned to it is lost."""

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        return self


_MARK = "_mpistrat_is_central"
_ELSEWHERE = {tf.VariableSynchronization.ON_WRITE: RemoteSlotVariable}


def is_central(variable: Any) -> bool:
    """Whether the chief alone has the contents of a variable; the same on all ranks."""
    return _MARK in vars(variable)  # To ask for an attribute that is missing may be a collective; see checkpoints.


class Slots:
    """The optimizer's variables of a strategy whose variables are central.

    Args:
        strategy: Whose they are.
        central: Whether the chief alone keeps them; with one rank it does in any case.
    """

    def __init__(self, strategy: tf.distribute.Strategy, central: bool):
        topology = runtime.current().topology
        self._strategy = strategy
        self.are_central = central and topology.size > 1
        self.are_here = not self.are_central or topology.rank == 0
        self._begun = False

    @contextmanager
    def created(self) -> Iterator[None]:
        """Variables that are created within are slots."""
        before, self._begun = self._begun, self.are_central
        try:
            yield
        finally:
            self._begun = before

    def create(self, device: str, next_creator: Any, **kwargs: Any) -> Any:
        """Create a variable, which may be a slot. Collective, unless it is one."""
        if not self._begun:
            return create(self._strategy, device, next_creator, **kwargs)
        if not self.are_here:
            dtype = kwargs["dtype"]
            kwargs["initial_value"] = lambda: tf.zeros([0], dtype)
        slot = create_alone(self._strategy, device, next_creator, CLASSES if self.are_here else _ELSEWHERE, **kwargs)
        setattr(slot, _MARK, True)
        return slot

    def share(self, variables: Sequence[Any]) -> None:
        """Give all ranks the chief's values of variables, in one exchange. Collective; nothing where none are central.

        Args:
            variables: Of the strategy, or Keras' variables of it; on all ranks the same.

        Raises:
            ValueError: One was not created in the strategy's scope.
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
