"""Random graphs with collectives in sessions of tf.compat.v1, checked by numpy.

Each graph has reductions, gathers and broadcasts, in branches, loops whose iterations overlap, and functions that are
called at several places. A program has several graphs, with the control flow of TensorFlow 1 or 2, some of them in
threads of their own; its runs fetch results in another order on each rank. There is one inter-op thread.

With "gpu" the tensors go the way of GPU tensors, on a stand-in.

usage: random_sessions.py PROGRAMS [FIRST] [gpu]
"""

import random
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

v1 = tf.compat.v1
hvd.init()
rank, size = hvd.rank(), hvd.size()
if "gpu" in sys.argv:
    from tests.support import tensorflow_stand_in
    tensorflow_stand_in.install(rank)
WIDTH, RESULTS, RUNS = 3, 4, 2
# A piece of a graph: what it does to this rank's tensor, and to all ranks' rows in numpy.
Piece = tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[np.ndarray], np.ndarray]]


def small(x: tf.Tensor) -> tf.Tensor:
    """Integers stay exact, in whatever order they are summed."""
    return tf.math.floormod(x, 17.0)


def same_for_all(row: np.ndarray) -> np.ndarray:
    return np.repeat(row[np.newaxis], size, axis=0)


def reduced(chooser: random.Random, depth: int) -> Piece:
    return (lambda x: small(x + hvd.allreduce(x, op=hvd.Sum))), lambda x: np.mod(x + x.sum(0), 17)


def largest(chooser: random.Random, depth: int) -> Piece:
    return (lambda x: hvd.allreduce(x, op=hvd.Max)), lambda x: same_for_all(x.max(0))


def gathered(chooser: random.Random, depth: int) -> Piece:
    weight = 1.0 + rank
    weights = np.arange(1.0, size + 1)[:, np.newaxis]
    return (lambda x: small(tf.reduce_sum(hvd.allgather(weight * x[tf.newaxis]), 0)),
            lambda x: same_for_all(np.mod((weights * x).sum(0), 17)))


def grouped(chooser: random.Random, depth: int) -> Piece:
    def graph(x: tf.Tensor) -> tf.Tensor:
        one, two = hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum)
        return small(x + one - two)
    return graph, lambda x: np.mod(x - x.sum(0), 17)


def of_root(chooser: random.Random, depth: int) -> Piece:
    root = chooser.randrange(size)
    return (lambda x: small(x + hvd.broadcast(x, root))), lambda x: np.mod(x + x[root], 17)


def in_branch(chooser: random.Random, depth: int) -> Piece:
    (one, one_rows), (other, other_rows) = piece(chooser, depth - 1), piece(chooser, depth - 1)

    def graph(x: tf.Tensor) -> tf.Tensor:
        flag = hvd.allreduce(x[0], op=hvd.Max) > 8.0
        return tf.cond(flag, lambda: one(x), lambda: other(x))
    return graph, lambda x: one_rows(x) if x[:, 0].max() > 8 else other_rows(x)


def in_loop(chooser: random.Random, depth: int) -> Piece:
    body, rows = piece(chooser, depth - 1)
    count = chooser.randint(1, 3)

    def graph(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, body(x)), [0, x])[1]

    def repeated(x: np.ndarray) -> np.ndarray:
        for _ in range(count):
            x = rows(x)
        return x
    return graph, repeated


def in_parallel(chooser: random.Random, depth: int) -> Piece:
    """A loop whose iterations do not wait for each other."""
    body, rows = piece(chooser, depth - 1)
    count = chooser.randint(2, 6)

    def graph(x: tf.Tensor) -> tf.Tensor:
        def step(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            number = tf.cast(i, tf.float32)
            return i + 1, small(total + (1.0 + number) * body(small(x + number)))
        return tf.while_loop(lambda i, _: i < count, step, [0, tf.zeros_like(x)])[1]

    def repeated(x: np.ndarray) -> np.ndarray:
        total = np.zeros_like(x)
        for i in range(count):
            total = np.mod(total + (1 + i) * rows(np.mod(x + i, 17)), 17)
        return total
    return graph, repeated


def in_function(chooser: random.Random, depth: int) -> Piece:
    body, rows = piece(chooser, depth - 1)
    # A loop of TensorFlow 1's control flow refuses a function.
    call = tf.function(body, autograph=False) if v1.control_flow_v2_enabled() else body
    return (lambda x: small(call(x) + call(small(x + 1.0)))), lambda x: np.mod(rows(x) + rows(np.mod(x + 1, 17)), 17)


def after_another(chooser: random.Random, depth: int) -> Piece:
    (first, first_rows), (second, second_rows) = piece(chooser, depth - 1), piece(chooser, depth - 1)
    return (lambda x: second(first(x))), lambda x: second_rows(first_rows(x))


def piece(chooser: random.Random, depth: int) -> Piece:
    kinds = [reduced, largest, gathered, grouped, of_root]
    if depth > 0:
        kinds += [in_branch, in_loop, in_parallel, in_function, after_another] * 2
    return chooser.choice(kinds)(chooser, depth)


def check_graph(number: int, place: int) -> None:
    """Build a graph, run it several times, and compare."""
    chooser, own = random.Random(f"{number}/{place}"), random.Random(f"{number}/{place}/{rank}")
    pieces = [piece(chooser, 2) for _ in range(RESULTS)]
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x = v1.placeholder(tf.float32, [WIDTH])
        results = [graph(x) for graph, _ in pieces]
        for run in range(RUNS):
            rows = np.random.default_rng([number, place, run]).integers(0, 17, [size, WIDTH]).astype(np.float32)
            chosen = chooser.sample(range(RESULTS), chooser.randint(1, RESULTS))
            own.shuffle(chosen)
            found = session.run([results[i] for i in chosen], {x: rows[rank]})
            for i, result in zip(chosen, found, strict=True):
                np.testing.assert_array_equal(result, pieces[i][1](rows.astype(np.float64))[rank],
                                              err_msg=f"program {number}, graph {place}, result {i}, run {run}")


def check(number: int) -> None:
    chooser = random.Random(number)
    (v1.enable_control_flow_v2 if chooser.random() < 0.5 else v1.disable_control_flow_v2)()
    if chooser.random() < 0.5:
        check_graph(number, 0)
        return
    failed: list[BaseException] = []

    def guarded(place: int) -> None:
        try:
            check_graph(number, place)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(place,), name=f"graph {'abc'[place]}") for place in range(3)]
    random.Random(rank).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main(arguments: Sequence[str]) -> None:
    count, first = (int(argument) for argument in [*arguments, "0"][:2])
    for number in range(first, first + count):
        check(number)
    hvd.shutdown()
    print(f"rank {rank}: {count} programs are right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
