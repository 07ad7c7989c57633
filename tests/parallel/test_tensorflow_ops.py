"""mpistrat.tensorflow's collectives on every rank: eager and in tf.function, their gradients, and their errors."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.core.handle import Entry
from mpistrat.tensorflow import ops as tensor_ops

from .helpers import both_ways, eagerly, either_way, in_graph

INTEGERS = [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64]
HALVES = [tf.float16, tf.bfloat16]
NUMERIC = [*INTEGERS, *HALVES, tf.float32, tf.float64, tf.complex64, tf.complex128]


def dtype_name(value: Any) -> str:
    return value.name


def of_rank(rank: int, dtype: Any) -> Any:
    """Small whole numbers that every dtype holds, other ones on every rank."""
    return tf.cast(tf.range(1, 8) + rank, dtype)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("dtypes-allreduce")
@either_way
@pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
def test_allreduce_of_every_numeric_dtype(way: Callable, dtype: Any, rank: int, size: int) -> None:
    result = way(lambda x: hvd.allreduce(x, op=hvd.Sum))(of_rank(rank, dtype))
    assert result.dtype == dtype
    expected = tf.cast(tf.add_n([tf.range(1, 8) + r for r in range(size)]), dtype)
    np.testing.assert_array_equal(result.numpy(), expected.numpy())


@pytest.mark.horovod("dtypes-gather", "broadcast")
@either_way
@pytest.mark.parametrize("dtype", [*NUMERIC, tf.bool], ids=dtype_name)
def test_allgather_and_broadcast_of_every_dtype(way: Callable, dtype: Any, rank: int, size: int) -> None:
    gathered, sent = way(lambda x: (hvd.allgather(x), hvd.broadcast(x, size - 1)))(of_rank(rank, dtype))
    assert gathered.dtype == sent.dtype == dtype
    expected = tf.concat([of_rank(r, dtype) for r in range(size)], axis=0)
    np.testing.assert_array_equal(gathered.numpy(), expected.numpy())
    np.testing.assert_array_equal(sent.numpy(), of_rank(size - 1, dtype).numpy())


@pytest.mark.horovod("allreduce", "allreduce-average")
@both_ways
def test_the_operations(way: Callable, rank: int, size: int) -> None:
    def step(x: Any) -> list[Any]:
        return [hvd.allreduce(x), hvd.allreduce(x, average=False),
                *[hvd.allreduce(x, op=op) for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)]]

    results = [result.numpy().item() for result in way(step)(tf.constant([rank + 1.0], tf.float64))]
    total = size * (size + 1) / 2
    product = float(np.prod(np.arange(1, size + 1)))
    np.testing.assert_allclose(results, [total / size, total, total / size, total, 1, size, product], rtol=1e-15)


@pytest.mark.horovod("precision-of-factors")
@either_way
def test_float64_keeps_its_precision(way: Callable, size: int) -> None:
    step = way(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.1))
    assert step(tf.constant(1.0, tf.float64)).numpy() == size * 0.1


@pytest.mark.horovod("scalars", "no-elements")
@either_way
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 1)], ids=str)
def test_scalars_and_empty_tensors(way: Callable, shape: tuple[int, ...], size: int) -> None:
    reduced, sent = way(lambda x: (hvd.allreduce(x, op=hvd.Sum), hvd.broadcast(x, 0)))(tf.ones(shape))
    assert reduced.shape == sent.shape == shape
    assert np.all(reduced.numpy() == size) and np.all(sent.numpy() == 1)


@either_way
@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "int4"])
def test_tensors_of_small_numbers_are_sent(way: Callable, name: str, rank: int, size: int) -> None:
    plain = tf.int8 if name == "int4" else tf.float32  # which TensorFlow casts to

    def send(x: Any) -> list:
        own = tf.cast(x, name)
        return [tf.cast(result, plain) for result in (
            hvd.broadcast(own, size - 1), hvd.allgather(own), *hvd.grouped_allgather([own, own]))]

    sent, *gathered = way(send)(tf.cast(tf.fill([2], rank), plain))
    assert sent.numpy().tolist() == [size - 1] * 2
    for result in gathered:
        assert result.numpy().tolist() == [r for r in range(size) for _ in range(2)]


@pytest.mark.horovod("allgather")
@both_ways
def test_allgather_of_different_numbers_of_rows(way: Callable, rank: int, size: int) -> None:
    result = way(hvd.allgather)(tf.fill([rank, 2], rank))
    np.testing.assert_array_equal(result.numpy(), np.repeat(np.arange(size), np.arange(size))[:, None].repeat(2, 1))


@both_ways
def test_whatever_becomes_a_tensor_is_taken(way: Callable, rank: int, size: int) -> None:
    variable = tf.Variable([1.0, 2.0])
    step = way(lambda: [hvd.allreduce(value, op=hvd.Sum) for value in (1.0, [1, 2], np.ones(2), variable)])
    assert [result.numpy().tolist() for result in step()] == [size, [size, 2 * size], [size, size], [size, 2 * size]]


@pytest.mark.horovod("grouped-allreduce")
@both_ways
def test_a_group_may_mix_dtypes_and_shapes(way: Callable, rank: int, size: int) -> None:
    # Small tensors of a dtype are joined in the graph, large ones are not.
    tensors = [tf.fill(shape, tf.cast(1 + rank, dtype)) for dtype in (tf.float32, tf.bfloat16, tf.int32)
               for shape in ((), (3, 2), (0,), (40_000,))]
    results = way(lambda *values: hvd.grouped_allreduce(values, op=hvd.Sum))(*tensors)
    assert [(r.dtype, r.shape) for r in results] == [(t.dtype, t.shape) for t in tensors]
    assert all(np.all(r.numpy() == size * (size + 1) // 2) for r in results)


@pytest.mark.horovod("grouped-allreduce")
def test_an_empty_group_gives_an_empty_list() -> None:
    assert hvd.grouped_allreduce([]) == []


@either_way
@pytest.mark.parametrize("make", [lambda: [], lambda: [None], lambda: [object()], lambda: [tf.constant(1.0)],
                                  lambda: [tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))]],
                         ids=["nothing", "None", "object", "tensor", "slices"])
def test_what_is_wrong_with_the_operation_is_said_whatever_the_tensors_are(way: Callable, make: Callable) -> None:
    tensors = make()
    with pytest.raises(ValueError, match=r"op must be one of Average, .*\. Received: 'mean'"):
        way(lambda: hvd.grouped_allreduce(tensors, op="mean"))()
    with pytest.raises(ValueError, match="supersedes average"):
        way(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, average=True))()


def test_a_group_may_be_a_tensor_whose_rows_it_is(rank: int, size: int) -> None:
    results = hvd.grouped_allreduce(tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1), op=hvd.Sum)
    total = size * (size + 1) / 2
    assert [row.numpy().tolist() for row in results] == [[total, 2 * total], [3 * total, 4 * total]]


def test_a_group_has_the_bits_that_its_tensors_have_alone(rank: int) -> None:
    generator = np.random.default_rng(rank)
    tensors = [tf.constant(generator.standard_normal(n), tf.float32) for n in (1, 10, 20_000, 3, 100_000, 7)]
    together = in_graph(lambda *values: hvd.grouped_allreduce(values))(*tensors)
    for one, tensor in zip(together, tensors):
        assert one.numpy().tobytes() == hvd.allreduce(tensor).numpy().tobytes()


# -- tf.IndexedSlices -------------------------------------------------------------------------------------------------


@pytest.mark.horovod("adasum-slices")
@both_ways
@pytest.mark.parametrize("grouped", [False, True])
def test_adasum_of_slices_is_refused_as_horovod_does(way: Callable, grouped: bool) -> None:
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
    with pytest.raises(NotImplementedError, match="Adasum reduction does not currently support sparse tensors"):
        way(lambda: hvd.grouped_allreduce([tf.constant(1.0), slices], op=hvd.Adasum) if grouped
            else hvd.allreduce(slices, op=hvd.Adasum))()


@pytest.fixture
def _counted_apart(rank: int) -> None:
    """The ranks have made different numbers of eager tensors, which TensorFlow counts and names by their numbers."""
    for number in range(rank):
        tf.constant(number)


@pytest.mark.usefixtures("_counted_apart")
@pytest.mark.parametrize("grouped", [False, True])
def test_tensors_that_were_made_outside_of_a_graph_are_reduced_in_it(grouped: bool, rank: int, size: int) -> None:
    tensor, total = tf.constant([1.0 + rank]), sum(1.0 + r for r in range(size))
    results = in_graph(lambda: hvd.grouped_allreduce([tensor, 2.0 * tensor], op=hvd.Sum) if grouped else
                       [hvd.allreduce(tensor, op=hvd.Sum), hvd.allreduce(2.0 * tensor, op=hvd.Sum)])()
    assert [result.numpy().tolist() for result in results] == [[total], [2 * total]]


@pytest.mark.usefixtures("_counted_apart")
def test_slices_that_were_made_outside_of_a_graph_are_reduced_in_it(rank: int, size: int) -> None:
    slices = tf.IndexedSlices(tf.constant([1.0 + rank]), tf.constant([rank]))
    result = in_graph(lambda: hvd.allreduce(slices, op=hvd.Sum).values)()
    assert result.numpy().tolist() == [1.0 + r for r in range(size)]


def slices_of(rank: int, dtype: Any = tf.float32) -> Any:
    """rank + 1 rows, with an index that all ranks have."""
    rows = tf.reshape(tf.cast(tf.range(2 * (rank + 1)), dtype) + tf.cast(10 * rank, dtype), [-1, 2])
    return tf.IndexedSlices(rows, tf.range(rank + 1, dtype=tf.int64), tf.constant([9, 2], tf.int64))


@pytest.mark.horovod("allreduce-slices")
@both_ways
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_slices_are_gathered(way: Callable, op: str, rank: int, size: int) -> None:
    result = way(lambda: hvd.allreduce(slices_of(rank), op=getattr(hvd, op)))()
    assert isinstance(result, tf.IndexedSlices)
    everybody = [slices_of(r) for r in range(size)]
    assert result.indices.numpy().tolist() == np.concatenate([s.indices for s in everybody]).tolist()
    divisor = size if op == "Average" else 1
    np.testing.assert_allclose(result.values, np.concatenate([s.values for s in everybody]) / divisor, rtol=1e-6)
    assert result.dense_shape.numpy().tolist() == [9, 2]
    dense = sum(tf.convert_to_tensor(s).numpy() for s in everybody) / divisor
    np.testing.assert_allclose(tf.convert_to_tensor(result), dense, rtol=1e-6)


@pytest.mark.horovod("grouped-allreduce")
@both_ways
def test_a_group_may_mix_dense_and_sparse_and_keeps_their_order(way: Callable, rank: int, size: int) -> None:
    def step() -> list[Any]:
        return hvd.grouped_allreduce(
            [tf.ones([2]), slices_of(rank), tf.fill([3], 2.0), slices_of(rank, tf.float64)], op=hvd.Sum)

    first, second, third, fourth = way(step)()
    assert first.numpy().tolist() == [size] * 2
    assert third.numpy().tolist() == [2 * size] * 3
    for result, dtype in ((second, tf.float32), (fourth, tf.float64)):
        assert isinstance(result, tf.IndexedSlices) and result.values.dtype == dtype
        np.testing.assert_array_equal(result.values, np.concatenate([slices_of(r, dtype).values for r in range(size)]))


@pytest.mark.horovod("allreduce-slices-refused")
@pytest.mark.parametrize("arguments, text", [
    ({"op": mpistrat.Min}, "can be reduced only with Average or Sum. Received: MIN"),
    ({"prescale_factor": 2.0}, "cannot scale tf.IndexedSlices"),
    ({"postscale_factor": 2.0}, "cannot scale tf.IndexedSlices")], ids=["op", "prescale", "postscale"])
def test_what_slices_cannot_do(arguments: dict, text: str, rank: int) -> None:
    with pytest.raises(NotImplementedError, match=text):
        hvd.allreduce(slices_of(rank), **arguments)


# -- gradients --------------------------------------------------------------------------------------------------------


def gradient_of(way: Callable, collective: Callable, x: Any, upstream: Any) -> Any:
    """d sum(collective(x) * upstream) / dx."""
    def step(value: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(collective(value) * weight)
        return tape.gradient(loss, value)

    return way(step)(x, upstream)


@pytest.mark.horovod("allreduce-gradient")
@both_ways
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16], ids=dtype_name)
def test_the_gradient_of_allreduce_is_reduced_likewise(way: Callable, dtype: Any, rank: int, size: int) -> None:
    x, upstream = tf.ones([3], dtype), tf.cast(tf.fill([3], rank + 1), dtype)
    total = size * (size + 1) / 2
    for arguments, expected in (({"op": hvd.Sum}, total), ({}, total / size),
                                ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}, total * 2)):
        gradient = gradient_of(way, lambda v, arguments=arguments: hvd.allreduce(v, **arguments), x, upstream)
        assert gradient.dtype == dtype
        tolerance = 1e-2 if dtype.size == 2 else 1e-7
        np.testing.assert_allclose(tf.cast(gradient, tf.float64), [expected] * 3, rtol=tolerance)


@both_ways
def test_the_gradient_of_a_float64_allreduce_keeps_its_precision(way: Callable, rank: int, size: int) -> None:
    upstream = tf.constant([1.0 + 1e-12 * (rank + 1)], tf.float64)
    gradient = gradient_of(way, lambda v: hvd.allreduce(v, op=hvd.Sum), tf.ones([1], tf.float64), upstream)
    assert gradient.numpy() == pytest.approx(size + 1e-12 * size * (size + 1) / 2, rel=1e-15)


def test_a_contrastive_loss_has_the_gradients_of_one_process(rank: int, size: int) -> None:
    # As docs/horovod.md says: each row is compared with the rows of all ranks.
    rows = [tf.constant(np.random.RandomState(r).randn(2 + r, 3), tf.float64) for r in range(size)]
    weights = tf.Variable(np.random.RandomState(99).randn(3, 2))

    def loss_of(own: Any, everybody: Any) -> Any:
        return tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(own, everybody, transpose_b=True), axis=1))

    with tf.GradientTape() as tape:
        z = rows[rank] @ weights
        loss = loss_of(z, hvd.allgather(size * z - tf.stop_gradient((size - 1) * z), name="contrastive"))
    own, = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
    with tf.GradientTape() as tape:
        everybody = [of_rank @ weights for of_rank in rows]
        total = sum(loss_of(z, tf.concat(everybody, 0)) for z in everybody) / size
    np.testing.assert_allclose(own.numpy(), tape.gradient(total, weights).numpy(), rtol=1e-12)


@both_ways
def test_compression_lets_gradients_through(way: Callable, rank: int, size: int) -> None:
    gradient = gradient_of(way, lambda v: hvd.allreduce(v, op=hvd.Sum, compression=hvd.Compression.fp16), tf.ones([2]),
                           tf.fill([2], rank + 1.0))
    assert gradient.dtype == tf.float32
    assert gradient.numpy().tolist() == [size * (size + 1) / 2] * 2


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("match-by-name")
def test_in_a_graph_ranks_may_have_their_collectives_in_other_orders(rank: int, size: int) -> None:
    names = [f"ordered{i}" for i in range(12)]
    random.Random(rank).shuffle(names)

    def step(x: Any) -> dict[str, Any]:
        return {name: hvd.allreduce(x + int(name[7:]), op=hvd.Sum, name=name) for name in names}

    graph = in_graph(step)
    for _ in range(3):
        results = {name: result.numpy() for name, result in graph(tf.constant(0.0)).items()}
        assert results == {f"ordered{i}": i * size for i in range(12)}


@pytest.mark.horovod("names-graph")
def test_a_name_used_twice_in_a_graph_is_made_unique(size: int) -> None:
    step = in_graph(lambda x: [hvd.allreduce(x * i, op=hvd.Sum, name="twice") for i in range(3)])
    assert [result.numpy() for result in step(tf.constant(1.0))] == [0, size, 2 * size]


def test_unnamed_collectives_of_one_tensor_are_told_apart(size: int) -> None:
    step = in_graph(lambda x: [hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Max), hvd.broadcast(x, 0)])
    assert [result.numpy() for result in step(tf.constant(1.0))] == [size, 1, 1]


@pytest.mark.horovod("ignore-name-scope")
def test_name_scopes_can_be_ignored(rank: int, size: int) -> None:
    def step(x: Any) -> Any:
        with tf.name_scope(f"scope_of_rank_{rank}"):
            return hvd.allreduce(x, op=hvd.Sum, name="meet", ignore_name_scope=True)

    assert in_graph(step)(tf.constant(1.0)).numpy() == size


# -- in graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("static-shapes")
def test_static_shapes_are_kept() -> None:
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec(None), tf.TensorSpec([2, 3])],
                 autograph=False)
    def step(batch: Any, anything: Any, known: Any) -> Any:
        results = {"reduce": hvd.allreduce(batch), "anything": hvd.allreduce(anything), "known": hvd.allreduce(known),
                   "gather": hvd.allgather(known), "broadcast": hvd.broadcast(batch, 0)}
        shapes.update({name: result.shape for name, result in results.items()})
        return results

    step(tf.ones([4, 3]), tf.ones([1]), tf.ones([2, 3]))
    assert shapes["reduce"].as_list() == shapes["broadcast"].as_list() == shapes["gather"].as_list() == [None, 3]
    assert shapes["known"].as_list() == [2, 3]
    assert shapes["anything"].rank is None


def test_shapes_that_are_not_known_may_change_from_step_to_step(rank: int, size: int) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec(None)], autograph=False)
    def step(a: Any, b: Any) -> Any:
        return [*hvd.grouped_allreduce([a, tf.ones([2]), b], op=hvd.Sum), hvd.allgather(b)]

    for rows in (3, 0, 50):
        results = step(tf.ones([rows, 2]), tf.ones([rows]))
        assert [r.shape.as_list() for r in results] == [[rows, 2], [2], [rows], [rows * size]]
        assert all(np.all(r.numpy() == size) for r in results[:3])


def test_a_branch_may_be_taken_on_all_ranks_by_a_reduced_condition(rank: int, size: int) -> None:
    @tf.function(autograph=False)
    def step(bad: Any) -> Any:
        some = hvd.allreduce(bad, op=hvd.Max)
        return tf.cond(some, lambda: hvd.allreduce(1, op=hvd.Sum), lambda: -1)

    assert step(tf.constant(rank == 0)).numpy() == size
    assert step(tf.constant(False)).numpy() == -1


def test_in_a_loop(rank: int, size: int) -> None:
    @tf.function
    def dependent(x: Any) -> Any:
        for _ in tf.range(5):
            x = hvd.allreduce(x, op=hvd.Sum)
        return x

    @tf.function
    def independent(x: Any) -> Any:
        results = tf.TensorArray(tf.float32, 20, element_shape=[])
        for i in tf.range(20):
            results = results.write(i, hvd.allreduce(x + tf.cast(i, tf.float32), op=hvd.Sum, name="in_a_loop"))
        return results.stack()

    assert dependent(tf.constant(1.0)).numpy() == size ** 5
    assert independent(tf.constant(0.0)).numpy().tolist() == [float(i * size) for i in range(20)]


def test_a_result_may_go_unused_on_one_rank(rank: int, size: int) -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        total = hvd.allreduce(x, op=hvd.Sum, name="unused_on_rank_0")
        return x * size if rank == 0 else total

    # More often than the number of results that are kept for a later use.
    for _ in range(150):
        assert step(tf.constant(1.0)).numpy() == size
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == size


def test_a_mismatch_of_an_unused_result_is_told_by_the_next_operation_at_the_latest(rank: int, size: int,
                                                                                    restart: Callable) -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        hvd.allreduce(x, name="unused_mismatch")
        return tf.constant(1)

    try:
        step(tf.ones([1 + rank]))
    except tf.errors.InvalidArgumentError as error:  # It was told while the last collective of the graph still waited.
        assert "unused_mismatch: the ranks disagree on shape" in str(error)
    with pytest.raises(mpistrat.EngineError, match="unused_mismatch: the ranks disagree on shape"):
        hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="after_unused")
    restart()
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == size


def test_a_dataset_may_be_reduced_in_a_map(size: int) -> None:
    data = tf.data.Dataset.range(5).map(lambda i: hvd.allreduce(i, op=hvd.Sum))
    assert [value.numpy() for value in data] == [i * size for i in range(5)]


# -- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("compression")
@either_way
@pytest.mark.parametrize("name, wire", [("none", tf.float32), ("fp16", tf.float16), ("bf16", tf.bfloat16)])
def test_compression_sets_the_dtype_on_the_wire(way: Callable, name: str, wire: Any, rank: int, size: int,
                                                submitted: list[Entry]) -> None:
    compression = getattr(hvd.Compression, name)
    value = tf.constant([1.0 + rank, 1 / 3], tf.float32)
    result = way(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=compression))(value)
    assert result.dtype == tf.float32
    assert [entry.request.tensors[0].dtype for entry in submitted] == [wire.name]
    third = tf.cast(tf.cast(1 / 3, wire), tf.float32) * size
    np.testing.assert_array_equal(result.numpy(), [size * (size + 1) / 2, tf.cast(tf.cast(third, wire), tf.float32)])


@pytest.mark.horovod("compression")
@pytest.mark.parametrize("dtype, wire", [(tf.float64, "float16"), (tf.float16, "float16"), (tf.bfloat16, "bfloat16"),
                                         (tf.int32, "int32"), (tf.complex64, "complex64")],
                         ids=lambda v: getattr(v, "name", v))
def test_compression_takes_wider_floating_point_only(dtype: Any, wire: str, submitted: list[Entry]) -> None:
    result = hvd.allreduce(tf.ones([2], dtype), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert result.dtype == dtype
    assert submitted[0].request.tensors[0].dtype == wire


@pytest.mark.horovod("compression-own")
def test_compression_may_be_any_class_with_its_two_methods(size: int) -> None:
    class Negated:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return -tensor, "context"

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            assert context == "context"
            return -tensor

    assert hvd.allreduce(tf.constant(2.0), op=hvd.Max, compression=Negated).numpy() == 2.0


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("mismatch")
def test_a_disagreement_in_a_graph_ends_the_engine(rank: int, size: int, restart: Callable) -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return hvd.allreduce(x, name="odd_graph")

    text = r"odd_graph: the ranks disagree on shape: \(1,\) on ranks \[0\]; "
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            step(tf.ones([1 + rank]))
        with pytest.raises(mpistrat.EngineError, match=text + ".*call shutdown.. and init.. on every rank"):
            hvd.allreduce(tf.constant(1.0))
        with pytest.raises(tf.errors.OpError, match=text):
            step(tf.ones([1]))
        restart()
        assert step(tf.ones([1])).numpy() == [1.0]


def test_a_disagreement_about_a_tensor_that_is_joined_names_that_tensor(rank: int, restart: Callable) -> None:
    step = in_graph(lambda *values: hvd.grouped_allreduce(values, name="joined"))
    # The shapes have the same number of elements, so the joined tensors are of one length.
    with pytest.raises(tf.errors.OpError, match=r"disagree on shape of tensor \d: \(6,\) on ranks \[0\]; \(2, 3\) on"):
        step(tf.ones([4]), tf.ones([6] if rank == 0 else [2, 3]), tf.ones([5]))
    restart()


@pytest.mark.horovod("names-groups")
def test_a_list_has_one_name_eagerly_and_in_a_graph(size: int) -> None:
    # In the graph the two travel as one array, eagerly each by itself.
    values = [tf.constant(1.0), tf.constant(2.0)]
    for way in (in_graph, eagerly, in_graph):
        first, second = way(lambda: hvd.grouped_allreduce(values, op=hvd.Sum, name="both_ways"))()
        assert (first.numpy(), second.numpy()) == (size, 2 * size)


def test_a_list_that_is_eager_on_one_rank_and_in_a_graph_on_the_others(rank: int, restart: Callable) -> None:
    way = eagerly if rank == 0 else in_graph
    with pytest.raises(tf.errors.OpError, match=r"disagree on how the list is packed .*: one by one on ranks .0.; "):
        way(lambda: hvd.grouped_allreduce([tf.constant(1.0), tf.constant(2.0)], name="mixed_ways"))()
    restart()


def test_shapes_that_one_rank_does_not_know_when_it_traces_are_not_said_to_differ(rank: int, restart: Callable) -> None:
    step = in_graph(lambda x: hvd.grouped_allreduce([x * 2.0, x * 3.0, tf.ones([3]) * x[0]], name="unknown_shapes"))
    concrete = step.get_concrete_function(tf.TensorSpec([None] if rank == 0 else [4], tf.float32))
    with pytest.raises(tf.errors.OpError, match=r"unknown_shapes: the ranks disagree on how the list is packed .* "
                                                r"shapes that are known or unknown .*on ranks \[0\]; "):
        concrete(tf.ones([4]))
    restart()


@pytest.mark.horovod("dtypes-others", "broadcast-root")
def test_a_request_that_makes_no_sense_is_refused(rank: int, size: int) -> None:
    calls = [(lambda: hvd.allreduce(tf.constant([True])), "Average of bool has no meaning"),
             (lambda: hvd.allgather(tf.constant(1.0)), "allgather needs at least one dimension"),
             (lambda: hvd.broadcast(tf.ones([1]), size), f"invalid root rank {size}"),
             (lambda: hvd.allgather(tf.constant(["text"])), "dtype object cannot be sent")]
    for call, text in calls:
        with pytest.raises(mpistrat.InvalidRequestError, match=text) as eager:
            call()
        assert isinstance(eager.value, tf.errors.InvalidArgumentError)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            in_graph(call)()
    for variables, root, text in (([], size, f"invalid root rank {size}"), (tf.Variable([1.0]), 0, "takes a list, as")):
        with pytest.raises(mpistrat.InvalidRequestError, match=text):
            hvd.broadcast_variables(variables, root)
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == size


@pytest.mark.horovod("duplicate-name")
def test_a_name_in_flight_is_an_invalid_argument(rank: int, size: int) -> None:
    if rank == 0:
        handle = mpistrat.allreduce_async(np.ones(1), name="tf_busy")
        with pytest.raises(tf.errors.InvalidArgumentError, match="the same name as another one that is") as raised:
            hvd.allreduce(tf.ones([1]), name="tf_busy")
        assert isinstance(raised.value, mpistrat.DuplicateNameError)
        mpistrat.barrier()
    else:
        mpistrat.barrier()
        handle = mpistrat.allreduce_async(np.ones(1), name="tf_busy")
    handle.wait()


@pytest.mark.horovod("allreduce-average")
def test_the_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="The op parameter supersedes average"):
        hvd.allreduce(tf.ones([1]), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="Adasum is for floating-point tensors"):
        hvd.allreduce(tf.constant([1]), op=hvd.Adasum)
    with pytest.raises(ValueError, match="process_set must be a ProcessSet"):
        hvd.allreduce(tf.ones([1]), process_set=object())
    with pytest.raises(ValueError, match="Use broadcast_object or allgather_object"):
        hvd.allreduce(np.array([None]))


# -- variables --------------------------------------------------------------------------------------------------------


def variables_of(rank: int) -> list[Any]:
    return [tf.Variable(tf.fill([3, 2], rank + 0.5)), tf.Variable(rank, dtype=tf.int64), tf.Variable([rank == 1, True]),
            tf.Variable(tf.cast([rank, rank], tf.bfloat16)), tf.Variable(tf.cast([rank], tf.float16)),
            tf.Variable(rank, dtype=tf.int32), tf.Variable(tf.zeros([0, 2]))]


@pytest.mark.horovod("broadcast-variables")
@both_ways
def test_broadcast_variables(way: Callable, rank: int, size: int) -> None:
    for root in range(size):
        variables = variables_of(rank)
        way(lambda variables=variables, root=root: hvd.broadcast_variables(variables, root))()
        for variable, expected in zip(variables, variables_of(root)):
            assert variable.dtype == expected.dtype
            np.testing.assert_array_equal(variable.numpy(), expected.numpy())


@pytest.mark.horovod("broadcast-variables")
def test_broadcast_variables_in_a_function_happens_at_each_call(rank: int) -> None:
    variable = tf.Variable(float(rank))
    send = in_graph(lambda: hvd.broadcast_variables([variable], root_rank=1))
    for value in (10.0, 20.0):
        variable.assign(value + rank)
        send()
        assert variable.numpy() == value + 1


def test_broadcast_variables_takes_keras_variables(rank: int) -> None:
    keras = pytest.importorskip("keras")
    variables = [keras.Variable(np.full(3, float(rank))), keras.Variable(rank, dtype="int32", trainable=False)]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [variable.numpy().tolist() for variable in variables] == [[1.0] * 3, 1]


def test_broadcast_variables_names_the_variable_that_differs(rank: int) -> None:
    variables = [tf.Variable(1.0, name="same"), tf.Variable(tf.ones([2 + rank]), name="kernel")]
    with pytest.raises(mpistrat.MismatchError, match=r"disagree on shape of tensor 1 \(kernel.*\): \(2,\) on ranks "):
        hvd.broadcast_variables(variables, root_rank=0)


def test_broadcast_variables_of_nothing_does_nothing(rank: int) -> None:
    hvd.broadcast_variables([], root_rank=0)


# -- hand-over without copies -----------------------------------------------------------------------------------------


def address_of(tensor: Any) -> int:
    return np.asarray(memoryview(tensor)).ctypes.data


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32], ids=dtype_name)
def test_eager_tensors_are_handed_over_and_back_without_a_copy(dtype: Any, submitted: list[Entry]) -> None:
    value = tf.ones([300_000], dtype)
    for call in (lambda: hvd.allreduce(value), lambda: hvd.broadcast(value, 0), lambda: hvd.allgather(value)):
        result = call()
        entry = submitted.pop()
        assert entry.arrays[0].ctypes.data == address_of(value)
        assert entry.handle.wait()[0].ctypes.data == address_of(result)
        assert address_of(result) % 64 == 0


def test_tensors_of_a_graph_are_handed_over_and_back_without_a_copy(submitted: list[Entry]) -> None:
    seen = {}

    def look(name: str, tensor: Any) -> Any:
        def note(array: np.ndarray) -> np.int32:
            seen[name] = array.ctypes.data
            return np.int32(0)
        return tf.numpy_function(note, [tensor], tf.int32)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        value = x * 2.0
        results = [hvd.allreduce(value), hvd.broadcast(value, 0), hvd.allgather(value)]
        return [look("value", value), *[look(str(i), result) for i, result in enumerate(results)]]

    step(tf.ones([300_000]))
    assert len(submitted) == 3
    for i, entry in enumerate(submitted):
        assert entry.arrays[0].ctypes.data == seen["value"]
        assert entry.handle.wait()[0].ctypes.data == seen[str(i)]


def test_memory_is_used_again_when_nobody_has_it_any_more(submitted: list[Entry]) -> None:
    value = tf.ones([300_000])
    kept = hvd.allreduce(value, op=hvd.Max)
    addresses = set()
    for i in range(20):
        result = hvd.allreduce(value * i, op=hvd.Max)
        assert result.numpy()[0] == i
        addresses.add(address_of(result))
        submitted.clear()
        del result
    assert len(addresses) <= 3
    assert address_of(kept) not in addresses
    assert np.all(kept.numpy() == 1)


# -- many calls -------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_many_single_calls_in_one_function_are_a_hint_once_on_rank_0(rank: int, size: int,
                                                                     monkeypatch: pytest.MonkeyPatch,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tensor_ops, "_hints", [])

    @tf.function
    def slow_step(values: Any) -> Any:
        return [hvd.allreduce(value, op=hvd.Sum) for value in tf.unstack(values)]

    @tf.function
    def other(values: Any) -> Any:
        return [hvd.allreduce(value, op=hvd.Sum) for value in tf.unstack(values)]

    values = tf.reshape(tf.range(2.0 * tensor_ops.MANY), (tensor_ops.MANY, 2))
    for step in (slow_step, other):
        np.testing.assert_array_equal(step(values), size * values)
    hints = [record.getMessage() for record in caplog.records if "grouped_allreduce" in record.getMessage()]
    assert len(hints) == (1 if rank == 0 and size > 1 else 0)
    assert all(hint.startswith("mpistrat: slow_step() calls allreduce separately for 32 or more") for hint in hints)


@pytest.mark.parametrize("reduce", [
    lambda values: [hvd.allreduce(value) for value in values[1:]],
    lambda values: [hvd.allreduce(tf.tile(value, [2 ** 14])) for value in values],
    lambda values: hvd.grouped_allreduce(values)], ids=["few", "large", "grouped"])
def test_few_calls_large_tensors_and_one_list_are_no_hint(reduce: Callable, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tensor_ops, "_hints", [])
    in_graph(lambda values: reduce(tf.unstack(values)))(tf.ones((tensor_ops.MANY, 2)))
    assert not [record for record in caplog.records if record.name == tensor_ops.logger.name]
