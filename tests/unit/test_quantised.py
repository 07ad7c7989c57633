"""8-bit numbers with scales: what is rounded, to what, and what stays."""

import ml_dtypes
import numpy as np
import pytest

from mpistrat.core.arithmetic import Reduction
from mpistrat.core.fusion import BucketPlans
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.quantised import BLOCK, Codec, Quantised, wire_bytes
from mpistrat.core.request import Average, Max, ScaledOp, allreduce_request, specs_of
from mpistrat.core.tuning import QUANTISED_BATCH_BLOCKS

COUNTS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, BLOCK * QUANTISED_BATCH_BLOCKS + 5]


def there_and_back(values: np.ndarray, errors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    codec, wire, read = Codec(), np.empty(wire_bytes(values.size), np.uint8), np.empty(values.size, np.float32)
    codec.encode(values, errors, wire)
    codec.decode(wire, read)
    return read, wire


def rounded(values: np.ndarray) -> np.ndarray:
    """The same block by block."""
    parts = []
    for block in np.split(values, range(BLOCK, values.size, BLOCK)):
        most = np.float32(np.abs(block).max())
        parts.append(np.rint(block * (np.float32(127) / most)) * (most / np.float32(127)))
    return np.concatenate(parts)


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_rounded_to_the_nearest_number(count: int) -> None:
    random = np.random.default_rng(count)
    values = (random.standard_normal(count) * np.exp(3 * random.standard_normal(count))).astype(np.float32)
    read, wire = there_and_back(values)
    np.testing.assert_array_equal(read, rounded(values))
    assert wire.size < count * 1.02 + 8
    assert there_and_back(values)[1].tobytes() == wire.tobytes()


def test_what_is_rounded_off_is_added_to_the_next_values() -> None:
    values, errors, total = np.full(BLOCK, 0.001, np.float32), np.zeros(BLOCK, np.float32), np.zeros(BLOCK)
    values[0] = 1.0
    for _ in range(50):
        total += there_and_back(values, errors)[0]
    np.testing.assert_allclose(total + errors, 50 * values, rtol=1e-5)
    assert np.abs(errors).max() <= 0.5 / 127 * 1.01


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_value_of_a_block_that_is_not_finite_is(value: float) -> None:
    values, errors = np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32), np.full(3 * BLOCK, 0.01, np.float32)
    values[BLOCK + 7] = value
    read, _ = there_and_back(values, errors)
    is_finite = np.isfinite(read).reshape(3, BLOCK)
    assert not is_finite[1].any() and is_finite[[0, 2]].all()
    assert np.isfinite(errors).all() and not errors[BLOCK:2 * BLOCK].any()


def test_zeros_the_smallest_and_the_largest_values_stay_what_they_are() -> None:
    np.testing.assert_array_equal(there_and_back(np.zeros(BLOCK, np.float32))[0], np.zeros(BLOCK))
    for most in (1e-45, 1e-38, 1e-30, 1e38):
        values, errors = np.linspace(-most, most, BLOCK).astype(np.float32), np.zeros(BLOCK, np.float32)
        read, _ = there_and_back(values, errors)
        np.testing.assert_allclose(read, values, atol=max(most / 14, 1e-35))
        assert np.isfinite(errors).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("has_errors", [False, True])
def test_other_floats_are_rounded_from_float32(dtype: type, has_errors: bool) -> None:
    values = np.linspace(-3, 3, 1000).astype(dtype)
    errors = np.zeros(1000, np.float32) if has_errors else None
    np.testing.assert_array_equal(there_and_back(values, errors)[0], rounded(values.astype(np.float32)))


# -- which buckets are sent so -----------------------------------------------------------------------------------------

def reductions(*requests: tuple[str, str, str, str, int], op: object = Average) -> list[Reduction]:
    """Those of the buckets of requests: name, label, wire format, dtype, elements."""
    entries = []
    for name, label, wire, dtype, count in requests:
        array = np.zeros(count, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        labels = (label,) if label else ()
        entries.append(Entry(allreduce_request(name, specs_of([array]), ScaledOp(op), labels, wire_dtype=wire), [array],
                             Handle(name)))
    return [bucket.reduction for bucket in PLANS.plan(entries, 2**20)]


PLANS = BucketPlans(2)


def test_buckets_of_8_bit_numbers_are_of_one_request() -> None:
    assert len(reductions(("a", "", "", "float32", 10_000), ("b", "", "", "float32", 10_000))) == 1
    first, second = reductions(("a", "x", "int8", "float32", 10_000), ("b", "x", "int8", "float32", 10_000))
    assert (first.quantised.name, second.quantised.name) == ("a[0]", "b[0]")


def test_labels_tell_tensors_apart_although_requests_are_equal() -> None:
    (one,), (other,) = [reductions(("a", label, "int8", "float32", 10_000)) for label in "xy"]
    assert (one.quantised.labels, other.quantised.labels) == (("x",), ("y",))
    assert one.quantised.request == other.quantised.request
    assert reductions(("a", "", "int8", "float32", 10_000))[0].quantised == Quantised()


@pytest.mark.parametrize("dtype, count, op, is_quantised", [
    ("float32", 4096, Average, True), ("float32", 4095, Average, False), ("bfloat16", 10_000, Average, True),
    ("float64", 10_000, Average, True), ("int32", 10_000, Average, False), ("complex64", 10_000, Average, False),
    ("float32", 10_000, Max, False)])
def test_only_sums_of_many_floats_are_sent_so(dtype: str, count: int, op: object, is_quantised: bool) -> None:
    reduction, = reductions(("a", "x", "int8", dtype, count), op=op)
    assert (reduction.quantised is not None) == is_quantised
