"""Programs under a strategy: nested functions, branches and loops.

Which branches are taken and how often loops run depends on the data, and is equal on all ranks. Reductions that do not
depend on each other are built in another order on each rank.

With "gradients" each program is differentiated as well, and the gradients are compared with numpy's. With "compiled"
XLA compiles each program as a whole, or as Keras does inside of an ordinary function, or some of its inner functions
only. Then all ranks build their reductions in one order: a compiled function runs them in the order of the program, and
waits for each.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import MPIStrategy

from .pieces import WIDTH, Graphs, Piece, World, drawn, rows, small

KINDS = ("sum", "mean", "gather", "gather of hvd", "broadcast", "independent",
         *("branch", "loop", "call", "call twice") * 2)


class OfStrategy(Graphs):
    """Some collectives are those of the replica context."""

    def __init__(self, options: frozenset[str]):
        super().__init__()
        self.is_compiled, self.has_gradients = "compiled" in options, "gradients" in options
        self.most_iterations = 3 if self.is_compiled else None

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    def combined(self, gathered: tf.Tensor) -> tf.Tensor:
        # XLA lacks the gradient of the largest in loops.
        return tf.reduce_sum(gathered, axis=0) if self.is_compiled else super().combined(gathered)

    def order(self, piece: Piece) -> list[int]:
        return list(range(piece.count)) if self.is_compiled else super().order(piece)

    def graph_of(self, piece: Piece, x: tf.Tensor) -> tf.Tensor:
        if piece.kind == "merged":
            return small(x + tf.distribute.get_replica_context().merge_call(
                lambda strategy, value: strategy.reduce("SUM", value, axis=None), args=(x,)))
        return super().graph_of(piece, x)

    def function(self, piece: Piece) -> Callable[[tf.Tensor], tf.Tensor]:
        # TensorFlow cannot pass what the gradient of a loop keeps out of a compiled function.
        is_compiled = self.is_compiled and not self.has_gradients and piece.number % 2 == 0
        return tf.function(lambda x: self.graph(piece.inner, x), input_signature=[tf.TensorSpec([WIDTH])],
                           jit_compile=is_compiled or None)


def with_gradient(whole: Sequence[Piece], graphs: OfStrategy
                  ) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """What a program makes of a tensor, and the gradient of that, given one of the result."""
    def both(x: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if not graphs.has_gradients:
            return graphs.graph(whole, x), tf.zeros_like(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = graphs.graph(whole, x)
        return y, tape.gradient(y, x, output_gradients=upstream)
    return both


def program_of(function: Callable, number: int, graphs: OfStrategy) -> Callable:
    strategy = MPIStrategy()
    if not graphs.is_compiled or (number % 3 == 2 and not graphs.has_gradients):
        return tf.function(lambda *inputs: strategy.run(function, args=inputs))
    if number % 3 == 1:
        compiled = tf.function(function, jit_compile=True)
        return tf.function(lambda *inputs: strategy.run(compiled, args=inputs))
    return tf.function(lambda *inputs: strategy.run(function, args=inputs), jit_compile=True)


def run(number: int, options: frozenset[str]) -> None:
    rank, size, graphs = hvd.rank(), hvd.size(), OfStrategy(options)
    # XLA has no gradient of a loop in a branch.
    depth = 1 if {"compiled", "gradients"} <= options else 2
    whole = drawn(random.Random(number), KINDS if graphs.has_gradients else (*KINDS, "merged"), depth)
    program = program_of(with_gradient(whole, graphs), number, graphs)
    for start in range(3):
        x = np.array([[(7 * r + 5 * c + start + number) % 17 for c in range(WIDTH)] for r in range(size)], np.float32)
        upstream = np.array([[r + 2 * c - start for c in range(WIDTH)] for r in range(size)], np.float32)
        result, gradient = program(tf.constant(x[rank]), tf.constant(upstream[rank]))
        expected, back = rows(whole, x, World(range(size), sums_gathered=graphs.is_compiled))
        np.testing.assert_array_equal(result, expected[rank], f"program {number}")
        if graphs.has_gradients:
            exact = back(upstream.astype(np.float64))
            np.testing.assert_allclose(gradient, exact[rank], rtol=1e-4, atol=1e-4 * np.abs(exact).max(),
                                       err_msg=f"the gradient of program {number}")
