"""What one rank does to the memory of a result, by whatever way, no other rank sees; nor does any other result change.

TensorFlow works in place on what nobody else needs: not on a result that it was given, but on a slice of it. In every
step here rank 0 changes its result, or a part of it, and the other ranks look at theirs when it has done so.
"""

import ctypes
import itertools
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

import mpistrat
import mpistrat.tensorflow as hvd

from ..support.levels import sample

STEPS = 5  # memory for large results was once shared from the third step on
ROWS = 24  # so many that any number of ranks that the tests have divides them
# Bytes of a row are a multiple of 64, as TensorFlow's alignment is.
COLUMNS = {"small": 16, "large": 16 * 1024}


class Turns:
    """The order of steps: a rank begins a part of a step when the rank before it has ended that part.

    Were the memory of a result another rank's too, that would be seen only where one rank is done before the other has
    read, which on most machines is rare. In turns it is so always.

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
        self._socket.close()


@pytest.fixture(scope="module")
def turns() -> Iterator[Turns]:
    made = Turns()
    yield made
    made.close()


def brought(rank: int, step: int, columns: int, rows: int = ROWS) -> np.ndarray:
    start = np.arange(rows, dtype=np.float32)[:, np.newaxis] + np.arange(columns, dtype=np.float32) % 7
    return start + 100 * rank + step


def summed(size: int, step: int, columns: int) -> np.ndarray:
    return np.add.reduce([brought(r, step, columns) for r in range(size)])


def first_rows(size: int, step: int, columns: int) -> np.ndarray:
    """As many rows of each rank as make up ROWS."""
    return np.concatenate([brought(r, step, columns)[:ROWS // size] for r in range(size)])


# Each collective: what it makes of a rank's tensor, and of the steps' number for the expected result.
COLLECTIVES: dict[str, tuple[Callable, Callable]] = {
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum, name="changed/sum"), summed),
    "grouped": (lambda x: hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum, name="changed/sums")[0], summed),
    "joined": (lambda x: tf.reshape(tf.concat(hvd.grouped_allreduce(
        [tf.reshape(row, [-1]) for row in tf.unstack(x)], op=hvd.Sum, name="changed/rows")[:1], axis=0), [1, -1]),
        lambda size, step, columns: summed(size, step, columns)[:1]),
    "broadcast": (lambda x: hvd.broadcast(x, 0, name="changed/broadcast"),
                  lambda size, step, columns: brought(0, step, columns)),
    "allgather": (lambda x: hvd.allgather(x[:ROWS // hvd.size()], name="changed/gather"), first_rows),
    "grouped_allgather": (lambda x: hvd.grouped_allgather([x[:ROWS // hvd.size()], x[:1]], name="changed/gathers")[0],
                          first_rows),
    "reducescatter": (lambda x: hvd.reducescatter(tf.concat([x] * hvd.size(), 0), op=hvd.Sum, name="changed/scatter"),
                      summed),
    "alltoall": (lambda x: hvd.alltoall(tf.concat([x[:ROWS // hvd.size()]] * hvd.size(), 0), name="changed/exchange"),
                 first_rows),
}

# Each way to cut a result, in TensorFlow and in numpy.
CUTS: dict[str, tuple[Callable, Callable]] = {
    "whole": (lambda t: [t], lambda a: [a]),
    "split by sizes": (lambda t: tf.split(t, [8, 16]), lambda a: [a[:8], a[8:]]),
    "split by number": (lambda t: tf.split(t, 4), lambda a: np.split(a, 4)),
    "split columns": (lambda t: tf.split(t, 2, axis=1), lambda a: np.split(a, 2, axis=1)),
    "split when flat": (lambda t: tf.split(tf.reshape(t, [-1]), 3), lambda a: np.split(a.reshape(-1), 3)),
    "slice": (lambda t: [tf.slice(t, [4, 0], [8, -1])], lambda a: [a[4:12]]),
    "rows": (lambda t: [t[4:12], t[16:]], lambda a: [a[4:12], a[16:]]), "row": (lambda t: [t[5]], lambda a: [a[5]]),
    "every other row": (lambda t: [t[::2]], lambda a: [a[::2]]),
    "element": (lambda t: [t[3, 0]], lambda a: [a[3, 0]]),
    "unstack": (lambda t: tf.unstack(t, num=ROWS), lambda a: list(a)),
    "gather": (lambda t: [tf.gather(t, [2, 5])], lambda a: [a[[2, 5]]]),
    "gather columns": (lambda t: [tf.gather_nd(t, [[1], [3]])], lambda a: [a[[1, 3]]]),
    "mask": (lambda t: [tf.boolean_mask(t, [i % 3 == 0 for i in range(ROWS)])], lambda a: [a[::3]]),
    "partition": (lambda t: tf.dynamic_partition(t, [i % 2 for i in range(ROWS)], 2), lambda a: [a[::2], a[1::2]]),
    "reshape": (lambda t: [tf.reshape(t, [-1])], lambda a: [a.reshape(-1)]),
    "row of a reshape": (lambda t: [tf.reshape(t, [3, -1])[1]], lambda a: [a.reshape(3, -1)[1]]),
    "slice of a slice": (lambda t: [t[4:20][4:8]], lambda a: [a[8:12]]),
    "identity": (lambda t: [tf.identity(t)], lambda a: [a]),
    "more dimensions": (lambda t: [tf.squeeze(tf.expand_dims(t[8:], 0), 0)], lambda a: [a[8:]]),
    "other type": (lambda t: [tf.bitcast(tf.bitcast(t[8:], tf.int32), tf.float32)], lambda a: [a[8:]]),
    "joined again": (lambda t: [tf.concat([t[:8]], axis=0)], lambda a: [a[:8]]),
    "branch": (lambda t: [tf.cond(t[0, 0] > -1.0, lambda: t[8:], lambda: t[8:] * 3.0)], lambda a: [a[8:]]),
}
JOINED_CUTS = {**{name: CUTS[name] for name in ("whole", "reshape", "identity")},
               "row": (lambda t: [t[0]], lambda a: [a[0]])}


def written_to(array: np.ndarray) -> None:
    """Add one to each element, as a function does that was given the memory's address; numpy's flag is no lock."""
    flat = np.ctypeslib.as_array(ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_float)), (array.size,))
    flat += 1


class Changes:
    """Ways to add one to a piece of a result, which return the sum."""

    def __init__(self) -> None:
        self._variables: dict[tuple[str, int], Any] = {}

    def of_operation(self, pieces: list[Any]) -> list[Any]:
        return [piece + 1.0 for piece in pieces]

    def of_variable(self, pieces: list[Any]) -> list[Any]:
        for i, piece in enumerate(pieces):
            if i not in self._variables:
                with tf.init_scope():
                    self._variables[i] = tf.Variable(tf.zeros([], piece.dtype), shape=tf.TensorShape(None))
            self._variables[i].assign(piece)
        count = len(pieces)
        del piece
        pieces.clear()
        for i in range(count):
            self._variables[i].assign(self._variables[i] + 0.5)
            self._variables[i].assign_add(tf.fill(tf.shape(self._variables[i]), 0.5))
        return [self._variables[i].read_value() for i in range(count)]

    def of_function(self, pieces: list[Any]) -> list[Any]:
        def changed(array: np.ndarray) -> np.ndarray:
            array = np.asarray(array)
            if array.ndim:
                written_to(array)
                return np.copy(array)
            return array + np.float32(1)
        return [tf.numpy_function(changed, [piece], tf.float32) for piece in pieces]


def seen(pieces: list[Any]) -> list[Any]:
    """Copies of the pieces, made by nothing that could change them."""
    return [tf.numpy_function(np.array, [piece], tf.float32) for piece in pieces]


def assert_all_equal(pieces: list[Any], expected: list[np.ndarray], what: str) -> None:
    assert len(pieces) == len(expected)
    for i, (piece, array) in enumerate(zip(pieces, expected, strict=True)):
        np.testing.assert_array_equal(np.asarray(piece), array, err_msg=f"{what}, piece {i}")


@sample("amount, collective", [*(("large", collective) for collective in COLLECTIVES), ("small", "allreduce")])
def test_what_rank_0_does_to_parts_of_a_result_in_a_graph(amount: str, collective: str, turns: Turns, rank: int,
                                                          size: int) -> None:
    columns, (collect, expected) = COLUMNS[amount], COLLECTIVES[collective]
    first = list(COLLECTIVES).index(collective)
    for i, (name, (cut, cut_array)) in enumerate((JOINED_CUTS if collective == "joined" else CUTS).items()):
        # All pairs of a collective and a cut, and of a change and either, are there; all of three would be too many.
        part, changes = turns.part(), Changes()
        change = [changes.of_operation, changes.of_variable, changes.of_function][(first + i) % 3]

        @tf.function(autograph=False)
        def step(x: Any, cut: Callable = cut, change: Callable = change, part: int = part) -> list[Any]:
            pieces = list(cut(collect(x)))
            with tf.control_dependencies([turns.begin(part, list(pieces))]):
                results = change(pieces) if rank == 0 else seen(pieces)
            with tf.control_dependencies([turns.end(part, results)]):
                return [tf.identity(result) for result in results]

        for number in range(STEPS):
            results = step(tf.constant(brought(rank, number, columns)))
            assert_all_equal(results, [a + (rank == 0) for a in cut_array(expected(size, number, columns))],
                             f"{name}, {change.__name__}, step {number}")


def by_assignment(piece: Any) -> None:
    variable = tf.Variable(tf.zeros_like(piece))
    variable.assign(piece)
    address = np.asarray(memoryview(piece))
    del piece, address
    variable.assign_add(tf.ones_like(variable))


compiled = tf.function(lambda p: p + 1, jit_compile=True)


def by_compiled_function(piece: Any) -> None:
    changed = compiled(piece)
    variable = tf.Variable(tf.zeros_like(changed))
    variable.assign(changed)
    del piece, changed
    variable.assign(compiled(variable))


def by_numpy(piece: Any) -> None:
    written_to(piece.numpy())


def by_function(piece: Any) -> None:
    tf.numpy_function(lambda array: written_to(array) or np.float32(0), [piece], tf.float32)


def by_dlpack(piece: Any) -> None:
    class Exported:
        def __dlpack__(self, **arguments: Any) -> Any:
            return tf.experimental.dlpack.to_dlpack(piece)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0
    written_to(np.from_dlpack(Exported()))


@pytest.mark.parametrize("change, amount, collective", [
    pytest.param(change, amount, name, marks=[pytest.mark.nightly] * (change is not by_assignment and (
        amount, name) != ("large", "allreduce")))
    for change in (by_assignment, by_compiled_function, by_numpy, by_function, by_dlpack)
    for amount, name in (*(("large", name) for name in COLLECTIVES if name != "joined"), ("small", "allreduce"))])
def test_what_rank_0_does_to_parts_of_an_eager_result(change: Callable, amount: str, collective: str, rank: int,
                                                      size: int) -> None:
    columns, (collect, expected) = COLUMNS[amount], COLLECTIVES[collective]
    for number, (name, (cut, cut_array)) in enumerate(CUTS.items()):
        pieces = list(cut(collect(tf.constant(brought(rank, number, columns)))))
        while rank == 0 and pieces:
            piece = pieces.pop()
            if piece.shape.rank:
                change(piece)
            del piece
        mpistrat.barrier()
        if rank != 0:
            assert_all_equal(pieces, cut_array(expected(size, number, columns)), f"{name}, step {number}")


@sample("amount", ["large", "small"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_that_are_kept_for_hundreds_of_steps(collective: str, amount: str, turns: Turns, rank: int,
                                                     size: int) -> None:
    columns, (collect, expected) = max(COLUMNS[amount] // 2, 16), COLLECTIVES[collective]

    @tf.function(autograph=False)
    def step(x: Any) -> list[Any]:
        rows = tf.unstack(collect(x), num=1 if collective == "joined" else ROWS)
        return [row + 1.0 for row in rows] if rank == 0 else rows

    kept: list[tuple[int, list[Any]]] = []
    for number in range(200):
        rows = step(tf.constant(brought(rank, number, columns)))
        if number % (7 + rank) == 0:
            kept.append((number, rows))
        del rows
    mpistrat.barrier()
    for number, rows in kept:
        assert_all_equal(rows, list(expected(size, number, columns) + (rank == 0)), f"step {number}")


@pytest.mark.parametrize("amount", COLUMNS)
@pytest.mark.parametrize("collective", ["allreduce", "grouped", "broadcast", "allgather"])
def test_what_rank_0_does_to_arrays(collective: str, amount: str, rank: int, size: int) -> None:
    columns, kept = COLUMNS[amount], []
    for number in range(STEPS):
        array = brought(rank, number, columns)
        if collective == "allreduce":
            results = [mpistrat.allreduce(array, op=mpistrat.Sum)]
        elif collective == "grouped":
            results = mpistrat.grouped_allreduce([array, array], op=mpistrat.Sum)
        elif collective == "broadcast":
            results = [mpistrat.broadcast(array, 0)]
        else:
            results = [mpistrat.allgather(array[:ROWS // size])]
        expected = COLLECTIVES[collective][1](size, number, columns)
        if rank == 0:
            for result in results:
                result[2:] += 1
        mpistrat.barrier()
        for result in results:
            np.testing.assert_array_equal(result[:2], expected[:2])
            np.testing.assert_array_equal(result[2:], expected[2:] + (rank == 0))
        np.testing.assert_array_equal(array, brought(rank, number, columns))
        kept.append((number, results[-1]))
    for number, result in kept:
        expected = COLLECTIVES[collective][1](size, number, columns)
        np.testing.assert_array_equal(result[2:], expected[2:] + (rank == 0))
