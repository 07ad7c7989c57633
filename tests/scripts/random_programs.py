"""Random programs of nested functions, branches and loops with collectives, with one inter-op thread; checked eagerly.

All ranks run the same programs; which branches are taken and how often loops run depends on the data, and is equal on
all ranks. Reductions that do not depend on each other are built in another order on each rank.

usage: random_programs.py PROGRAMS
"""

import random
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use
from mpistrat.tensorflow import MPIStrategy  # noqa: E402

strategy = MPIStrategy()
rank, size = hvd.rank(), hvd.size()
WIDTH = 3
# A piece of a program: what it does to this rank's tensor, in TensorFlow; and to all ranks' rows, in numpy.
Graph = Callable[[tf.Tensor], tf.Tensor]
Rows = Callable[[np.ndarray], np.ndarray]
Piece = tuple[Graph, Rows]


def small(x: tf.Tensor) -> tf.Tensor:
    """Integers stay exact, in whatever order they are summed."""
    return tf.math.floormod(x, 17.0)


def all_reduced(chooser: random.Random, depth: int) -> Piece:
    op = chooser.choice(["SUM", "MEAN"])

    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + tf.distribute.get_replica_context().all_reduce(op, x * float(size)))

    def rows(x: np.ndarray) -> np.ndarray:
        total = (x * size).sum(0) if op == "SUM" else x.sum(0)
        return np.mod(x + total, 17)
    return graph, rows


def gathered(chooser: random.Random, depth: int) -> Piece:
    def graph(x: tf.Tensor) -> tf.Tensor:
        everybody = tf.distribute.get_replica_context().all_gather(x[tf.newaxis], axis=0)
        return small(x + tf.reduce_max(everybody, axis=0))
    return graph, lambda x: np.mod(x + x.max(0), 17)


def merged(chooser: random.Random, depth: int) -> Piece:
    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + tf.distribute.get_replica_context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None),
                                                                        args=(x,)))
    return graph, lambda x: np.mod(x + x.sum(0), 17)


def independent(chooser: random.Random, depth: int) -> Piece:
    number, count = chooser.randrange(10**9), chooser.randint(2, 5)
    order = list(range(count))
    random.Random(number + rank).shuffle(order)

    def graph(x: tf.Tensor) -> tf.Tensor:
        sums = {i: hvd.allreduce(x + float(i), op=hvd.Sum, name=f"independent/{number}/{i}") for i in order}
        return small(tf.add_n([float(i + 1) * sums[i] for i in range(count)]) + x)
    return graph, lambda x: np.mod(sum((i + 1) * (x + i).sum(0) for i in range(count)) + x, 17)


def branched(chooser: random.Random, depth: int) -> Piece:
    (graph_a, rows_a), (graph_b, rows_b) = sequence(chooser, depth - 1), sequence(chooser, depth - 1)
    at = float(chooser.randint(3, 14))

    def graph(x: tf.Tensor) -> tf.Tensor:
        decides = small(tf.distribute.get_replica_context().all_reduce("SUM", x))[0]
        return tf.cond(decides < at, lambda: graph_a(x), lambda: graph_b(x))
    return graph, lambda x: rows_a(x) if np.mod(x.sum(0), 17)[0] < at else rows_b(x)


def looped(chooser: random.Random, depth: int) -> Piece:
    body_graph, body_rows = sequence(chooser, depth - 1)

    def graph(x: tf.Tensor) -> tf.Tensor:
        times = tf.cast(tf.math.floormod(tf.distribute.get_replica_context().all_reduce("SUM", x)[1], 4.0), tf.int32)
        return tf.while_loop(lambda i, _: i < times, lambda i, v: (i + 1, body_graph(v)), (0, x))[1]

    def rows(x: np.ndarray) -> np.ndarray:
        for _ in range(int(np.mod(x.sum(0)[1], 4))):
            x = body_rows(x)
        return x
    return graph, rows


def nested(chooser: random.Random, depth: int) -> Piece:
    inner_graph, inner_rows = sequence(chooser, depth - 1)
    function = tf.function(inner_graph, input_signature=[tf.TensorSpec([WIDTH])])
    calls = chooser.randint(1, 2)

    def graph(x: tf.Tensor) -> tf.Tensor:
        for _ in range(calls):
            x = function(x)
        return x

    def rows(x: np.ndarray) -> np.ndarray:
        for _ in range(calls):
            x = inner_rows(x)
        return x
    return graph, rows


def sequence(chooser: random.Random, depth: int) -> Piece:
    """One to three pieces; where `depth` is 0, none that have others inside."""
    makers = [all_reduced, gathered, merged, independent] + [branched, looped, nested] * 2 * (depth > 0)
    pieces = [chooser.choice(makers)(chooser, depth) for _ in range(chooser.randint(1, 3))]

    def graph(x: tf.Tensor) -> tf.Tensor:
        for piece, _ in pieces:
            x = piece(x)
        return x

    def rows(x: np.ndarray) -> np.ndarray:
        for _, piece in pieces:
            x = piece(x)
        return x
    return graph, rows


def main() -> None:
    """Run the programs, each on several inputs."""
    for seed in range(int(sys.argv[1])):
        graph, rows = sequence(random.Random(seed), depth=2)
        program = tf.function(lambda x, graph=graph: strategy.run(graph, args=(x,)))
        for start in range(3):
            x = np.array([[(7 * r + 5 * c + start + seed) % 17 for c in range(WIDTH)] for r in range(size)], np.float32)
            np.testing.assert_array_equal(program(tf.constant(x[rank])), rows(x)[rank], f"program {seed}")
    print(f"rank {rank}: {sys.argv[1]} programs are right", flush=True)


main()
