"""Reduce-scatter, all-to-all, grouped gathers and Adasum on arrays and tensors, against numpy."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.core.errors import InvalidRequestError, MismatchError
from mpistrat.core.rows import rows_of_ranks

from ..support.adasum import adasum_of
from .helpers import both_ways

DTYPES = ["int32", "int64", "float16", "float32", "float64", ml_dtypes.bfloat16]


def of_rank(rank: int, shape: tuple[int, ...], dtype: object = "float32") -> np.ndarray:
    """Small whole numbers, other ones on every rank."""
    return ((np.arange(math.prod(shape)) * 7 + 3 * rank) % 11 + rank).reshape(shape).astype(dtype)


def own_rows(total: np.ndarray, rank: int, size: int) -> np.ndarray:
    ends = np.cumsum(rows_of_ranks(len(total), size))
    return total[ends[rank] - rows_of_ranks(len(total), size)[rank]:ends[rank]]


# -- reduce-scatter -------------------------------------------------------------------------------------------------


@pytest.mark.horovod("dtypes-reducescatter", "reducescatter")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(1,), (5, 3), (12,), (0, 2), (70_001, 2)], ids=str)
def test_each_rank_gets_its_rows_of_the_sum(dtype: object, shape: tuple, rank: int, size: int) -> None:
    total = np.sum([of_rank(r, shape, np.float64) for r in range(size)], 0).astype(dtype)
    result = mpistrat.reducescatter(of_rank(rank, shape, dtype), op=mpistrat.Sum)
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result, own_rows(total, rank, size))


@pytest.mark.horovod("reducescatter")
def test_factors_and_averages_are_those_of_allreduce(rank: int, size: int) -> None:
    values = np.random.default_rng(rank).normal(size=(9, 4)).astype(np.float32)
    for op in (mpistrat.Sum, mpistrat.Average):
        whole = mpistrat.allreduce(values, op=op, prescale_factor=0.5, postscale_factor=3.0)
        rows = mpistrat.reducescatter(values, op=op, prescale_factor=0.5, postscale_factor=3.0)
        np.testing.assert_allclose(rows, own_rows(whole, rank, size), rtol=1e-6)


@pytest.mark.horovod("reducescatter-prescale")
def test_factors_apply_above_the_fusion_threshold(rank: int, size: int, restart: Callable,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MPISTRAT_FUSION_THRESHOLD", "1024")
        restart()
        values = of_rank(rank, (5000, 2))
        rows = mpistrat.reducescatter(values, op=mpistrat.Sum, prescale_factor=0.5, postscale_factor=4.0)
    restart()
    total = np.sum([of_rank(r, (5000, 2)) for r in range(size)], 0)
    np.testing.assert_array_equal(rows, 2 * own_rows(total, rank, size))


@pytest.mark.horovod("grouped-reducescatter")
def test_groups_may_have_several_dtypes(rank: int, size: int) -> None:
    results = mpistrat.grouped_reducescatter([of_rank(rank, (4,)), of_rank(rank, (5, 2), "int64")], op=mpistrat.Sum)
    for result, shape, dtype in zip(results, ((4,), (5, 2)), ("float32", "int64")):
        np.testing.assert_array_equal(
            result, own_rows(np.sum([of_rank(r, shape, dtype) for r in range(size)], 0), rank, size))
    assert mpistrat.grouped_reducescatter([]) == []


@pytest.mark.horovod("static-shapes")
def test_static_shapes_leave_the_rows_open(size: int) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        scattered, gathered, exchanged = hvd.reducescatter(x), hvd.grouped_allgather([x])[0], hvd.alltoall(x)
        for result in (scattered, gathered, exchanged):
            assert result.shape.as_list() == [None, 3]
        return scattered

    step(tf.ones([2 * size, 3]))


# -- all-to-all -----------------------------------------------------------------------------------------------------


def splits_of(rank: int, size: int) -> list[int]:
    return [(rank + 2 * other) % 3 for other in range(size)]


def received_by(rank: int, size: int, columns: int, dtype: object) -> tuple[np.ndarray, list[int]]:
    blocks = []
    for sender in range(size):
        splits = splits_of(sender, size)
        first = sum(splits[:rank])
        blocks.append(of_rank(sender, (sum(splits) + 1, columns), dtype)[first:first + splits[rank]])
    return np.concatenate(blocks), [len(block) for block in blocks]


@pytest.mark.horovod("alltoall-splits")
@pytest.mark.parametrize("dtype", ["uint8", "bool", "complex64", *DTYPES], ids=lambda d: np.dtype(d).name)
def test_rows_go_to_the_ranks_of_the_splits(dtype: object, rank: int, size: int) -> None:
    splits = splits_of(rank, size)
    rows, received = mpistrat.alltoall(of_rank(rank, (sum(splits) + 1, 3), dtype), splits)
    expected, counts = received_by(rank, size, 3, dtype)
    assert rows.dtype == np.dtype(dtype) and received.dtype == np.int32
    np.testing.assert_array_equal(rows, expected)
    assert received.tolist() == counts


@pytest.mark.horovod("alltoall")
def test_without_splits_all_ranks_get_as_many_rows(rank: int, size: int) -> None:
    rows = mpistrat.alltoall(np.arange(2 * size) + 100 * rank)
    assert rows.tolist() == [100 * sender + 2 * rank + i for sender in range(size) for i in range(2)]
    assert mpistrat.alltoall(np.ones((0, 2))).shape == (0, 2)


@pytest.mark.horovod("alltoall-splits", "alltoall-gradient")
@both_ways
def test_tensors_are_exchanged_and_have_gradients(way: Callable, rank: int, size: int) -> None:
    splits = splits_of(rank, size)
    value = tf.Variable(of_rank(rank, (sum(splits) + 1, 2)))

    def step() -> tuple:
        with tf.GradientTape() as tape:
            rows, received = hvd.alltoall(value, splits, name="exchange")
        return rows, received, tape.gradient(rows, value, output_gradients=tf.fill(tf.shape(rows), 1.0 + rank))

    rows, received, gradient = way(step)()
    expected, counts = received_by(rank, size, 2, "float32")
    np.testing.assert_array_equal(rows, expected)
    assert received.numpy().tolist() == counts
    receivers = [float(1 + other) for other in range(size) for _ in range(splits[other])]
    np.testing.assert_array_equal(gradient, np.stack([[*receivers, 0.0]] * 2, 1))


@pytest.mark.parametrize("wrong", [[0.5, 1.5], ["1", "1"]], ids=["fractions", "strings"])
def test_splits_of_tensors_are_integers(wrong: list, size: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="the splits of an alltoall must be 32-bit integers"):
        hvd.alltoall(tf.ones([2, 2]), wrong)


@both_ways
def test_splits_beyond_32_bits_are_not_cut(way: Callable, rank: int, size: int, restart: Callable) -> None:
    splits = tf.constant([2**32 + 1] + [0] * (size - 1), tf.int64)
    with pytest.raises(tf.errors.OpError, match=rf"the splits of rank 0, \[{2**31 - 1}, .*more than the 2 rows"):
        way(lambda: hvd.alltoall(tf.ones([2, 2]), splits, name="beyond"))()


@pytest.mark.horovod("alltoall-errors")
@both_ways
def test_wrong_splits_are_errors_on_all_ranks(way: Callable, rank: int, size: int, restart: Callable) -> None:
    for wrong, text in (([-1] + [0] * (size - 1), "rank 0 are negative"), ([9] * size, "more than the 2 rows")):
        splits = wrong if rank == 0 else [0] * size
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            way(lambda splits=splits: hvd.alltoall(tf.ones([2, 2]), splits, name="wrong"))()
    assert hvd.allreduce(1.0, op=hvd.Sum) == size


def test_ranks_that_disagree_get_an_error_that_names_them(rank: int) -> None:
    with pytest.raises(MismatchError, match=r"the ranks disagree on shape of tensor 0: \(any, 3\) on ranks \[0\]"):
        mpistrat.alltoall(np.ones((6, 2 if rank else 3)))
    with pytest.raises(MismatchError, match=r"reducescatter: the ranks disagree on shape: \(1,\) on ranks \[0\]"):
        mpistrat.reducescatter(np.ones(2 if rank else 1))
    with pytest.raises(MismatchError, match=r"kind of collective: alltoall on ranks \[0\]; reducescatter on ranks"):
        (mpistrat.reducescatter if rank else mpistrat.alltoall)(np.ones(6), name="same")


# -- grouped all-gather, broadcast_ ------------------------------------------------------------------------------------


@pytest.mark.horovod("grouped-allgather")
@both_ways
def test_gathers_in_groups(way: Callable, rank: int, size: int) -> None:
    first, second = tf.Variable(of_rank(rank, (rank + 1, 2))), tf.Variable(of_rank(rank, (2,)))

    def step() -> tuple:
        with tf.GradientTape() as tape:
            gathered = hvd.grouped_allgather([first, tf.constant([rank]), second], name="grouped")
        return gathered, tape.gradient([gathered[0], gathered[2]], [first, second])

    gathered, gradients = way(step)()
    np.testing.assert_array_equal(gathered[0], np.concatenate([of_rank(r, (r + 1, 2)) for r in range(size)]))
    assert gathered[1].numpy().tolist() == list(range(size))
    np.testing.assert_array_equal(gathered[2], np.concatenate([of_rank(r, (2,)) for r in range(size)]))
    np.testing.assert_array_equal(gradients[0], np.ones((rank + 1, 2)))
    np.testing.assert_array_equal(gradients[1], np.ones(2))
    assert hvd.grouped_allgather([]) == []


@pytest.mark.horovod("broadcast-in-place")
@both_ways
def test_variables_are_assigned_in_place(way: Callable, rank: int, size: int) -> None:
    variables = [tf.Variable(of_rank(rank, (3,))), tf.Variable(rank)]
    values = way(lambda: hvd.broadcast_(variables, size - 1, name="assigned"))()
    for value, variable, expected in zip(values, variables, (of_rank(size - 1, (3,)), size - 1), strict=True):
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(variable, expected)


# -- Adasum -----------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("dtypes-adasum", "adasum", "adasum-ranks")
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2),
                                         (ml_dtypes.bfloat16, 1e-1)], ids=["f64", "f32", "f16", "bf16"])
def test_adasum_is_the_papers_formula_per_tensor(dtype: object, rtol: float, rank: int, size: int) -> None:
    def tensors(r: int) -> list[np.ndarray]:
        random = np.random.default_rng(r)
        return [random.normal(size=shape).astype(dtype) for shape in ((5, 3), (1,), (), (1000,))]

    results = mpistrat.grouped_allreduce(tensors(rank), op=mpistrat.Adasum)
    for i, result in enumerate(results):
        expected = adasum_of([np.asarray(tensors(r)[i], np.float64) for r in range(size)])
        np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=rtol, atol=rtol)
    digests = mpistrat.allgather_object([result.tobytes() for result in results])
    assert all(other == digests[0] for other in digests)


@pytest.mark.horovod("adasum-sets")
def test_adasum_in_a_process_set_is_that_of_its_ranks(rank: int, size: int) -> None:
    process_set = mpistrat.add_process_set(range(1, size))
    if process_set.included():
        parts = [np.random.default_rng(r).normal(size=7) for r in process_set.ranks]
        result = hvd.allreduce(tf.constant(parts[process_set.rank()]), op=hvd.Adasum, process_set=process_set)
        np.testing.assert_allclose(result, adasum_of(parts), rtol=1e-12)
    mpistrat.remove_process_set(process_set)


@pytest.mark.horovod("adasum")
@both_ways
def test_adasum_of_many_small_tensors_is_per_tensor(way: Callable, rank: int, size: int) -> None:
    values = [of_rank(rank, (3,)) * (i + 1) for i in range(5)]
    reduced = way(lambda: hvd.grouped_allreduce([tf.constant(v) for v in values], op=hvd.Adasum, prescale_factor=2.0,
                                                postscale_factor=0.25, name="adasum"))()
    for i, result in enumerate(reduced):
        expected = adasum_of([2.0 * of_rank(r, (3,), np.float64) * (i + 1) for r in range(size)]) / 4
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.horovod("reducescatter-op")
def test_wrong_operations_are_refused() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="reducescatter supports Average and Sum") as raised:
        hvd.reducescatter(tf.ones([2]), op=hvd.Min)
    assert isinstance(raised.value, InvalidRequestError)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not take"):
        hvd.alltoall(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0])))
