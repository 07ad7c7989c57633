"""Gradients through collectives in branches, loops and functions inside of each other, against the sum over all ranks.

The expected values are those of a program of one process that has all ranks' inputs, in which a collective is plain
arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import MPIStrategy

from ..support.levels import sample
from .strategy_helpers import SUM, in_replica

ZERO = tf.UnconnectedGradients.ZERO
Many = list[Any]  # a tensor for each rank, in one process; in a job with one rank's tensor in it


# -- collectives: what each rank gets, and the same for all ranks in one process ---------------------------------------


def everything(values: Many) -> Any:
    return tf.add_n(values)


def weighted(rows: Any) -> Any:
    """Of the ranks' rows one sum in which each rank counts differently."""
    return tf.reduce_sum(rows * tf.range(1.0, mpistrat.size() + 1)[:, tf.newaxis], axis=0)


def reduced_sum(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum)


def group(x: Any) -> Any:
    return tf.add_n(hvd.grouped_allreduce([x, 2.0 * x, tf.reduce_sum(x) * x], op=hvd.Sum))


def gathered(x: Any) -> Any:
    return weighted(tf.reshape(hvd.allgather(x), [mpistrat.size(), 3]))


def group_gathered(x: Any) -> Any:
    first, second = hvd.grouped_allgather([x, tf.reduce_sum(x) * x])
    return weighted(tf.reshape(first, [mpistrat.size(), 3])) + tf.reverse(
        weighted(tf.reshape(second, [mpistrat.size(), 3])), [0])


def multiples(x: Any) -> Any:
    """A row for each rank, which makes what it gets its own: x for rank 0, 2 x for rank 1, and so on."""
    return tf.range(1.0, mpistrat.size() + 1)[:, tf.newaxis] * x


def scattered(x: Any) -> Any:
    return tf.reshape(hvd.reducescatter(multiples(x), op=hvd.Sum), [3])


def group_scattered(x: Any) -> Any:
    first, second = hvd.grouped_reducescatter([multiples(x), multiples(tf.reduce_sum(x) * x)], op=hvd.Sum)
    return tf.reshape(first + 3.0 * second, [3])


def exchanged(x: Any) -> Any:
    return weighted(hvd.alltoall(multiples(x)))


def parts_of(x: Any, rank: int) -> Any:
    """What a rank is sent with splits: one to three values."""
    return x[:rank % 3 + 1]


def padded(part: Any, rank: int) -> Any:
    return tf.pad(part, [[0, 2 - rank % 3]])


def exchanged_by_splits(x: Any) -> Any:
    rank, size = mpistrat.rank(), mpistrat.size()
    values, counts = hvd.alltoall(tf.concat([parts_of(x, r) for r in range(size)], 0), [r % 3 + 1 for r in range(size)])
    return padded(weighted(tf.reshape(values, [size, rank % 3 + 1])), rank) + 0.0 * tf.cast(counts[0], tf.float32)


def from_the_last(x: Any) -> Any:
    return hvd.broadcast(x, mpistrat.size() - 1)


def reduced_by_the_strategy(x: Any) -> Any:
    return in_replica().all_reduce(SUM, x)


def gathered_by_the_strategy(x: Any) -> Any:
    return weighted(tf.reshape(in_replica().all_gather(x, 0), [mpistrat.size(), 3]))


def for_each(result: Callable[[int], Any]) -> Many:
    return [result(rank) for rank in range(mpistrat.size())]


def with_sums(values: Many) -> Many:
    """Each rank's value times its sum: the second tensor of a group."""
    return [tf.reduce_sum(x) * x for x in values]


# By name: the collective, its arithmetic, and the power of the number of ranks that Horovod's gradient has as a factor,
# compared with that of the sum over the ranks' losses.
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Callable[[Many], Many], int]] = {
    "allreduce": (reduced_sum, lambda v: [everything(v)] * len(v), 0),
    "grouped_allreduce": (group, lambda v: [3.0 * everything(v) + everything(with_sums(v))] * len(v), 0),
    "allgather": (gathered, lambda v: [weighted(tf.stack(v))] * len(v), -1),
    "grouped_allgather": (group_gathered, lambda v: [
        weighted(tf.stack(v)) + tf.reverse(weighted(tf.stack(with_sums(v))), [0])] * len(v), -1),
    "broadcast": (from_the_last, lambda v: [v[-1]] * len(v), -1),
    "reducescatter": (scattered, lambda v: for_each(lambda r: (r + 1.0) * everything(v)), 1),
    "grouped_reducescatter": (group_scattered, lambda v: for_each(
        lambda r: (r + 1.0) * (everything(v) + 3.0 * everything(with_sums(v)))), 1),
    "alltoall": (exchanged, lambda v: for_each(lambda r: (r + 1.0) * weighted(tf.stack(v))), 0),
    "alltoall with splits": (exchanged_by_splits, lambda v: for_each(
        lambda r: padded(weighted(tf.stack([parts_of(x, r) for x in v])), r)), 0),
    "all_reduce": (reduced_by_the_strategy, lambda v: [everything(v)] * len(v), 0),
    "all_gather": (gathered_by_the_strategy, lambda v: [weighted(tf.stack(v))] * len(v), 0)}


