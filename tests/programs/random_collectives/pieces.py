"""Random programs of collectives in branches, loops and functions, on a small tensor of each rank; and numpy's results.

A program is a tuple of pieces, which it applies one after the other. Numbers are whole and small, so that sums are
exact in whatever order. `rows` has the tensors of all ranks, one below the other, and the pullback of a program: what
makes of the gradients of its results those of its inputs. `Graphs` makes the graph of one rank; its subclasses, in the
other files, are how a program is run: in functions, under a strategy, or in sessions.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

WIDTH = 3
WHOLE = 12.0  # The mean of so many times a whole number is whole on up to four ranks.
DTYPES = ("float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
NESTS = ("branch", "loop", "parallel", "call", "call twice")
Pullback = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A part of a program; `rows_of` says what each kind does with the tensors of the ranks."""

    kind: str
    number: int
    inner: tuple["Piece", ...] = ()
    other: tuple["Piece", ...] = ()  # of the other branch

    @property
    def threshold(self) -> int:
        return 3 + self.number % 12

    @property
    def count(self) -> int:
        """Of independent reductions, or of iterations that may overlap."""
        return 2 + self.number % 4


def drawn(choose: random.Random, kinds: Sequence[str], depth: int) -> tuple[Piece, ...]:
    """One to three pieces; where `depth` is 0, none that have others inside."""
    found = []
    for _ in range(choose.randint(1, 3)):
        kind = choose.choice([kind for kind in kinds if depth or kind not in NESTS])
        inner = drawn(choose, kinds, depth - 1) if kind in NESTS else ()
        other = drawn(choose, kinds, depth - 1) if kind == "branch" else ()
        found.append(Piece(kind, choose.randrange(10**9), inner, other))
    return tuple(found)


def every(whole: Sequence[Piece]) -> Iterator[Piece]:
    for piece in whole:
        yield piece
        yield from every(piece.inner + piece.other)


def small(x: Any) -> Any:
    return x % 17.0


# -- numpy's results --------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What the results depend on besides the tensors."""

    ranks: Sequence[int]  # Those that take part. The rows are theirs.
    sums_gathered: bool = False  # Gathered rows are summed, in place of the largest.
    members_of: Callable[[Piece], Sequence[int]] = lambda piece: ()  # The ranks of the process set of a piece.
    state: dict[int, Any] = field(default_factory=dict)  # The variables of optimizers.


def rows(whole: Sequence[Piece], x: np.ndarray, world: World) -> tuple[np.ndarray, Pullback]:
    """What a program makes of the tensors of all ranks, and its pullback.

    Gradients are of the sum of what all ranks have, except through collectives that average gradients, as Horovod's do.
    """
    pullbacks: list[Pullback] = []
    for piece in whole:
        x, back = rows_of(piece, x, world)
        pullbacks.append(back)

    def back_through_all(g: np.ndarray) -> np.ndarray:
        for back in reversed(pullbacks):
            g = back(g)
        return g
    return x, back_through_all


def no_gradient(g: np.ndarray) -> np.ndarray:
    raise AssertionError("nobody asks for it")


def rows_of(piece: Piece, x: np.ndarray, world: World) -> tuple[np.ndarray, Pullback]:
    kind, total, size = piece.kind, x.sum(0), len(x)

    def to_all(row: np.ndarray) -> np.ndarray:
        return np.repeat(row[np.newaxis], size, axis=0)

    if kind in ("sum", "named"):
        return small(x + total), lambda g: g + to_all(g.sum(0))
    if kind in ("merged", "typed", "scattered"):
        return small(x + total), no_gradient
    if kind == "exchanged":
        return small(x + np.arange(1.0, size + 1)[:, np.newaxis] * total), no_gradient
    if kind == "mean":
        return small(x + WHOLE * total / size), lambda g: g + to_all(WHOLE * g.mean(0))
    if kind == "tape":
        return small(x + WHOLE * total / size), no_gradient
    if kind == "optimizer":
        world.state[piece.number] = world.state.get(piece.number, 0) - WHOLE * total / size
        return small(x + world.state[piece.number]), no_gradient
    if kind in ("several", "independent"):
        count = 3 if kind == "several" else piece.count
        factor = sum(range(1, count + 1))
        return (small(x + sum((i + 1) * (x + i).sum(0) for i in range(count))), lambda g: g + to_all(factor * g.sum(0)))
    if kind in ("gather", "gather of hvd"):
        # Where several rows have the largest, each has a part of the gradient.
        shares = np.ones_like(x) if world.sums_gathered else (x == x.max(0)) / (x == x.max(0)).sum(0)
        divisor = size if kind == "gather of hvd" else 1
        return (small(x + (total if world.sums_gathered else x.max(0))), lambda g: g + shares * g.sum(0) / divisor)
    if kind == "weighted":
        return to_all(small((np.arange(1.0, size + 1)[:, np.newaxis] * x).sum(0))), no_gradient
    if kind == "largest":
        return to_all(x.max(0)), no_gradient
    if kind == "grouped":
        return small(x - total), no_gradient
    if kind == "broadcast":
        root = piece.number % size

        def back(g: np.ndarray) -> np.ndarray:
            result = g.copy()
            result[root] += 2 * g.sum(0) / size
            return result
        return small(x + 2 * x[root]), back
    if kind in ("set", "own set"):
        members = list(world.members_of(piece))
        return np.array([small(row + x[members].sum(0)) if rank in members else row
                         for rank, row in zip(world.ranks, x, strict=True)]), no_gradient
    if kind == "branch":
        return rows(piece.inner if small(total)[0] < piece.threshold else piece.other, x, world)
    if kind == "parallel":
        result = np.zeros_like(x)
        for i in range(piece.count):
            result = small(result + (1 + i) * rows(piece.inner, small(x + i), world)[0])
        return result, no_gradient
    if kind in NESTS:
        return rows(piece.inner * {"loop": int(total[1] % 4), "call": 1, "call twice": 2}[kind], x, world)
    return x, lambda g: g


