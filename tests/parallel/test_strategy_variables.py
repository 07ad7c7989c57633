"""Variables of MPIStrategy: how they begin, how they are written and read, and how they are saved."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.tensorflow import MPIStrategy  # noqa: E402

from .strategy_helpers import collectives_counted, eagerly, in_graph  # noqa: E402

each_way = pytest.mark.parametrize("way", [eagerly, in_graph])
ON_READ = tf.VariableSynchronization.ON_READ
Aggregation = tf.VariableAggregation


def make(strategy: MPIStrategy, value: Any, **arguments: Any) -> Any:
    with strategy.scope():
        return tf.Variable(value, **arguments)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64"])
def test_a_variable_begins_with_the_value_of_the_first_rank(strategy: MPIStrategy, dtype: str, rank: int) -> None:
    variable = make(strategy, np.array([rank, 0]).astype(dtype))
    np.testing.assert_array_equal(variable.numpy(), np.array([0, 0]).astype(dtype))


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("value", [3.0, [3.0, 4.0]], ids=["scalar", "vector"])
def test_a_variable_is_an_array_for_numpy(strategy: MPIStrategy, value: Any, synchronization: str) -> None:
    with strategy.scope():
        variable = tf.Variable(value, synchronization=tf.VariableSynchronization[synchronization],
                               aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    for made in (np.array(variable), np.asarray(variable), np.array(variable, np.float64)):
        np.testing.assert_array_equal(made, value)
    np.array(variable)[...] = 0.0
    np.testing.assert_array_equal(variable.numpy(), value)


def test_an_initial_value_may_be_a_function(strategy: MPIStrategy, rank: int) -> None:
    assert make(strategy, lambda: tf.constant(rank + 5.0)).numpy() == 5.0


def test_a_string_is_left_as_it_is(strategy: MPIStrategy, rank: int) -> None:
    assert make(strategy, "same").numpy() == b"same"


def test_different_shapes_are_an_error_that_names_the_variable(strategy: MPIStrategy, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"mine.*disagree on shape|disagree on shape.*mine"):
        make(strategy, tf.zeros([2 + (rank == 0)]), name="mine")


def test_a_python_number_is_aggregated_like_a_tensor(strategy: MPIStrategy, size: int) -> None:
    variable = make(strategy, 0.0, aggregation=Aggregation.SUM)
    strategy.run(lambda: variable.assign_add(1.0))
    assert variable.numpy() == size


def test_without_aggregation_each_rank_writes_its_own(strategy: MPIStrategy, rank: int) -> None:
    variable = make(strategy, 0.0)
    strategy.run(lambda: variable.assign(tf.constant(float(rank))))
    assert variable.numpy() == rank


def test_assignment_outside_of_a_replica(strategy: MPIStrategy) -> None:
    variable = make(strategy, [1.0, 2.0], aggregation=Aggregation.SUM)
    variable.assign([3.0, 4.0])
    variable.assign_sub([1.0, 1.0])
    np.testing.assert_array_equal(variable.numpy(), [2.0, 3.0])


@each_way
@pytest.mark.parametrize(("aggregation", "expected"), [
    (Aggregation.SUM, lambda size: size * (size + 1) / 2), (Aggregation.MEAN, lambda size: (size + 1) / 2),
    (Aggregation.ONLY_FIRST_REPLICA, lambda size: 1.0)])
def test_reading_aggregates_what_is_synchronised_on_reading(strategy: MPIStrategy, way: Callable, aggregation: Any,
                                                            expected: Callable, rank: int, size: int) -> None:
    variable = make(strategy, 0.0, synchronization=ON_READ, aggregation=aggregation)
    local = way(lambda: strategy.run(lambda: variable.assign_add(rank + 1.0).read_value()))()
    assert float(local) == rank + 1
    assert variable.numpy() == expected(size)


def test_a_sum_keeps_its_value_when_it_is_assigned(strategy: MPIStrategy, size: int) -> None:
    variable = make(strategy, 0.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    with collectives_counted() as names:
        variable.assign(6.0)
    assert not names
    assert variable.numpy() == pytest.approx(6.0)


def test_a_variable_made_outside_of_the_scope_cannot_be_updated(strategy: MPIStrategy) -> None:
    outside = tf.Variable(1.0)
    with pytest.raises(ValueError, match="was not created in this strategy's scope"), strategy.scope():
        strategy.extended.update(outside, lambda v: v.assign(2.0))


def test_a_variable_is_not_taken_for_one_that_is_gone(strategy: MPIStrategy, rank: int) -> None:
    def first_of_ranks() -> Any:
        return make(strategy, 0, aggregation=Aggregation.ONLY_FIRST_REPLICA)

    gone = [first_of_ranks() for _ in range(40)]
    for variable in gone:
        strategy.extended.assigned_in_lockstep(variable)
    del gone, variable
    for variable in [first_of_ranks() for _ in range(40)]:  # Python gives some of them the ids of those that are gone.
        strategy.run(lambda v=variable: v.assign(tf.constant(rank + 5)))
        assert strategy.experimental_local_results(variable)[0].numpy() == 5


def test_looking_for_variables_reads_none(strategy: MPIStrategy, shared_dir: str) -> None:
    variable = make(strategy, 1.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    checkpoint = tf.train.Checkpoint(variable=variable)
    with collectives_counted() as names:
        checkpoint.write(os.path.join(shared_dir, "checkpoint"))
    assert sum(name.endswith("/reduce") for name in names) == 1
