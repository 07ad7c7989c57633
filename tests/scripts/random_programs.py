"""Random programs of nested functions, branches and loops with collectives, with one inter-op thread; checked eagerly.

All ranks run the same programs; which branches are taken and how often loops run depends on the data, and is equal on
all ranks. Reductions that do not depend on each other are built in another order on each rank.

With "gradients" each program is differentiated as well, and the gradients are compared with numpy's.

With "compiled" XLA compiles each program as a whole, or as Keras does inside of an ordinary function, or some of its
inner functions only; there is one intra-op thread too. Then all ranks build their reductions in one order: a compiled
function runs them in the order of the program, and waits for each.

With "gpu" the tensors go the way of GPU tensors, on a stand-in.

usage: random_programs.py PROGRAMS [FIRST] [gradients] [compiled] [gpu]

FIRST is the number of the first program.
"""

import random
import sys
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

COMPILED = "compiled" in sys.argv
tf.config.threading.set_inter_op_parallelism_threads(1)
if COMPILED:
    tf.config.threading.set_intra_op_parallelism_threads(1)

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use
from mpistrat.tensorflow import MPIStrategy  # noqa: E402

strategy = MPIStrategy()
rank, size = hvd.rank(), hvd.size()
if "gpu" in sys.argv:
    from tests.support import tensorflow_stand_in
    tensorflow_stand_in.install(rank)
WIDTH = 3
# A piece of a program: what it does to this rank's tensor, in TensorFlow; and to all ranks' rows, in numpy, with what
# makes of the gradients of its results those of its inputs. Those are of the sum of what all ranks have, except through
# collectives that average gradients, as Horovod's do.
Graph = Callable[[tf.Tensor], tf.Tensor]
Pullback = Callable[[np.ndarray], np.ndarray]
Rows = Callable[[np.ndarray], tuple[np.ndarray, Pullback]]
Piece = tuple[Graph, Rows]


def small(x: tf.Tensor) -> tf.Tensor:
    """Integers stay exact, in whatever order they are summed."""
    return tf.math.floormod(x, 17.0)


def to_all(row: np.ndarray) -> np.ndarray:
    """The same row for all ranks."""
    return np.repeat(row[np.newaxis], size, axis=0)


def all_reduced(chooser: random.Random, depth: int) -> Piece:
    op = chooser.choice(["SUM", "MEAN"])
    factor = size if op == "SUM" else 1

    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + tf.distribute.get_replica_context().all_reduce(op, x * float(size)))
    return graph, lambda x: (np.mod(x + factor * x.sum(0), 17), lambda g: g + to_all(factor * g.sum(0)))


def combined(rows: tf.Tensor) -> tf.Tensor:
    """The largest of the rows; their sum where XLA compiles, which lacks the gradient of the largest in loops."""
    return tf.reduce_sum(rows, axis=0) if COMPILED else tf.reduce_max(rows, axis=0)


def combined_rows(x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    """As `combined`; of the largest, where several are, each has a part of the gradient."""
    if COMPILED:
        return x.sum(0), to_all
    is_largest = x == x.max(0)
    return x.max(0), lambda g: is_largest / is_largest.sum(0) * g


def gathered(chooser: random.Random, depth: int) -> Piece:
    def graph(x: tf.Tensor) -> tf.Tensor:
        everybody = tf.distribute.get_replica_context().all_gather(x[tf.newaxis], axis=0)
        return small(x + combined(everybody))

    def rows(x: np.ndarray) -> tuple[np.ndarray, Pullback]:
        most, back = combined_rows(x)
        return np.mod(x + most, 17), lambda g: g + back(g.sum(0))
    return graph, rows


def gathered_by_horovods_name(chooser: random.Random, depth: int) -> Piece:
    number = chooser.randrange(10**9)

    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + combined(hvd.allgather(x[tf.newaxis], name=f"gather/{number}")))

    def rows(x: np.ndarray) -> tuple[np.ndarray, Pullback]:
        most, back = combined_rows(x)
        return np.mod(x + most, 17), lambda g: g + back(g.sum(0)) / size
    return graph, rows


def broadcast(chooser: random.Random, depth: int) -> Piece:
    number, root = chooser.randrange(10**9), chooser.randrange(size)

    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + hvd.broadcast(2.0 * x, root, name=f"broadcast/{number}"))

    def back(g: np.ndarray) -> np.ndarray:
        result = g.copy()
        result[root] += 2 * g.sum(0) / size
        return result
    return graph, lambda x: (np.mod(x + 2 * x[root], 17), back)


def merged(chooser: random.Random, depth: int) -> Piece:
    def graph(x: tf.Tensor) -> tf.Tensor:
        return small(x + tf.distribute.get_replica_context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None),
                                                                        args=(x,)))
    return graph, lambda x: (np.mod(x + x.sum(0), 17), no_gradient)


def no_gradient(g: np.ndarray) -> np.ndarray:
    raise AssertionError("nobody asks for it")


