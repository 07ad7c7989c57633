"""The placement of a strategy's optimizer slots on the ranks, for variables="sharded" and "central"."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..api import runtime
from .variables import create, create_alone

_MARK = "_mpistrat_is_slot"


def is_everywhere(variable: tf.Variable) -> bool:
    """Return whether all ranks, not only the owner, have a variable's value. The same answer on all ranks."""
    return _MARK not in vars(variable)  # Not by hasattr, which may run a collective; see checkpoints.


class Slots:
    """The optimizer slots of one strategy. `variables` is as for MPIStrategy."""

    def __init__(self, strategy: tf.distribute.Strategy, variables: str):
        topology = runtime.current().topology
        self._strategy, self._creates_slots = strategy, False
        self.option = f'MPIStrategy(variables="{variables}")'  # What the user has written
        # Whether the slots are divided among the ranks. With one rank they are not.
        self.are_sharded = variables != "mirrored" and topology.size > 1
        self.owner = 0 if variables == "central" else None  # The rank that has all slots
        if self.are_sharded:
            owners, what = (range(topology.size), "its part of the") if self.owner is None else ([self.owner], "the")
            runtime.current().losses.irreplaceable.update(
                dict.fromkeys(owners, f"Only it had {what} optimizers' slots: {self.option}."))

    @contextmanager
    def created(self) -> Iterator[None]:
        """A context in which new variables are slots."""
        before, self._creates_slots = self._creates_slots, self.are_sharded
        try:
            yield
        finally:
            self._creates_slots = before

    def create(self, device: str, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        """Create a variable, or a slot in the context `created`. Collective, except for a slot."""
        if not self._creates_slots:
            return create(self._strategy, device, next_creator, **kwargs)
        slot = create_alone(self._strategy, device, next_creator, **kwargs)
        setattr(slot, _MARK, True)
        return slot
