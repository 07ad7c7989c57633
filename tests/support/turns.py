"""Turns: the ranks use the results of a collective one after the other, and not by chance at the same time.

TensorFlow may work in place on results that nobody else needs. Were their memory another rank's too, that would be
seen only where one rank is done before the other has read, which on most machines is rare. In turns it is so always.
"""

import itertools
import socket
import threading
import uuid
from collections import Counter
from typing import Any

import numpy as np
import tensorflow as tf
from mpi4py import MPI


class Turns:
    """The order of steps: a rank begins a part of a step when the rank before it has ended that part.

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
        """No part begins any more."""
        self._socket.close()