def independent(chooser: random.Random, depth: int) -> Piece:
    number, count = chooser.randrange(10**9), chooser.randint(2, 5)
    order = list(range(count))
    random.Random(number + (0 if COMPILED else rank)).shuffle(order)

    def graph(x: tf.Tensor) -> tf.Tensor:
        sums = {i: hvd.allreduce(x + float(i), op=hvd.Sum, name=f"independent/{number}/{i}") for i in order}
        return small(tf.add_n([float(i + 1) * sums[i] for i in range(count)]) + x)

    def rows(x: np.ndarray) -> tuple[np.ndarray, Pullback]:
        total = sum(range(1, count + 1))
        return (np.mod(sum((i + 1) * (x + i).sum(0) for i in range(count)) + x, 17),
                lambda g: g + to_all(total * g.sum(0)))
    return graph, rows


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
        return tf.while_loop(lambda i, _: i < times, lambda i, v: (i + 1, body_graph(v)), (0, x),
                             maximum_iterations=3 if COMPILED else None)[1]  # XLA needs it for the gradient.

    return graph, lambda x: repeated(body_rows, int(np.mod(x.sum(0)[1], 4)), x)


def nested(chooser: random.Random, depth: int) -> Piece:
    inner_graph, inner_rows = sequence(chooser, depth - 1)
    calls = chooser.randint(1, 2)
    # TensorFlow cannot pass what the gradient of a loop keeps out of a compiled function.
    jit_compile = COMPILED and "gradients" not in sys.argv and chooser.random() < 0.5
    function = tf.function(inner_graph, input_signature=[tf.TensorSpec([WIDTH])], jit_compile=jit_compile or None)

    def graph(x: tf.Tensor) -> tf.Tensor:
        for _ in range(calls):
            x = function(x)
        return x

    return graph, lambda x: repeated(inner_rows, calls, x)


def repeated(rows: Rows, times: int, x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    """`rows` one time after the other."""
    return chained([rows] * times, x)


def chained(several: Sequence[Rows], x: np.ndarray) -> tuple[np.ndarray, Pullback]:
    """One after the other."""
    pullbacks: list[Pullback] = []
    for rows in several:
        x, back = rows(x)
        pullbacks.append(back)

    def back_through_all(g: np.ndarray) -> np.ndarray:
        for back in reversed(pullbacks):
            g = back(g)
        return g
    return x, back_through_all


LEAVES = [all_reduced, gathered, gathered_by_horovods_name, broadcast, independent]


def sequence(chooser: random.Random, depth: int) -> Piece:
    """One to three pieces; where `depth` is 0, none that have others inside."""
    makers = LEAVES + [branched, looped, nested] * 2 * (depth > 0)
    pieces = [chooser.choice(makers)(chooser, depth) for _ in range(chooser.randint(1, 3))]

    def graph(x: tf.Tensor) -> tf.Tensor:
        for piece, _ in pieces:
            x = piece(x)
        return x

    return graph, lambda x: chained([rows for _, rows in pieces], x)


def with_gradient(graph: Graph) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """What `graph` makes of a tensor, and the gradient of that, given one of the result."""
    def both(x: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = graph(x)
        return y, tape.gradient(y, x, output_gradients=upstream)
    return both


def program_of(run: Callable, seed: int) -> Callable:
    """The function that runs a program in the replica of this rank."""
    if not COMPILED or (seed % 3 == 2 and "gradients" not in sys.argv):
        return tf.function(lambda *inputs: strategy.run(run, args=inputs))
    if seed % 3 == 1:
        compiled = tf.function(run, jit_compile=True)
        return tf.function(lambda *inputs: strategy.run(compiled, args=inputs))
    return tf.function(lambda *inputs: strategy.run(run, args=inputs), jit_compile=True)


def main() -> None:
    """Run the programs, each on several inputs."""
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    count, first = numbers[0], (numbers[1:] or [0])[0]
    has_gradients = "gradients" in sys.argv
    if not has_gradients:
        LEAVES.append(merged)
    # XLA has no gradient of a loop in a branch.
    depth = 1 if COMPILED and has_gradients else 2
    for seed in range(first, first + count):
        graph, rows = sequence(random.Random(seed), depth)
        run = with_gradient(graph) if has_gradients else lambda x, upstream, graph=graph: (graph(x), tf.zeros_like(x))
        program = program_of(run, seed)
        for start in range(3):
            x = np.array([[(7 * r + 5 * c + start + seed) % 17 for c in range(WIDTH)] for r in range(size)], np.float32)
            upstream = np.array([[r + 2 * c - start for c in range(WIDTH)] for r in range(size)], np.float32)
            result, gradient = program(tf.constant(x[rank]), tf.constant(upstream[rank]))
            expected, back = rows(x)
            np.testing.assert_array_equal(result, expected[rank], f"program {seed}")
            if has_gradients:
                exact = back(upstream.astype(np.float64))
                np.testing.assert_allclose(gradient, exact[rank], rtol=1e-4, atol=1e-4 * np.abs(exact).max(),
                                           err_msg=f"the gradient of program {seed}")
    print(f"rank {rank}: {count} programs are right", flush=True)


main()