# -- programs: a collective in them, or its arithmetic on lists --------------------------------------------------------


def each(values: Sequence[Any], change: Callable[[Any], Any]) -> Many:
    return [change(value) for value in values]


def branch(inside: Callable, values: Many) -> Many:
    return tf.cond(tf.reduce_sum(values[0]) > -100.0, lambda: inside(each(values, lambda x: x * x)),
                   lambda: each(values, tf.identity))


def loop(inside: Callable, values: Many) -> Many:
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, inside(each(v, lambda x: 0.5 * x))),
                         [0, list(values)])[1]


def function(inside: Callable, values: Many) -> Many:
    return tf.function(lambda v: inside(each(v, tf.sin)), autograph=False)(list(values))


def twice(inside: Callable, values: Many) -> Many:
    """A function that is called twice, with a variable, and so in no order that TensorFlow would keep by itself."""
    called = tf.function(lambda v: inside(each(v, lambda x: FACTOR * x)), autograph=False)
    first, second = called(list(values)), called(each(values, lambda x: x * x))
    return [a + 2.0 * b for a, b in zip(first, second, strict=True)]


FACTOR = tf.Variable(0.7, trainable=False)
PARTS = {"branch": branch, "loop": loop, "function": function, "twice": twice}
PROGRAMS = ["branch branch", "branch loop", "loop branch", "loop loop", "branch function", "loop function",
            "function branch", "branch function branch", "loop function loop", "loop branch function", "twice",
            "twice branch", "branch twice", "loop twice"]


def nested(program: str, innermost: Callable[[Many], Many], values: Many) -> Any:
    """The sum of what `innermost` gives, inside of all parts of a program."""
    inside = innermost
    for name in reversed(program.split()):
        inside = (lambda part, within: lambda v: part(within, v))(PARTS[name], inside)
    return tf.add_n([tf.reduce_sum(result) for result in inside(values)])


def tape_inside(loss: Callable, values: Many) -> Many:
    @tf.function(autograph=False)
    def program(values: Many) -> Many:
        with tf.GradientTape() as tape:
            tape.watch(values)
            y = loss(values)
        return tape.gradient(y, values, unconnected_gradients=ZERO)

    return program(values)


def tape_outside(loss: Callable, values: Many) -> Many:
    program = tf.function(loss, autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(values)
        y = program(values)
    return tape.gradient(y, values, unconnected_gradients=ZERO)


def gradients(loss: Callable, values: Many) -> Many:
    return tf.function(lambda values: tf.gradients(loss(values), values, unconnected_gradients=ZERO),
                       autograph=False)(values)


WAYS = [tape_inside, tape_outside, gradients]


def inputs() -> Many:
    return [tf.constant([0.5, 0.25, 0.75]) + 0.1 * rank for rank in range(mpistrat.size())]


def expected(program: str, collective: str, rank: int) -> np.ndarray:
    _, arithmetic, power = COLLECTIVES[collective]
    return tape_outside(lambda values: nested(program, lambda v: arithmetic(with_factor(v, power)), values),
                        inputs())[rank].numpy()


def with_factor(values: Many, power: int, of_gradient: int = 0) -> Many:
    """The values, with gradients times this power of the number of ranks; gradients of these times another one too."""
    @tf.custom_gradient
    def scaled(value: Any) -> Any:
        return tf.identity(value), lambda upstream: float(mpistrat.size()) ** power * with_factor(
            [upstream], of_gradient)[0]

    return [scaled(value) for value in values] if power else values


def loss_of(program: str, collective: str) -> Callable[[Many], Any]:
    return lambda values: nested(program, lambda v: [COLLECTIVES[collective][0](v[0])], values)


def run(collective: str, step: Callable[[Any], Any], x: Any, strategy: MPIStrategy) -> np.ndarray:
    """The result of `step` on this rank's tensor; by the strategy, if the collective is one of its own."""
    if not collective.startswith("all_"):
        return step(x).numpy()
    return strategy.experimental_local_results(strategy.run(step, args=(x,)))[0].numpy()


def actual(program: str, collective: str, way: Callable, rank: int, strategy: MPIStrategy) -> np.ndarray:
    loss = loss_of(program, collective)
    return run(collective, lambda x: way(loss, [x])[0], inputs()[rank], strategy)


def programs_of(collective: str) -> list[str]:
    """All for the all-reduce; some for what shares its way through graphs."""
    if collective == "allreduce":
        return PROGRAMS
    if "scatter" in collective or "alltoall" in collective or collective == "grouped_allgather":
        return ["loop branch", "branch twice"]
    return ["branch branch", "loop branch", "branch function", "loop function loop", "branch twice"]


def cases() -> Iterator[Any]:
    """Each way is of some programs. Nightly: all ways, what a longer program has in it, most of other collectives."""
    for collective in COLLECTIVES:
        for program in programs_of(collective):
            first = WAYS[PROGRAMS.index(program) % len(WAYS)]
            for way in WAYS if collective == "allreduce" else [first]:
                repeats = way is not first or (any(program in longer for longer in PROGRAMS if longer != program)
                                               if collective == "allreduce" else program != "loop branch")
                yield pytest.param(program, collective, way, marks=[pytest.mark.nightly] * repeats)


@pytest.mark.parametrize("program, collective, way", cases())
def test_the_gradient_is_that_of_one_process(program: str, collective: str, way: Callable, rank: int,
                                             strategy: MPIStrategy) -> None:
    np.testing.assert_allclose(actual(program, collective, way, rank, strategy), expected(program, collective, rank),
                               rtol=1e-4)


@sample("first, then", [(1, 0), (0, 1), (1, 2)])
def test_a_function_is_differentiated_inside_of_a_branch_and_outside(first: int, then: int, rank: int) -> None:
    inner = tf.function(lambda x: hvd.allreduce(x * x, op=hvd.Sum), autograph=False)
    programs = [lambda v: tf.cond(v[0][0] > -1.0, lambda: tf.reduce_sum(inner(v[0])), lambda: 0.0),
                lambda v: tf.reduce_sum(inner(v[0])),
                lambda v: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, y + tf.reduce_sum(inner(v[0]))),
                                        [0, 0.0])[1]]
    x = inputs()[rank]
    for number in (first, then, first):
        np.testing.assert_allclose(tape_outside(programs[number], [x])[0], 2 * mpistrat.size() * x.numpy(), rtol=1e-5)


