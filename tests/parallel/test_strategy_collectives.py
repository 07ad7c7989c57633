"""MPIStrategy without Keras: run, reduce, gather, what a replica can do, and variables, eagerly and in graphs."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import MPIStrategy

from .strategy_helpers import collectives_counted, eagerly, in_graph, in_replica, per_rank

each_way = pytest.mark.parametrize("way", [eagerly, in_graph])


def test_what_it_is(strategy: MPIStrategy, rank: int, size: int) -> None:
    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert strategy.num_replicas_in_sync == size
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert {role: len(tasks) for role, tasks in resolver.cluster_spec().as_dict().items()} == {"worker": size}


@each_way
def test_reduce_over_an_axis_weighs_rows_and_not_ranks(strategy: MPIStrategy, way: Callable, size: int) -> None:
    values = per_rank(strategy, lambda r: np.full([r + 1, 2], r, np.float32))
    mean, total = way(lambda v: (strategy.reduce("MEAN", v, axis=0), strategy.reduce("SUM", v, axis=0)))(values)
    rows = sum(r + 1 for r in range(size))
    expected = float(sum(r * (r + 1) for r in range(size)))
    np.testing.assert_allclose(total, [expected] * 2)
    np.testing.assert_allclose(mean, [expected / rows] * 2, rtol=1e-6)


@each_way
@pytest.mark.parametrize("axis", [-1, [-1, 0], 1], ids=str)
def test_reduce_counts_axes_from_the_end(strategy: MPIStrategy, way: Callable, axis: Any, size: int) -> None:
    values = per_rank(strategy, lambda r: np.arange(6, dtype=np.float32).reshape(2, 3) + r)
    mean = way(lambda v: strategy.reduce("MEAN", v, axis=axis))(values)
    everything = np.stack([np.arange(6).reshape(2, 3) + r for r in range(size)])
    expected = everything.mean() if isinstance(axis, list) else everything.mean((0, 2))
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_reduce_of_scalars_takes_no_notice_of_the_axis(strategy: MPIStrategy, size: int) -> None:
    values = per_rank(strategy, float)
    assert float(strategy.reduce("MEAN", values, axis=0)) == (size - 1) / 2


def test_reduce_of_a_nested_structure_is_one_collective(strategy: MPIStrategy, rank: int, size: int) -> None:
    with collectives_counted() as names:
        result = strategy.reduce("SUM", {"a": tf.constant(1.0), "b": [tf.constant([rank])]}, axis=None)
    assert float(result["a"]) == size and len(names) == 1
    np.testing.assert_array_equal(result["b"][0], [sum(range(size))])


@each_way
@pytest.mark.parametrize("axis", [0, 1])
def test_gather(strategy: MPIStrategy, way: Callable, axis: int, size: int) -> None:
    def part(r: int) -> np.ndarray:
        return np.full([r + 1, 2] if axis == 0 else [2, r + 1], r)
    joined = way(lambda v: strategy.gather(v, tf.constant(axis)))(per_rank(strategy, part))
    np.testing.assert_array_equal(joined, np.concatenate([part(r) for r in range(size)], axis))


def test_a_value_without_the_axis_cannot_be_gathered(strategy: MPIStrategy) -> None:
    for value, axis in ((1.0, 0), ([1.0], 1), ([[1.0]], -3)):
        with pytest.raises(ValueError, match=rf"has no axis {axis} to gather along. Reshape a scalar to \(1,\)"):
            strategy.gather(tf.constant(value), axis)
    with pytest.raises(ValueError, match=r"known when a tf\.function is traced"):
        tf.function(lambda axis: strategy.gather(tf.zeros([2, 2]), axis))(tf.constant(0))


@each_way
@pytest.mark.parametrize("gather", ["strategy.gather", "all_gather"])
@pytest.mark.parametrize("differ", ["shape", "number of dimensions", "dtype"])
def test_values_that_cannot_be_joined_are_the_error_of_tensorflows_strategies(
        strategy: MPIStrategy, way: Callable, gather: str, differ: str, rank: int, restart: Callable) -> None:
    odd = rank == 1
    value = tf.zeros([2, 3 + odd] if differ == "shape" else [2, 3, *[1] * odd],
                     tf.int32 if odd and differ == "dtype" else tf.float32)
    step = way(lambda: strategy.gather(value, 0) if gather == "strategy.gather"
               else strategy.run(lambda: in_replica().all_gather(value, 0)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"the ranks disagree on (shape|dtype)") as caught:
        step()
    if way is eagerly:
        assert isinstance(caught.value, mpistrat.MismatchError)
    else:
        restart()


def test_slices_may_be_made_of_tuples(strategy: MPIStrategy, size: int) -> None:
    keras = pytest.importorskip("keras")
    with strategy.scope():
        variable, optimizer = keras.Variable(np.ones([3, 1])), keras.optimizers.SGD(0.5)
        optimizer.build([variable])
    strategy.run(lambda: optimizer.apply([tf.IndexedSlices([[2.0]], (1,), (3, 1))]))
    np.testing.assert_array_equal(variable.numpy(), [[1], [1 - size], [1]])


@each_way
def test_all_gather_and_its_gradient(strategy: MPIStrategy, way: Callable, rank: int, size: int) -> None:
    def step() -> Any:
        x, z = tf.fill([rank + 1, 2], 1.0 + rank), tf.fill([2], 3.0)
        with tf.GradientTape() as tape:
            tape.watch([x, z])
            joined = in_replica().all_gather([x, z], axis=0)
            y = tf.reduce_sum(joined[0] * joined[0]) + tf.reduce_sum(joined[1])
        return joined, tape.gradient(y, [x, z])
    (x, z), (dx, dz) = way(lambda: strategy.run(step))()
    np.testing.assert_array_equal(x[:, 0], np.concatenate([np.full(r + 1, r + 1.0) for r in range(size)]))
    assert z.shape == (2 * size,)
    np.testing.assert_allclose(dx, np.full([rank + 1, 2], 2.0 * (rank + 1) * size))
    np.testing.assert_allclose(dz, np.full([2], float(size)))


def test_autograph_converts_the_users_functions_and_none_of_mpistrat(strategy: MPIStrategy, size: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    # In mpistrat it would find nothing to convert, and take seconds for it.
    autograph = importlib.import_module("tensorflow.python.autograph.impl.api")
    original, converted = autograph._convert_actual, set()

    def convert(entity: Any, context: Any) -> Any:
        converted.add((entity.__module__, entity.__name__))
        return original(entity, context)

    def merged(strategy: MPIStrategy, total: Any) -> Any:
        while total < 100.0:
            total *= 10.0
        return strategy.reduce("MEAN", total, axis=None)

    def step() -> Any:
        total = in_replica().all_reduce("SUM", tf.ones([2]))
        total += in_replica().all_gather(total, 0)[:2] + hvd.allreduce(total) + tf.cast(hvd.size_op(), tf.float32)
        if total[0] > 0.0:
            total *= 0.5
        return in_replica().merge_call(merged, args=(total[1],))

    @tf.function
    def program() -> Any:
        return strategy.reduce("MEAN", tf.fill([1], strategy.run(step)), axis=0)

    monkeypatch.setattr(autograph, "_convert_actual", convert)
    result = 2.0 * size
    while result < 100:
        result *= 10
    assert float(program()) == result
    assert {name for _, name in converted} >= {"program", "step", "merged"}
    assert not [place for place in sorted(converted) if place[0].startswith("mpistrat.")]


def test_the_gradient_through_a_nested_function_and_a_loop(strategy: MPIStrategy, size: int) -> None:
    @tf.function
    def inner(x: Any) -> Any:
        for _ in tf.range(3):
            x = in_replica().all_reduce("MEAN", x) * 2.0
        return x

    @tf.function
    def outer() -> Any:
        def step() -> Any:
            x = tf.constant(1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = inner(x)
            return y, tape.gradient(y, x)
        return strategy.run(step)
    assert [float(v) for v in outer()] == [8.0, 8.0]


def test_different_shapes_are_an_error_on_every_rank(strategy: MPIStrategy, rank: int, size: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match="the ranks disagree on shape"):
        strategy.run(lambda: in_replica().all_reduce("SUM", tf.zeros([2 + (rank == 0)])))


def test_options_that_are_no_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be tf\.distribute\.experimental\.CommunicationOptions"):
        MPIStrategy(communication_options="ring")


def test_a_distributed_tape_is_refused_in_a_replica(strategy: MPIStrategy) -> None:
    def step() -> Any:
        x = tf.constant(2.0)
        with mpistrat.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x)
    with pytest.raises(ValueError, match="would average gradients twice"):
        strategy.run(step)


def test_tensors_are_packed_as_the_options_say(strategy: MPIStrategy, rank: int, size: int) -> None:
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2000)
    packing = MPIStrategy(options)
    values = [tf.fill([200], rank + 1.0) for _ in range(6)]

    def reduced(which: MPIStrategy, **arguments: Any) -> list[str]:
        program = tf.function(lambda: which.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", values, **arguments)))
        program()
        with collectives_counted() as names:
            results = program()
        np.testing.assert_array_equal(results, np.full((6, 200), size * (size + 1) / 2))
        return names

    assert len(reduced(strategy)) == 1
    assert len(reduced(packing)) == 3
    assert len(reduced(strategy, options=options)) == 3


def test_different_options_are_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="communication_options differ among the ranks"):
        MPIStrategy(tf.distribute.experimental.CommunicationOptions(bytes_per_pack=rank))


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_timeout_must_be_above_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        MPIStrategy(tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds))


def test_nccl_is_warned_of_where_it_is_not_there(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.NCCL)
    with caplog.at_level("WARNING", logger="mpistrat"):
        MPIStrategy(options)
    if mpistrat.nccl_built():
        assert "NCCL" not in caplog.text
    else:
        assert ("ask for NCCL" in caplog.text) == (rank == 0)


# -- variables: how they begin, how they are written and read, and how they are saved ----------------------------------


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
