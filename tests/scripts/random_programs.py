"""Random programs of nested functions, branches and loops under a strategy, with one inter-op thread.

All ranks run the same programs (tests/support/pieces.py); which branches are taken and how often loops run depends on
the data, and is equal on all ranks. Reductions that do not depend on each other are built in another order on each
rank.

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

COMPILED, GRADIENTS = "compiled" in sys.argv, "gradients" in sys.argv
tf.config.threading.set_inter_op_parallelism_threads(1)
if COMPILED:
    tf.config.threading.set_intra_op_parallelism_threads(1)

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use
from mpistrat.tensorflow import MPIStrategy  # noqa: E402
from tests.support.pieces import WIDTH, Graphs, Piece, World, drawn, rows, small  # noqa: E402

strategy = MPIStrategy()
rank, size = hvd.rank(), hvd.size()
if "gpu" in sys.argv:
    from tests.support import tensorflow_stand_in
    tensorflow_stand_in.install(rank)
KINDS = ("sum", "mean", "gather", "gather of hvd", "broadcast", "independent", *(() if GRADIENTS else ("merged",)),
         *("branch", "loop", "call", "call twice") * 2)


class OfStrategy(Graphs):
    """Some collectives are those of the replica context."""

    most_iterations = 3 if COMPILED else None

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    def combined(self, gathered: tf.Tensor) -> tf.Tensor:
        # XLA lacks the gradient of the largest in loops.
        return tf.reduce_sum(gathered, axis=0) if COMPILED else super().combined(gathered)

    def order(self, piece: Piece) -> list[int]:
        return list(range(piece.count)) if COMPILED else super().order(piece)

    def graph_of(self, piece: Piece, x: tf.Tensor) -> tf.Tensor:
        if piece.kind == "merged":
            return small(x + tf.distribute.get_replica_context().merge_call(
                lambda strategy, value: strategy.reduce("SUM", value, axis=None), args=(x,)))
        return super().graph_of(piece, x)

    def function(self, piece: Piece) -> Callable[[tf.Tensor], tf.Tensor]:
        # TensorFlow cannot pass what the gradient of a loop keeps out of a compiled function.
        is_compiled = COMPILED and not GRADIENTS and piece.number % 2 == 0
        return tf.function(lambda x: self.graph(piece.inner, x), input_signature=[tf.TensorSpec([WIDTH])],
                           jit_compile=is_compiled or None)


def with_gradient(whole: Sequence[Piece]) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """What a program makes of a tensor, and the gradient of that, given one of the result."""
    graphs = OfStrategy()

    def both(x: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if not GRADIENTS:
            return graphs.graph(whole, x), tf.zeros_like(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = graphs.graph(whole, x)
        return y, tape.gradient(y, x, output_gradients=upstream)
    return both


def program_of(run: Callable, seed: int) -> Callable:
    """The function that runs a program in the replica of this rank."""
    if not COMPILED or (seed % 3 == 2 and not GRADIENTS):
        return tf.function(lambda *inputs: strategy.run(run, args=inputs))
    if seed % 3 == 1:
        compiled = tf.function(run, jit_compile=True)
        return tf.function(lambda *inputs: strategy.run(compiled, args=inputs))
    return tf.function(lambda *inputs: strategy.run(run, args=inputs), jit_compile=True)


def main() -> None:
    """Run the programs, each on several inputs."""
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    count, first = numbers[0], (numbers[1:] or [0])[0]
    # XLA has no gradient of a loop in a branch.
    depth = 1 if COMPILED and GRADIENTS else 2
    for seed in range(first, first + count):
        whole = drawn(random.Random(seed), KINDS, depth)
        program = program_of(with_gradient(whole), seed)
        for start in range(3):
            x = np.array([[(7 * r + 5 * c + start + seed) % 17 for c in range(WIDTH)] for r in range(size)], np.float32)
            upstream = np.array([[r + 2 * c - start for c in range(WIDTH)] for r in range(size)], np.float32)
            result, gradient = program(tf.constant(x[rank]), tf.constant(upstream[rank]))
            expected, back = rows(whole, x, World(range(size), sums_gathered=COMPILED))
            np.testing.assert_array_equal(result, expected[rank], f"program {seed}")
            if GRADIENTS:
                exact = back(upstream.astype(np.float64))
                np.testing.assert_allclose(gradient, exact[rank], rtol=1e-4, atol=1e-4 * np.abs(exact).max(),
                                           err_msg=f"the gradient of program {seed}")
    print(f"rank {rank}: {count} programs are right", flush=True)


main()
