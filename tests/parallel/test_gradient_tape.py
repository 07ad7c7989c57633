"""DistributedGradientTape on every rank."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow.gradients import GradientOptions, GradientReducer

from ..support.levels import sample
from .helpers import both_ways, eagerly, either_way, in_graph


def quadratic(way: Callable, scale: Any, variables: Any, loss: Callable | None = None, **arguments: Any) -> Any:
    """The distributed gradients of `scale * sum of squares / 2`, which are `scale * variable`."""
    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            value = factor * tf.add_n([tf.reduce_sum(v * v) / 2 for v in tf.nest.flatten(variables)])
        return hvd.DistributedGradientTape(tape, **arguments).gradient(value, variables)

    return way(step)(tf.constant(scale, tf.nest.flatten(variables)[0].dtype))


@pytest.mark.horovod("tape")
@both_ways
def test_gradients_are_averaged(way: Callable, rank: int, size: int) -> None:
    variables = [tf.Variable([[1.0, 2.0]]), tf.Variable(3.0)]
    first, second = quadratic(way, rank + 1.0, variables)
    mean = (size + 1) / 2
    np.testing.assert_allclose(first, [[mean, 2 * mean]], rtol=1e-6)
    np.testing.assert_allclose(second, 3 * mean, rtol=1e-6)


@pytest.mark.horovod("predivide")
@either_way
@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_predivide_factor_does_not_change_the_average(way: Callable, factor: float, rank: int, size: int) -> None:
    gradient, = quadratic(way, rank + 1.0, [tf.Variable([1.0, 2.0])], gradient_predivide_factor=factor)
    np.testing.assert_allclose(gradient, [(size + 1) / 2, size + 1], rtol=1e-6)


@pytest.mark.horovod("predivide")
def test_a_predivide_factor_divides_before_the_sum(size: int) -> None:
    # In float16 the sum would overflow.
    variable = tf.Variable([60000.0], dtype=tf.float16)
    gradient, = quadratic(eagerly, 1.0, [variable], gradient_predivide_factor=float(size))
    np.testing.assert_allclose(gradient.numpy().astype(float), [60000.0], rtol=1e-2)


@either_way
@pytest.mark.parametrize("dtype", [tf.float64, tf.bfloat16], ids=lambda d: d.name)
def test_gradients_keep_their_dtype(way: Callable, dtype: Any, rank: int, size: int) -> None:
    gradient, = quadratic(way, rank + 1.0, [tf.Variable([1.0], dtype=dtype)])
    assert gradient.dtype == dtype
    assert float(gradient[0]) == pytest.approx((size + 1) / 2, rel=1e-2)


@pytest.mark.horovod("tape-nested")
@both_ways
def test_sources_may_be_nested(way: Callable, rank: int, size: int) -> None:
    sources = {"a": tf.Variable(1.0), "b": [tf.Variable([2.0]), (tf.Variable([3.0, 3.0]),)]}
    gradients = quadratic(way, rank + 1.0, sources, op=hvd.Sum)
    total = size * (size + 1) / 2
    tf.nest.assert_same_structure(gradients, sources)
    assert gradients["a"].numpy() == total
    assert gradients["b"][0].numpy().tolist() == [2 * total]
    assert gradients["b"][1][0].numpy().tolist() == [3 * total] * 2


@pytest.mark.horovod("tape-nested")
@either_way
def test_a_single_source_gives_a_single_gradient(way: Callable, rank: int, size: int) -> None:
    gradient = quadratic(way, rank + 1.0, tf.Variable([2.0]), op=hvd.Sum)
    assert gradient.numpy().tolist() == [size * (size + 1)]


@pytest.mark.horovod("none", "tape-unconnected")
@both_ways
def test_a_source_without_a_gradient_gives_none(way: Callable, rank: int, size: int) -> None:
    used, unused, also = tf.Variable(2.0), tf.Variable(3.0), tf.Variable(4.0)

    def step(**arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = used * (rank + 1) + also
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [used, unused, also], **arguments)

    first, second, third = way(step)()
    assert second is None
    assert (first.numpy(), third.numpy()) == (size * (size + 1) / 2, size)
    zeros = way(lambda: step(unconnected_gradients=tf.UnconnectedGradients.ZERO))()
    assert [gradient.numpy() for gradient in zeros] == [size * (size + 1) / 2, 0, size]


@either_way
def test_no_gradient_at_all(way: Callable, size: int) -> None:
    variable = tf.Variable(1.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.constant(1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    assert way(step)() == [None]


@pytest.mark.horovod("tape-arguments")
def test_the_gradient_of_a_vector_takes_output_gradients(rank: int, size: int) -> None:
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        target = variable * 3
    gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(target, variable, output_gradients=[
        tf.constant([1.0, 10.0 * (rank + 1)])])
    assert gradient.numpy().tolist() == [3.0 * size, 15.0 * size * (size + 1)]


@pytest.mark.horovod("tape")
def test_a_persistent_tape_may_be_asked_again(rank: int, size: int) -> None:
    first, second = tf.Variable(2.0), tf.Variable(5.0)
    with tf.GradientTape(persistent=True) as tape:
        square, product = first * first * (rank + 1), first * second
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    for _ in range(2):
        assert tape.gradient(square, first).numpy() == 4 * size * (size + 1) / 2
        assert [g.numpy() for g in tape.gradient(product, [first, second])] == [5 * size, 2 * size]


@pytest.mark.horovod("tape")
@pytest.mark.parametrize("width", [3, 600], ids=["small", "more than what a submit waits for"])
@sample("groups", [None, 2])
def test_a_persistent_tape_may_be_asked_twice_in_a_graph(groups: int | None, width: int, rank: int, size: int) -> None:
    """As in a GAN, whose two losses come from one tape. Also if another rank comes late."""
    variables = [tf.Variable(tf.ones([width, width])), tf.Variable(1.0)]

    @tf.function(autograph=False)
    def step(factor: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            losses = [power * factor * tf.add_n([tf.reduce_sum(v) for v in variables]) for power in (1.0, 2.0)]
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, groups=groups)
        return [tape.gradient(loss, variables) for loss in losses]

    total = size * (size + 1) / 2
    for number in range(4):
        if number % size == rank:
            time.sleep(0.05)
        for power, gradients in enumerate(step(tf.constant(rank + 1.0)), start=1):
            for gradient in gradients:
                np.testing.assert_array_equal(gradient, np.full(gradient.shape, power * total))


@pytest.mark.horovod("tape")
def test_a_tape_may_be_wrapped_before_it_records(rank: int, size: int) -> None:
    variable = tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = variable * variable * (rank + 1)
    assert isinstance(tape, tf.GradientTape)
    assert tape.watched_variables() == (variable,)
    assert tape.gradient(loss, variable).numpy() == 3 * size * (size + 1)


# -- tf.IndexedSlices -------------------------------------------------------------------------------------------------


def lookup(way: Callable, rank: int, **arguments: Any) -> Any:
    """Gradients of a dense variable and a table, of which rank r looks up rows 0 and r + 1, the latter twice."""
    table, dense = tf.Variable(tf.ones([9, 2])), tf.Variable([1.0])

    def step() -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [0, rank + 1, rank + 1])
            loss = tf.reduce_sum(rows) * tf.reduce_sum(dense)
        return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, [table, dense])

    return way(step)()


def looked_up(size: int) -> np.ndarray:
    expected = np.zeros((9, 2))
    expected[0] = size
    expected[1:size + 1] = 2
    return expected


@both_ways
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_gradients_stay_sparse(way: Callable, op: str, rank: int, size: int) -> None:
    table, dense = lookup(way, rank, op=getattr(hvd, op))
    divisor = size if op == "Average" else 1
    assert isinstance(table, tf.IndexedSlices)
    assert table.indices.numpy().tolist() == [i for r in range(size) for i in (0, r + 1, r + 1)]
    np.testing.assert_allclose(tf.convert_to_tensor(table), looked_up(size) / divisor, rtol=1e-6)
    assert dense.numpy().tolist() == [6 * size / divisor]


@pytest.mark.horovod("sparse-as-dense")
@either_way
def test_sparse_gradients_are_made_dense_on_request(way: Callable, rank: int, size: int) -> None:
    table, dense = lookup(way, rank, sparse_as_dense=True)
    assert isinstance(table, tf.Tensor)
    np.testing.assert_allclose(table, looked_up(size) / size, rtol=1e-6)
    assert dense.numpy().tolist() == [6.0]


def test_sparse_gradients_may_have_other_numbers_of_rows_on_every_rank(rank: int, size: int) -> None:
    table = tf.Variable(tf.ones([9, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, tf.range(rank)))  # Rank 0 looks up nothing.
    gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, table)
    assert gradient.indices.numpy().tolist() == [i for r in range(size) for i in range(r)]


@either_way
def test_what_overwrites_a_variable_is_the_largest_of_all_ranks(way: Callable, rank: int, size: int) -> None:
    keras = pytest.importorskip("keras")
    largest, weight = keras.Variable([0.0, 0.0]), keras.Variable(1.0)
    largest.overwrite_with_gradient = True

    @tf.custom_gradient
    def kept(value: Any, largest: Any) -> Any:
        return value, lambda upstream: (upstream, tf.constant([rank / 3, -rank / 3]))

    def step() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = kept(tf.convert_to_tensor(weight), tf.convert_to_tensor(largest))
        return tape.gradient(loss, [largest, weight])

    maxima, gradient = way(step)()
    assert maxima.numpy().tolist() == [np.float32((size - 1) / 3), 0.0]
    assert gradient.numpy() == size


# -- local sources ----------------------------------------------------------------------------------------------------


@pytest.mark.horovod("local-gradients", "tape-local")
@both_ways
@pytest.mark.parametrize("scale", [True, False])
def test_the_gradient_of_a_local_source_stays_on_its_rank(way: Callable, scale: bool, rank: int, size: int) -> None:
    shared, local = tf.Variable([1.0]), tf.Variable([2.0])

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared * local) * (rank + 1)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=scale)
        tape.register_local_source(local)
        return tape.gradient(loss, [local, shared])

    of_local, of_shared = way(step)()
    np.testing.assert_allclose(of_local, [(rank + 1) / (size if scale else 1)], rtol=1e-6)
    assert of_shared.numpy().tolist() == [size * (size + 1)]


def test_a_variable_does_not_become_local_in_the_place_of_one_that_is_gone(rank: int, size: int) -> None:
    reducer = GradientReducer(None, GradientOptions(), hvd.Sum)
    for _ in range(5):  # Python gives the id of the first to one of those that follow.
        reducer.register_local(tf.Variable(0.0))
        gc.collect()
        variables = [tf.Variable(0.0) for _ in range(20)]
        gradients = reducer.reduce([tf.constant(rank + 1.0)] * 20, variables)
        assert [float(gradient) for gradient in gradients] == [size * (size + 1) / 2] * 20


def test_a_local_source_may_be_sparse(rank: int, size: int) -> None:
    table = tf.Variable(tf.ones([4, 1]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [rank % 4]))
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(table)
    gradient = tape.gradient(loss, [table])[0]
    assert gradient.indices.numpy().tolist() == [rank % 4]
    np.testing.assert_allclose(gradient.values, [[1 / size]], rtol=1e-6)


def test_ranks_may_have_local_sources_of_other_shapes(rank: int, size: int) -> None:
    local, shared = tf.Variable(tf.ones([rank + 1])), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(local) * shared
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=False)
    tape.register_local_source(local)
    of_local, of_shared = tape.gradient(loss, [local, shared])
    assert of_local.numpy().tolist() == [1.0] * (rank + 1)
    assert of_shared.numpy() == size * (size + 1) / 2


# -- compression, names and errors ------------------------------------------------------------------------------------


@either_way
@pytest.mark.parametrize("name, wire", [("fp16", tf.float16), ("bf16", tf.bfloat16)])
def test_compressed_gradients_come_back_in_their_dtype(way: Callable, name: str, wire: Any, rank: int,
                                                       size: int) -> None:
    values = [1.0, 0.1, 0.7, 0.123]
    gradient, = quadratic(way, rank + 1.0, [tf.Variable(values)], compression=getattr(hvd.Compression, name))
    assert gradient.dtype == tf.float32
    np.testing.assert_allclose(gradient, np.array(values) * (size + 1) / 2, rtol=1e-2)
    np.testing.assert_array_equal(gradient, tf.cast(tf.cast(gradient, wire), tf.float32))


def test_a_tape_in_a_loop_over_a_dataset(rank: int, size: int) -> None:
    variable = tf.Variable(0.0)

    @tf.function
    def train(data: Any) -> None:
        for x in data:
            with tf.GradientTape() as tape:
                loss = variable * x
            gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variable)
            variable.assign_add(gradient)

    train(tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0]).map(lambda x: x * (rank + 1)))
    assert variable.numpy() == 6 * size * (size + 1) / 2


def test_many_gradients_of_all_sizes(rank: int, size: int) -> None:
    # Small ones are joined in the graph, and all together they make more than one bucket of 16 MiB.
    variables = [tf.Variable(tf.fill([n], float(n))) for n in (1, 3_000_000, 10, 2_000_000, 100, 20_000, 5)]
    gradients = quadratic(in_graph, rank + 1.0, variables, op=hvd.Sum)
    for variable, gradient in zip(variables, gradients):
        assert gradient.shape == variable.shape
        assert np.all(gradient.numpy() == variable.shape[0] * size * (size + 1) / 2)


def test_double_wrapping_is_refused() -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(ValueError, match="is already a DistributedGradientTape"):
        hvd.DistributedGradientTape(tape)


@either_way
def test_a_disagreement_names_the_variable(way: Callable, rank: int, size: int, restart: Callable) -> None:
    same, odd = tf.Variable([1.0], name="same"), tf.Variable(tf.ones([2 + rank]), name="odd_one")
    with pytest.raises(tf.errors.OpError, match=r"shape of tensor \d \(odd_one.*\): \(2,\) on ranks \[0\]; "):
        quadratic(way, 1.0, [same, odd])
    if way is in_graph:
        restart()
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == size


@pytest.mark.horovod("predivide", "groups")
@pytest.mark.parametrize("arguments, text", [
    ({"gradient_predivide_factor": 2.0, "op": mpistrat.Sum}, "gradient_predivide_factor not supported with op"),
    ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be > 0"),
    ({"groups": 0}, "variables. Received: groups=0"),
    ({"groups": "all"}, "groups should be"),
    ({"num_groups": -1}, "groups should be"),
    ({"process_set": object()}, "process_set must be a ProcessSet"),
    ({"gradtape": 3}, r"takes the tape of `with tf.GradientTape\(\) as tape:`. Received: 3"),
    ({"check_weights": "no"}, r"\(check_weights=\) must be True or False. Received: 'no'")],
    ids=lambda value: next(iter(value)))
def test_arguments_are_checked(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.DistributedGradientTape(**{"gradtape": tf.GradientTape(), **arguments})


@pytest.mark.horovod("tape-arguments")
def test_horovods_other_arguments_are_taken(rank: int, size: int) -> None:
    variable = tf.Variable([1.0])
    gradient, = quadratic(eagerly, rank + 1.0, [variable], device_dense="/cpu:0", device_sparse="/cpu:0", num_groups=2)
    np.testing.assert_allclose(gradient, [(size + 1) / 2], rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = variable * (rank + 1.0)
    gradient, = hvd.DistributedGradientTape(tape).gradient(loss, [variable], use_generic_names=True)
    np.testing.assert_allclose(gradient, [(size + 1) / 2], rtol=1e-6)
