"""Turns: the ranks apply a step's averaged gradients one after the other, and not by chance at the same time.

An optimizer may work in place on gradients that nobody else needs. Were their memory another rank's too, that would be
seen only where one rank is done before the other has read, which on most machines is rare. In turns it is so always.
"""

import itertools
import socket
import threading
import uuid
from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI


class Turns:
    """The order of one training: a rank begins a part of a step when the rank before it has ended that part.

    The parts have the numbers in which they are traced, which are the same on all ranks. To be made and closed on all
    ranks together. A rank that waits sleeps: there may be more ranks than processors.
    """

    def __init__(self) -> None:
        comm = MPI.COMM_WORLD
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._parts, self._ended, self._lock = itertools.count(), Counter[bytes](), threading.Lock()
        self._name = comm.bcast(f"\0turns-{uuid.uuid4().hex}")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{self._name}-{self.rank}")
        comm.Barrier()

    def part(self) -> int:
        """The number of a new part."""
        return next(self._parts)

    def wait(self, part: int) -> None:
        """Return when the rank before this one has ended the part once more. Rank 0 need not wait."""
        if self.rank == 0:
            return
        number = str(part).encode()
        with self._lock:
            while not self._ended[number]:
                self._ended[self._socket.recv(32)] += 1
            self._ended[number] -= 1

    def over(self, part: int) -> None:
        """This rank has ended the part."""
        if self.rank < self.size - 1:
            self._socket.sendto(str(part).encode(), f"{self._name}-{self.rank + 1}")

    def begin(self, part: int, after: list[Any]) -> Any:
        """What other nodes may depend on: this rank's turn has come. It comes after `after`."""
        with tf.control_dependencies(after):
            return self._call(lambda: self.wait(part))

    def end(self, part: int, after: list[Any]) -> Any:
        """The turn is over after `after`."""
        with tf.control_dependencies(after):
            return self._call(lambda: self.over(part))

    @staticmethod
    def _call(function: Any) -> Any:
        def called() -> np.ndarray:
            function()
            return np.array(0)
        return tf.numpy_function(called, [], tf.int64, stateful=True)

    def close(self) -> None:
        """The training has ended."""
        self._socket.close()


class _InTurns:
    """Mixed in before a Keras optimizer's class: clips and updates in turns."""

    turns: Turns

    def _clip_gradients(self, grads: Any) -> Any:
        if not (self.clipnorm or self.clipvalue or self.global_clipnorm):  # type: ignore[attr-defined]
            return super()._clip_gradients(grads)  # type: ignore[misc]
        part, grads = self.turns.part(), list(grads)
        with tf.control_dependencies([self.turns.begin(part, grads)]):
            clipped = list(super()._clip_gradients(grads))  # type: ignore[misc]
        with tf.control_dependencies([self.turns.end(part, clipped)]):
            return clipped

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        part, grads = self.turns.part(), list(grads)
        # Gradients may come in several buckets. A turn begins when all are there: it must not wait for other ranks.
        with tf.control_dependencies([self.turns.begin(part, grads)]):
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        self.turns.end(part, [tf.convert_to_tensor(v) for v in trainable_variables])


def in_turns(optimizer: keras.optimizers.Optimizer, turns: Turns) -> keras.optimizers.Optimizer:
    """An optimizer like `optimizer` that applies gradients in turns."""
    cls = type(optimizer)
    return type(cls.__name__, (_InTurns, cls), {"turns": turns}).from_config(optimizer.get_config())
