"""Scale, the one place that makes an average of a sum, and scaled_copy."""

import math

import numpy as np
import pytest

from mpistrat.scale import Scale, divided_before, scaled_copy


def dtype_named(name: str) -> np.dtype:
    """The dtype of that name; bfloat16 comes with a package that may be missing."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def scaled(values: np.ndarray, scale: Scale) -> np.ndarray:
    """The scaled values in new memory."""
    target = np.empty_like(values)
    scale.apply(values, target)
    return target


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("ranks", [2, 8, 16384])
def test_what_is_divided_before_has_the_same_average(dtype: type, ranks: int) -> None:
    before, after = divided_before(Scale(3.0, ranks), np.dtype(dtype))
    assert (before, after.factor, after.divisor) == (1 / ranks, 3.0, 1)
    values = (np.random.default_rng(0).normal(size=(5, 100)) * 10.0 ** np.arange(-20, 30, 10)[:, None]).astype(dtype)
    divided = np.add.accumulate(scaled(values, Scale(before)))
    np.testing.assert_array_equal(divided, scaled(np.add.accumulate(values), Scale(1.0, ranks)))


@pytest.mark.parametrize(("ranks", "name"), [(3, "float32"), (2, "int32"), (2, "uint8"), (2, "float16"),
                                             (2, "bfloat16")])
def test_what_would_be_rounded_otherwise_is_not_divided_before(ranks: int, name: str) -> None:
    scale = Scale(1.0, ranks)
    assert divided_before(scale, dtype_named(name)) == (1.0, scale)


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
