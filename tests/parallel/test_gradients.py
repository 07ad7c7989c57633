"""The gradient of every differentiable collective, against finite differences in float64.

A rank's loss depends on the tensors of all ranks. The gradient is that of the sum of the ranks' losses, times a factor
where Horovod's convention differs: 1/N for all-gather and broadcast, N for reduce-scatter.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd

from .helpers import eagerly, in_graph

STEP = 1e-5  # The error of a central difference is about STEP ** 2.
Shapes = list[tuple[int, ...]]


class Case(NamedTuple):
    """A collective on a list of tensors, and its factor for a set of N ranks.

    `shapes` are those of a rank's tensors, given its place in the set and N.
    """

    run: Callable[[list[Any], hvd.ProcessSet], list[Any]]
    shapes: Callable[[int, int], Shapes]
    factor: Callable[[int], float] = lambda n: 1.0


def equal(*shapes: tuple[int, ...]) -> Callable[[int, int], Shapes]:
    return lambda place, n: list(shapes)


def ragged(place: int, n: int) -> Shapes:
    """Two tensors with other numbers of rows on each rank; the first rank has an empty one."""
    return [(place, 2), (n - place,)]


def root_of(process_set: hvd.ProcessSet) -> int:
    return process_set.ranks[-1]


def splits_of(place: int, n: int) -> list[int]:
    return [(place + 2 * other) % 3 for other in range(n)]


FACTORS = {"prescale_factor": 0.5, "postscale_factor": 3.0}
CASES = {
    "allreduce Sum": Case(lambda v, s: [hvd.allreduce(v[0], op=hvd.Sum, process_set=s)], equal((2, 2))),
    "allreduce Sum, scaled": Case(
        lambda v, s: [hvd.allreduce(v[0], op=hvd.Sum, process_set=s, **FACTORS)], equal((3,))),
    "allreduce Average": Case(lambda v, s: [hvd.allreduce(v[0], process_set=s)], equal(())),
    "allreduce Average, scaled": Case(lambda v, s: [hvd.allreduce(v[0], process_set=s, **FACTORS)], equal((3,))),
    "grouped_allreduce Sum, scaled": Case(
        lambda v, s: hvd.grouped_allreduce(v, op=hvd.Sum, process_set=s, **FACTORS), equal((2,), (), (1, 2))),
    "grouped_allreduce Average": Case(lambda v, s: hvd.grouped_allreduce(v, process_set=s), equal((2,), (1, 2))),
    "allgather": Case(lambda v, s: [hvd.allgather(v[1], process_set=s)], ragged, lambda n: 1 / n),
    "grouped_allgather": Case(lambda v, s: hvd.grouped_allgather(v, process_set=s), ragged, lambda n: 1 / n),
    "broadcast": Case(lambda v, s: [hvd.broadcast(v[0], root_of(s), process_set=s)], equal((3,)), lambda n: 1 / n),
    "reducescatter Sum, scaled": Case(
        lambda v, s: [hvd.reducescatter(v[0], op=hvd.Sum, process_set=s, **FACTORS)], equal((4, 2)), lambda n: n),
    "reducescatter Average": Case(lambda v, s: [hvd.reducescatter(v[0], process_set=s)], equal((5,)), lambda n: n),
    "reducescatter Average, scaled": Case(
        lambda v, s: [hvd.reducescatter(v[0], process_set=s, **FACTORS)], equal((2,)), lambda n: n),
    "grouped_reducescatter Sum": Case(
        lambda v, s: hvd.grouped_reducescatter(v, op=hvd.Sum, process_set=s), equal((3,), (1, 2)), lambda n: n),
    "grouped_reducescatter Average, scaled": Case(
        lambda v, s: hvd.grouped_reducescatter(v, process_set=s, **FACTORS), equal((3,), (4,)), lambda n: n),
    "alltoall": Case(lambda v, s: [hvd.alltoall(v[0], process_set=s)], lambda place, n: [(2 * n,)]),
    # One row is sent to nobody.
    "alltoall with splits": Case(
        lambda v, s: [hvd.alltoall(v[0], splits_of(s.rank(), s.size()), process_set=s)[0]],
        lambda place, n: [(sum(splits_of(place, n)) + 1, 2)]),
}


@pytest.fixture(params=["all ranks", pytest.param("a process set", marks=pytest.mark.nightly)])
def process_set(request: pytest.FixtureRequest, size: int) -> Iterator[hvd.ProcessSet]:
    if request.param == "all ranks":
        yield hvd.global_process_set
        return
    made = hvd.add_process_set(range(1, size))
    yield made
    hvd.remove_process_set(made)


def loss_of(case: Case, values: list[Any], process_set: hvd.ProcessSet) -> Any:
    """A loss that is not linear, and in which each rank and each element counts differently."""
    losses = []
    for result in case.run([value * value for value in values], process_set):
        weights = tf.reshape(tf.range(1.0, tf.cast(tf.size(result), tf.float64) + 1), tf.shape(result))
        losses.append(tf.reduce_sum(tf.sin(result) * weights * (process_set.rank() + 1.0)))
    return tf.add_n(losses)


def slopes(case: Case, values: list[Any], process_set: hvd.ProcessSet) -> list[np.ndarray]:
    """The derivatives of the sum of the ranks' losses with respect to this rank's values, as central differences."""
    place, n = process_set.rank(), process_set.size()
    losses, owners = [], []
    for changing in range(n):
        for number, shape in enumerate(case.shapes(changing, n)):
            for element in range(math.prod(shape)):
                owners.append((changing, number))
                for step in (STEP, -STEP):
                    changed = list(values)
                    if changing == place:
                        change = np.zeros(math.prod(shape))
                        change[element] = step
                        changed[number] = values[number] + change.reshape(shape)
                    losses.append(float(loss_of(case, changed, process_set)))
    totals = mpistrat.allreduce(np.array(losses), op=mpistrat.Sum, name="losses", process_set=process_set)
    differences = (totals[::2] - totals[1::2]) / (2 * STEP)
    return [np.array([d for d, owner in zip(differences, owners) if owner == (place, number)]).reshape(shape)
            for number, shape in enumerate(case.shapes(place, n))]


@pytest.mark.horovod("allreduce-gradient", "grouped-allreduce-gradient", "allgather-gradient",
                     "broadcast-gradient", "reducescatter-gradient", "alltoall-gradient")
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_slope_of_the_sum_of_losses(name: str, process_set: hvd.ProcessSet) -> None:
    case = CASES[name]
    if not process_set.included():
        return
    place, n = process_set.rank(), process_set.size()
    generator = np.random.default_rng(place)
    values = [tf.constant(generator.uniform(0.5, 1.0, shape)) for shape in case.shapes(place, n)]
    expected = [case.factor(n) * slope for slope in slopes(case, values, process_set)]

    def step(*values: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss = loss_of(case, list(values), process_set)
        return tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    for way in (eagerly, in_graph):
        for gradient, slope in zip(way(step)(*values), expected, strict=True):
            assert gradient.dtype == tf.float64
            np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-8, err_msg=way.__name__)
