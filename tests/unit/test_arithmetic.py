"""The arithmetic of a reduction: what the results of few ranks in tests/parallel do not show."""

import math

import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale, combine, divided_before
from mpistrat.core.request import ReduceOp

SUM, MIN, MAX, PRODUCT = ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
HALVES = ["float16", "bfloat16"]
FLOATS = ["float32", "float64", "longdouble"]


def dtype_named(name: str) -> np.dtype:
    """The dtype of that name; bfloat16 comes with a package that may be missing."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def combined(parts: list[np.ndarray], op: ReduceOp, scale: Scale = IDENTITY) -> np.ndarray:
    target = np.full_like(parts[0], 1)
    combine(parts, op, target, scale)
    return target


@pytest.mark.parametrize("name", HALVES + FLOATS)
@pytest.mark.parametrize("op", [SUM, MIN, MAX, PRODUCT])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_of_any_rank_wins(name: str, op: ReduceOp, place: int) -> None:
    parts = [np.array([1.0]).astype(dtype_named(name)) for _ in range(3)]
    parts[place][0] = np.nan
    assert np.isnan(combined(parts, op).astype(np.float64)).all()


@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize(("ranks", "place"), [(ranks, place) for ranks in (1, 2, 3, 4) for place in range(ranks)])
def test_the_target_may_be_one_of_the_parts(name: str, ranks: int, place: int) -> None:
    parts = [np.arange(5).astype(name) + 10 * rank for rank in range(ranks)]
    expected = combined(parts, SUM)
    others = [part.copy() for part in parts]
    combine(parts, SUM, parts[place], IDENTITY)
    np.testing.assert_array_equal(parts[place], expected)
    for rank in set(range(ranks)) - {place}:
        np.testing.assert_array_equal(parts[rank], others[rank])


@pytest.mark.parametrize("name", ["float16", "int32"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_elements_are_reduced_to_none(name: str, ranks: int) -> None:
    assert combined([np.empty(0, name)] * ranks, SUM).shape == (0,)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_halves_are_scaled_before_they_are_rounded(name: str, ranks: int) -> None:
    dtype = dtype_named(name)
    parts = [(np.arange(1000) + 7 * rank).astype(dtype) for rank in range(ranks)]
    exact = sum(part.astype(np.float32) for part in parts) * np.float32(1 / ranks)
    np.testing.assert_array_equal(combined(parts, SUM, Scale(1.0, ranks)), np.asarray(exact).astype(dtype))


@pytest.mark.parametrize("name", ["int32", "float32", "complex64"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_reduced_is_scaled_once(name: str, ranks: int) -> None:
    parts = [np.array([4, 8, -12]).astype(name)] * ranks
    np.testing.assert_array_equal(combined(parts, SUM, Scale(1.0, 4)), np.array([1, 2, -3]) * ranks)


# -- Scale, the one place that makes an average of a sum, and scaled_copy ----------------------------------------------


def scaled(values: np.ndarray, scale: Scale) -> np.ndarray:
    target = np.empty_like(values)
    scale.apply(values, target)
    return target


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("ranks", [2, 3, 127, 128, 200, 255, 256, 300])
def test_small_integers_are_divided_by_more_ranks_than_they_can_count(dtype: type, ranks: int) -> None:
    info = np.iinfo(dtype)
    values: np.ndarray = np.arange(info.min, info.max + 1).astype(dtype)
    np.testing.assert_array_equal(scaled(values, Scale(1.0, ranks)), [math.trunc(int(v) / ranks) for v in values])


@pytest.mark.parametrize(("dtype", "values", "divisor"), [
    (np.int64, [2**62 + 2, -2**63, 2**63 - 1, 2**53 + 3], 2), (np.uint64, [2**64 - 1, 2**63 + 3, 5, 0], 3)])
def test_large_integers_are_divided_exactly(dtype: type, values: list[int], divisor: int) -> None:
    expected = [int(math.copysign(1, value)) * (abs(value) // divisor) for value in values]
    np.testing.assert_array_equal(scaled(np.array(values, dtype), Scale(1.0, divisor)), np.array(expected, dtype))


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
    reduction = divided_before(Reduction(SUM, 0.5, Scale(3.0, ranks)), np.dtype(dtype))
    assert (reduction.op, reduction.prescale) == (SUM, 0.5 / ranks)
    assert (reduction.scale.factor, reduction.scale.divisor) == (3.0, 1)
    values = (np.random.default_rng(0).normal(size=(5, 100)) * 10.0 ** np.arange(-20, 30, 10)[:, None]).astype(dtype)
    divided = np.add.accumulate(scaled(values, Scale(1 / ranks)))
    np.testing.assert_array_equal(divided, scaled(np.add.accumulate(values), Scale(1.0, ranks)))


@pytest.mark.parametrize(("ranks", "name"), [(3, "float32"), (2, "int32"), (2, "uint8"), (2, "float16"),
                                             (2, "bfloat16")])
def test_what_would_be_rounded_otherwise_is_not_divided_before(ranks: int, name: str) -> None:
    reduction = Reduction(SUM, 1.0, Scale(1.0, ranks))
    assert divided_before(reduction, dtype_named(name)) is reduction


@pytest.mark.parametrize("name", ["int8", "int64", "uint64", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("scale", [Scale(), Scale(1.0, 3), Scale(0.5, 1)], ids=["identity", "average", "factor"])
def test_scaling_may_be_done_in_place(name: str, scale: Scale) -> None:
    values = np.array([0, 1, 50, 100]).astype(dtype_named(name))
    expected = scaled(values, scale)
    scale.apply(values, values)
    np.testing.assert_array_equal(values, expected)
