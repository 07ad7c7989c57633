"""Turns: the ranks apply a step's averaged gradients one after the other, and not by chance at the same time.

An optimizer may work in place on gradients that nobody else needs. Were their memory another rank's too, that would be
seen only where one rank is done before the other has read, which on most machines is rare. In turns it is so always.
"""

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI


class Turns:
    """The order of one training: a rank begins a part of a step when the rank before it has ended that part.

    The parts have the numbers in which they are traced, which are the same on all ranks.
    """

    def __init__(self) -> None:
        self._comm, self._parts = MPI.COMM_WORLD.Dup(), itertools.count()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def part(self) -> int:
        """The number of a new part."""
        return next(self._parts)

    def begin(self, part: int, after: list[Any]) -> Any:
        """What other nodes may depend on: this rank's turn has come. It comes after `after`."""
        with tf.control_dependencies(after):
            return self._call(lambda: self.rank > 0 and self._comm.recv(source=self.rank - 1, tag=part))

    def end(self, part: int, after: list[Any]) -> Any:
        """The turn is over after `after`."""
        with tf.control_dependencies(after):
            return self._call(lambda: self.rank < self.size - 1 and self._comm.send(True, self.rank + 1, tag=part))

    @staticmethod
    def _call(function: Any) -> Any:
        def called() -> np.ndarray:
            function()
            return np.array(0)
        return tf.numpy_function(called, [], tf.int64, stateful=True)

    def close(self) -> None:
        """The training has ended. Collective."""
        self._comm.Free()


class _InTurns:
    """Mixed in before a Keras optimizer's class: clips and updates in turns."""

    turns: Turns

    def _clip_gradients(self, grads: Any) -> Any:
        if self._strategy_reduces() or not (self.clipnorm or self.clipvalue or self.global_clipnorm):  # type: ignore
            return super()._clip_gradients(grads)  # type: ignore[misc]
        part, grads = self.turns.part(), list(grads)
        with tf.control_dependencies([self.turns.begin(part, grads)]):
            clipped = list(super()._clip_gradients(grads))  # type: ignore[misc]
        with tf.control_dependencies([self.turns.end(part, clipped)]):
            return clipped

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        if self._strategy_reduces():
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
            return
        part, grads = self.turns.part(), list(grads)
        # A part of the gradients may come with another bucket: a turn that has begun must not wait for other ranks.
        with tf.control_dependencies([self.turns.begin(part, grads)]):
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        self.turns.end(part, [tf.convert_to_tensor(v) for v in trainable_variables])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not self._strategy_reduces():
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        part = self.turns.part()
        with tf.control_dependencies([self.turns.begin(part, [gradient])]):
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
        self.turns.end(part, [tf.convert_to_tensor(variable)])

    @staticmethod
    def _strategy_reduces() -> bool:
        """Whether gradients are averaged between clipping and the update of each variable."""
        return tf.distribute.has_strategy()


def in_turns(optimizer: keras.optimizers.Optimizer, turns: Turns) -> keras.optimizers.Optimizer:
    """An optimizer like `optimizer` that applies gradients in turns."""
    cls = type(optimizer)
    return type(cls.__name__, (_InTurns, cls), {"turns": turns}).from_config(optimizer.get_config())