def test_the_gradient_of_one_collective_may_be_asked_for_twice(rank: int, size: int) -> None:
    @tf.function(autograph=False)
    def program(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = hvd.allreduce(x * x, op=hvd.Sum)
        return [tape.gradient(y, x, output_gradients=[weight * tf.ones([3])]) for weight in (1.0, 2.0, 3.0)]

    for _ in range(3):
        for weight, gradient in enumerate(program(inputs()[rank]), start=1):
            np.testing.assert_allclose(gradient, 2.0 * weight * size * inputs()[rank].numpy(), rtol=1e-5)


@sample("calls", [8, 50])
def test_more_calls_of_a_function_than_a_graph_has_threads(calls: int, rank: int, size: int) -> None:
    """With another gradient for each, so that those of one call on one rank and of another elsewhere would be seen."""
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), autograph=False)
    program = tf.function(lambda x: tf.add_n([(1.0 + k) * tf.reduce_sum(inner(x * k)) for k in range(calls)]),
                          autograph=False)
    for _ in range(3):
        gradient = tape_outside(lambda values: program(values[0]), [tf.ones([3])])[0]
        np.testing.assert_allclose(gradient, [size * sum(k * (1.0 + k) for k in range(calls))] * 3, rtol=1e-5)


@sample("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall",
                                        "alltoall with splits", "all_gather"])
def test_the_gradient_of_the_gradient_is_that_of_one_process(collective: str, in_graph: bool, rank: int,
                                                             strategy: MPIStrategy) -> None:
    def second(innermost: Callable[[Many], Many], values: Many) -> Many:
        def program(values: Many) -> Many:
            with tf.GradientTape() as outer:
                outer.watch(values)
                with tf.GradientTape() as inner:
                    inner.watch(values)
                    y = tf.add_n([tf.reduce_sum(each ** 2) for each in innermost([x ** 2 for x in values])])
                first = inner.gradient(y, values, unconnected_gradients=ZERO)
                z = tf.add_n([tf.reduce_sum(gradient ** 2) for gradient in first])
            return outer.gradient(z, values, unconnected_gradients=ZERO)

        return (tf.function(program, autograph=False) if in_graph else program)(values)

    call, arithmetic, power = COLLECTIVES[collective]
    result = run(collective, lambda x: second(lambda v: [call(v[0])], [x])[0], inputs()[rank], strategy)
    # The gradient of a reduce-scatter is an all-gather, whose gradient has a factor of its own.
    of_gradient = COLLECTIVES["allgather"][2] if collective == "reducescatter" else 0
    one_process = second(lambda v: arithmetic(with_factor(v, power, of_gradient)), inputs())[rank]
    np.testing.assert_allclose(result, one_process, rtol=1e-4)