# -- the graph --------------------------------------------------------------------------------------------------------


class Graphs:
    most_iterations: int | None = None  # XLA needs it for the gradient of a loop.

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self._functions: dict[Piece, Any] = {}

    def graph(self, whole: Sequence[Piece], x: tf.Tensor) -> tf.Tensor:
        for piece in whole:
            x = self.graph_of(piece, x)
        return x

    def graph_of(self, piece: Piece, x: tf.Tensor) -> tf.Tensor:
        kind, number = piece.kind, piece.number
        if kind == "sum":
            return small(x + self.sum(x))
        if kind == "named":
            return small(x + hvd.allreduce(x, op=hvd.Sum, name=f"named/{number}"))
        if kind == "typed":
            return small(x + tf.cast(hvd.allreduce(tf.cast(x, DTYPES[number % len(DTYPES)]), op=hvd.Sum), tf.float32))
        if kind == "scattered":
            return small(x + hvd.reducescatter(tf.stack([x] * self.size), op=hvd.Sum)[0])
        if kind == "exchanged":
            return small(x + tf.reduce_sum(hvd.alltoall(tf.stack([x * (i + 1.0) for i in range(self.size)])), 0))
        if kind == "mean":
            return small(x + self.mean(x * WHOLE))
        if kind == "several":
            order = range(3) if self.rank % 2 else reversed(range(3))
            parts = {i: x + float(i) for i in order}
            return small(x + tf.add_n([(i + 1.0) * hvd.allreduce(parts[i], op=hvd.Sum) for i in range(3)]))
        if kind == "independent":
            sums = {i: hvd.allreduce(x + float(i), op=hvd.Sum, name=f"independent/{number}/{i}")
                    for i in self.order(piece)}
            return small(tf.add_n([float(i + 1) * sums[i] for i in range(piece.count)]) + x)
        if kind == "gather":
            return small(x + self.combined(self.gather(x[tf.newaxis])))
        if kind == "gather of hvd":
            return small(x + self.combined(hvd.allgather(x[tf.newaxis], name=self.name(f"gather/{number}"))))
        if kind == "weighted":
            return small(tf.reduce_sum(hvd.allgather((1.0 + self.rank) * x[tf.newaxis]), 0))
        if kind == "largest":
            return hvd.allreduce(x, op=hvd.Max)
        if kind == "grouped":
            one, two = hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum)
            return small(x + one - two)
        if kind == "broadcast":
            return small(x + hvd.broadcast(2.0 * x, number % self.size, name=self.name(f"broadcast/{number}")))
        if kind == "unused":
            hvd.allreduce(2.0 * x)
            return x
        if kind == "branch":
            decides = small(self.sum(x))[0] < float(piece.threshold)
            return tf.cond(decides, lambda: self.graph(piece.inner, x), lambda: self.graph(piece.other, x))
        if kind == "loop":
            times = tf.cast(self.sum(x)[1] % 4.0, tf.int32)
            return tf.while_loop(lambda i, _: i < times, lambda i, v: (i + 1, self.graph(piece.inner, v)), (0, x),
                                 maximum_iterations=self.most_iterations)[1]
        if kind == "parallel":  # Its iterations do not wait for each other.
            def step(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                place = tf.cast(i, tf.float32)
                return i + 1, small(total + (1.0 + place) * self.graph(piece.inner, small(x + place)))
            return tf.while_loop(lambda i, _: i < piece.count, step, [0, tf.zeros_like(x)])[1]
        if piece not in self._functions:
            self._functions[piece] = self.function(piece)
        function = self._functions[piece]
        return function(function(x)) if kind == "call twice" else function(x)

    def function(self, piece: Piece) -> Callable[[tf.Tensor], tf.Tensor]:
        def call(x: tf.Tensor) -> tf.Tensor:  # All of them have one name.
            return self.graph(piece.inner, x)
        return tf.function(call, autograph=False)

    def name(self, name: str) -> str | None:
        """The name of a collective that is given one; None: it makes its own."""
        return name

    def order(self, piece: Piece) -> list[int]:
        """In which this rank builds reductions that do not depend on each other: another one on each rank."""
        order = list(range(piece.count))
        random.Random(piece.number + self.rank).shuffle(order)
        return order

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x)

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(x)

    def combined(self, gathered: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(gathered, axis=0)
