"""Buckets, packing, and the one place that makes an average of a sum."""

import math
import random

import numpy as np
import pytest

from mpistrat.fusion import FusionBuffer, Scale, pack, plan_buckets, scaled_copy, unpack
from mpistrat.memory import ALIGNMENT


def dtype_named(name: str) -> np.dtype:
    """The dtype of that name; bfloat16 comes with a package that may be missing."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def scaled(values: np.ndarray, scale: Scale) -> np.ndarray:
    """The scaled values in new memory."""
    target = np.empty_like(values)
    scale.apply(values, target)
    return target


# -- buckets ----------------------------------------------------------------------------------------------------------


def test_nothing_makes_no_bucket() -> None:
    assert plan_buckets([], 100) == []


def test_members_of_one_key_share_a_bucket_up_to_the_limit() -> None:
    assert plan_buckets([("f", 4)] * 5, 8) == [[0, 1], [2, 3], [4]]


def test_a_bucket_may_be_exactly_full() -> None:
    assert plan_buckets([("f", 4), ("f", 4)], 8) == [[0, 1]]
    assert plan_buckets([("f", 4), ("f", 4)], 7) == [[0], [1]]


def test_different_keys_never_share_a_bucket() -> None:
    assert plan_buckets([("f", 1), ("h", 1)], 100) == [[0], [1]]


def test_interleaved_keys_are_fused_by_looking_ahead() -> None:
    assert plan_buckets([("f", 4), ("h", 2), ("f", 4), ("h", 2)], 16) == [[0, 2], [1, 3]]


def test_a_smaller_member_is_taken_past_one_that_does_not_fit() -> None:
    assert plan_buckets([("f", 2), ("f", 7), ("f", 6)], 9) == [[0, 1], [2]]
    assert plan_buckets([("f", 2), ("f", 6), ("f", 1)], 7) == [[0], [1, 2]]
    assert plan_buckets([("f", 1), ("f", 7), ("f", 1)], 8) == [[0, 1], [2]]
    assert plan_buckets([("f", 3), ("f", 6), ("f", 1)], 9) == [[0, 1], [2]]
    assert plan_buckets([("f", 3), ("h", 3), ("f", 4), ("f", 3)], 9) == [[0, 2], [1], [3]]


def test_looking_ahead_ends_when_taken_and_skipped_exceed_the_limit() -> None:
    members = [("f", 4), ("h", 8), ("f", 4)]
    assert plan_buckets(members, 12) == [[0, 2], [1]]
    assert plan_buckets(members, 11) == [[0], [1], [2]]


def test_a_huge_member_has_a_bucket_of_its_own() -> None:
    assert plan_buckets([("f", 1), ("f", 1000), ("f", 1)], 10) == [[0], [1], [2]]
    assert plan_buckets([("f", 1000)], 10) == [[0]]


def test_with_limit_0_nothing_is_fused() -> None:
    assert plan_buckets([("f", 4)] * 4, 0) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_covers_all_members_once_within_key_and_limit(seed: int) -> None:
    source = random.Random(seed)
    limit = source.choice([0, 1, 10, 100])
    members = [(source.choice("fhi"), source.randrange(1, 40)) for _ in range(source.randrange(60))]
    plan = plan_buckets(members, limit)
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(members)))
    assert [bucket[0] for bucket in plan] == sorted(bucket[0] for bucket in plan)
    for bucket in plan:
        assert bucket == sorted(bucket)
        assert len({members[index][0] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(members[index][1] for index in bucket) <= limit


# -- packing ----------------------------------------------------------------------------------------------------------


def test_what_is_packed_is_unpacked() -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.array(7.0), np.empty((0, 5)), np.array([[8.0]])]
    packed = FusionBuffer().view(8, np.dtype(np.float64))
    pack(arrays, 1.0, packed)
    np.testing.assert_array_equal(packed, [0, 1, 2, 3, 4, 5, 7, 8])
    results = [np.full_like(array, -1) for array in arrays]
    unpack(packed, Scale(), results)
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(result, array)


def test_packing_multiplies_every_value() -> None:
    packed = np.empty(3)
    pack([np.array([1.0, 2.0]), np.array(4.0)], 0.5, packed)
    np.testing.assert_array_equal(packed, [0.5, 1, 2])


def test_unpacking_scales_every_value_once() -> None:
    results = [np.empty(2), np.empty(())]
    unpack(np.array([2.0, 4.0, 8.0]), Scale(3.0, 2), results)
    np.testing.assert_array_equal(results[0], [3, 6])
    np.testing.assert_array_equal(results[1], 12)


def test_packing_leaves_the_arrays_as_they_are() -> None:
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    pack([array], 2.0, np.empty(2))
    np.testing.assert_array_equal(array, [1, 2])


def test_a_buffer_is_the_same_memory_until_it_must_grow() -> None:
    buffer = FusionBuffer()
    first = buffer.view(100, np.dtype(np.float32))
    second = buffer.view(10, np.dtype(np.float64))
    third = buffer.view(101, np.dtype(np.float32))
    assert (first.shape, second.shape, third.shape) == ((100,), (10,), (101,))
    assert first.ctypes.data == second.ctypes.data
    assert not np.shares_memory(first, third)


@pytest.mark.parametrize("elements", [0, 1, 3, 1000])
def test_a_buffer_is_aligned(elements: int) -> None:
    view = FusionBuffer().view(elements, np.dtype(np.float64))
    assert view.shape == (elements,)
    assert not elements or view.ctypes.data % ALIGNMENT == 0


# -- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "divisor", "identity"), [(1.0, 1, True), (2.0, 1, False), (1.0, 2, False),
                                                             (2.0, 2, False)])
def test_only_times_one_by_one_is_the_identity(factor: float, divisor: int, identity: bool) -> None:
    assert Scale(factor, divisor).is_identity == identity


@pytest.mark.parametrize("ranks", [3, 7, 49, 98, 103])
def test_an_integer_average_of_equal_values_is_that_value(ranks: int) -> None:
    values = np.array([0, 1, -1, 1234567], np.int64)
    np.testing.assert_array_equal(scaled(values * ranks, Scale(1.0, ranks)), values)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_an_integer_average_is_truncated_toward_zero(dtype: type) -> None:
    result = scaled(np.array([-7, -4, -1, 1, 4, 7], dtype), Scale(1.0, 4))
    np.testing.assert_array_equal(result, [-1, -1, 0, 0, 1, 1])
    assert result.dtype == dtype


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("ranks", [2, 3, 127, 128, 200, 255, 256, 300])
def test_small_integers_are_divided_by_more_ranks_than_they_can_count(dtype: type, ranks: int) -> None:
    info = np.iinfo(dtype)
    values: np.ndarray = np.arange(info.min, info.max + 1).astype(dtype)
    np.testing.assert_array_equal(scaled(values, Scale(1.0, ranks)), [math.trunc(int(v) / ranks) for v in values])


def test_large_integers_are_divided_exactly() -> None:
    values = [2**62 + 2, -2**63, 2**63 - 1, 2**53 + 3]
    np.testing.assert_array_equal(scaled(np.array(values, np.int64), Scale(1.0, 2)),
                                  [2**61 + 1, -2**62, 2**62 - 1, 2**52 + 1])


def test_uint64_is_divided_exactly_over_its_whole_range() -> None:
    values = np.array([2**64 - 1, 2**63 + 3, 5, 0], np.uint64)
    np.testing.assert_array_equal(scaled(values, Scale(1.0, 3)),
                                  np.array([(2**64 - 1) // 3, (2**63 + 3) // 3, 1, 0], np.uint64))


def test_integers_times_a_factor_are_truncated_toward_zero() -> None:
    np.testing.assert_array_equal(scaled(np.array([-3, 3, 5], np.int32), Scale(0.5, 1)), [-1, 1, 2])
    np.testing.assert_array_equal(scaled(np.array([-3, 3, 5], np.int32), Scale(2.0, 4)), [-1, 1, 2])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_scaled_in_float32_and_rounded_once(name: str) -> None:
    values = np.arange(200).astype(dtype_named(name))
    result = scaled(values, Scale(2.0, 3))
    assert result.dtype == values.dtype
    np.testing.assert_array_equal(result, (values.astype(np.float32) * np.float32(2 / 3)).astype(values.dtype))
    # In half precision throughout, some would come out otherwise; without that this test would say nothing.
    assert (result != values * values.dtype.type(2 / 3)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_floats_are_multiplied_in_their_own_precision(dtype: type) -> None:
    values: np.ndarray = np.array([1.5, -3, 1e30]).astype(dtype)
    result = scaled(values, Scale(1.0, 4))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, values / 4)


def test_nan_and_infinities_stay() -> None:
    np.testing.assert_array_equal(scaled(np.array([np.nan, np.inf, -np.inf]), Scale(1.0, 2)),
                                  [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("name", ["int8", "int64", "uint64", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("scale", [Scale(), Scale(1.0, 3), Scale(0.5, 1)], ids=["identity", "average", "factor"])
def test_scaling_may_be_done_in_place(name: str, scale: Scale) -> None:
    values = np.array([0, 1, 50, 100]).astype(dtype_named(name))
    expected = scaled(values, scale)
    scale.apply(values, values)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["bool", "int32", "float16", "float64"])
def test_a_copy_with_scale_1_is_a_copy(name: str) -> None:
    values = np.array([0, 1, 1, 0]).astype(name)
    target = np.empty_like(values)
    scaled_copy(values, 1.0, target)
    np.testing.assert_array_equal(target, values)
