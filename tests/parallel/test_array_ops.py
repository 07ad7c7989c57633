"""Door C on every rank: collectives on arrays, for every dtype and shape, and what happens when ranks disagree."""

import contextlib
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.api import array_ops
from mpistrat.core.request import Request
from mpistrat.engine.engine import Engine

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]
HALVES = [np.dtype("float16"), BFLOAT16]
FLOATS = [*HALVES, np.dtype("float32"), np.dtype("float64"), np.dtype(np.longdouble)]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]
BOOL = np.dtype("bool")
NUMERIC = [*INTEGERS, *FLOATS, *COMPLEX]
# Enough to cross the border between one exchange of whole arrays and the exchange of slices, and that between pieces.
SIZES = (1, 2, 7, 1000, 5003, 300_007)


def of_rank(rank: int, dtype: np.dtype) -> np.ndarray:
    """Small whole numbers that every dtype holds, other ones on every rank."""
    return (np.arange(1, 8) + rank).astype(dtype)


def all_equal(value: Any) -> bool:
    everybody = mpistrat.allgather_object(value, name="all_equal")
    return all(other == everybody[0] for other in everybody)


def digest(arrays: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def listed(first: int, last: int) -> str:
    """How messages list the ranks from `first` to `last`."""
    ranks = range(first, last + 1)
    return f"[{first}-{last}]" if len(ranks) > 3 else f"[{', '.join(map(str, ranks))}]"


def in_rank_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum from left to right, halves in float32 and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].astype(np.float32 if dtype in HALVES else dtype)
    for part in parts[1:]:
        total = total + part.astype(total.dtype)
    return total.astype(dtype)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_sum_keeps_the_dtype(dtype: np.dtype, rank: int, size: int) -> None:
    result = mpistrat.allreduce(of_rank(rank, dtype), op=mpistrat.Sum)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, sum(np.arange(1, 8) + r for r in range(size)).astype(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_average_is_the_default(dtype: np.dtype, rank: int, size: int) -> None:
    result = mpistrat.allreduce(of_rank(rank, dtype))
    assert result.dtype == dtype
    wide = result.astype(np.complex128 if dtype in COMPLEX else np.float64)
    tolerance = 2.0**-7 if dtype == BFLOAT16 else 2 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(wide, np.arange(1, 8) + (size - 1) / 2, rtol=tolerance)


@pytest.mark.horovod("average-of-integers")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_average_of_integers_is_truncated_toward_zero(dtype: np.dtype, rank: int, size: int) -> None:
    sign = -1 if dtype.kind == "i" else 1
    values = [sign * (i + 3 * rank) for i in range(7)]
    sums = [sum(i + 3 * r for r in range(size)) for i in range(7)]
    result = mpistrat.allreduce(np.array(values, dtype))
    assert result.dtype == dtype
    assert result.tolist() == [sign * (total // size) for total in sums]


@pytest.mark.horovod("average-of-integers")
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_average_of_large_integers_is_exact(dtype: str, rank: int, size: int) -> None:
    # 2**53 + 1 has no float64, so this is wrong when the division is made in floating point.
    large = 2**53 + 1
    assert mpistrat.allreduce(np.array([large], dtype)).tolist() == [large]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, BOOL], ids=str)
@pytest.mark.parametrize("op, of_list", [(mpistrat.Min, min), (mpistrat.Max, max)], ids=["min", "max"])
def test_min_and_max(op: Any, of_list: Callable, dtype: np.dtype, rank: int, size: int) -> None:
    def values(r: int) -> list[int]:
        return [r % 2, (r + 1) % 2, size - r, r, 1, 0]

    result = mpistrat.allreduce(np.array(values(rank)).astype(dtype), op=op)
    assert result.dtype == dtype
    expected = [of_list(column) for column in zip(*(np.array(values(r)).astype(dtype) for r in range(size)))]
    np.testing.assert_array_equal(result, np.array(expected, dtype))


@pytest.mark.parametrize("dtype", [*NUMERIC, BOOL], ids=str)
def test_product(dtype: np.dtype, rank: int, size: int) -> None:
    result = mpistrat.allreduce(np.array([2, 1, 0, rank]).astype(dtype), op=mpistrat.Product)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.array([2**size % 256, 1, 0, 0]).astype(dtype))


def test_complex_values_are_multiplied_as_such(rank: int, size: int) -> None:
    assert mpistrat.allreduce(np.array([1j]), op=mpistrat.Product).tolist() == [1j**size]


@pytest.mark.horovod("sums-of-integers")
def test_integers_wrap_around(size: int) -> None:
    assert mpistrat.allreduce(np.array([200], np.uint8), op=mpistrat.Sum).tolist() == [200 * size % 256]
    product = mpistrat.allreduce(np.array([7], np.uint8), op=mpistrat.Product)
    assert product.tolist() == [pow(7, size, 256)]
    least = mpistrat.allreduce(np.array([-2**31], np.int32), op=mpistrat.Sum)
    assert least.tolist() == [-2**31 if size % 2 else 0]


@pytest.mark.horovod("sums-of-halves")
@pytest.mark.parametrize("dtype, big", [(np.dtype("float16"), 2048.0), (BFLOAT16, 256.0)], ids=str)
def test_halves_are_summed_in_float32(dtype: np.dtype, big: float, rank: int, size: int) -> None:
    # Above `big` only every second whole number is a half, so adding ones to it one by one would go nowhere.
    result = mpistrat.allreduce(np.array([big if rank == 0 else 1.0]).astype(dtype), op=mpistrat.Sum)
    assert result.tolist() == np.array([big + size - 1], np.float32).astype(dtype).tolist()


@pytest.mark.horovod("op-numbers")
def test_an_operation_may_be_given_as_horovods_number(rank: int, size: int) -> None:
    assert mpistrat.allreduce(np.array([rank]), op=4).tolist() == [size - 1]


def test_prescale_and_postscale(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for dtype in (*FLOATS, *COMPLEX):
        value = np.array([rank + 1]).astype(dtype)
        both = mpistrat.allreduce(value, op=mpistrat.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert both.tolist() == [total * 2], dtype
        assert both.dtype == dtype
    average = mpistrat.allreduce(np.array([rank + 1.0]), prescale_factor=size, postscale_factor=2.0)
    np.testing.assert_allclose(average, [2 * total], rtol=1e-15)


def test_scaled_integers_are_truncated(rank: int, size: int) -> None:
    before = mpistrat.allreduce(np.array([3, -3], np.int32), op=mpistrat.Sum, prescale_factor=0.5)
    assert before.tolist() == [size, -size]
    after = mpistrat.allreduce(np.array([3, -3], np.int32), op=mpistrat.Sum, postscale_factor=0.5)
    assert after.tolist() == [int(3 * size * 0.5), -int(3 * size * 0.5)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_pass_through(dtype: np.dtype, rank: int, size: int) -> None:
    inf, nan = float("inf"), float("nan")
    first = rank == 0
    value = np.array([nan if first else 1, inf if first else 1, -inf if first else 1, inf if first else -inf, 1])
    result = mpistrat.allreduce(value.astype(dtype), op=mpistrat.Sum).astype(np.float64)
    np.testing.assert_array_equal(result, [nan, inf, -inf, nan, size])
    mean = mpistrat.allreduce(value.astype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(mean[:4], [nan, inf, -inf, nan])
    least = mpistrat.allreduce(value.astype(dtype), op=mpistrat.Min).astype(np.float64)
    np.testing.assert_array_equal(least, [nan, 1, -inf, -inf, 1])
    most = mpistrat.allreduce(value.astype(dtype), op=mpistrat.Max).astype(np.float64)
    np.testing.assert_array_equal(most, [nan, inf, 1, inf, 1])


def test_an_overflow_is_infinite_and_raises_no_warning(size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mpistrat.allreduce(np.array([6e4], np.float16), op=mpistrat.Sum).tolist() == [float("inf")]
        assert mpistrat.allreduce(np.array([3e38], np.float32), op=mpistrat.Sum).tolist() == [float("inf")]
        assert np.isnan(mpistrat.allreduce(np.array([np.nan]), op=mpistrat.Sum, prescale_factor=2.0))


# -- shapes and kinds of input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.array(3, np.int16)], ids=lambda v: type(v).__name__)
def test_scalars(value: Any, size: int) -> None:
    result = mpistrat.allreduce(value, op=mpistrat.Sum)
    assert (result.shape, result.dtype, result.item()) == ((), np.asarray(value).dtype, 3 * size)
    assert mpistrat.broadcast(value, size - 1).item() == 3


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 4)], ids=str)
def test_zero_size_arrays(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.int8):
        array = np.empty(shape, dtype)
        for result in (mpistrat.allreduce(array), mpistrat.broadcast(array, 0),
                       mpistrat.grouped_allreduce([array, np.ones(2, dtype)])[0]):
            assert (result.shape, result.dtype) == (shape, dtype)
    gathered = mpistrat.allgather(np.empty(shape))
    assert gathered.shape == (shape[0] * mpistrat.size(), *shape[1:])


@pytest.mark.parametrize("view", [
    lambda a: a[::2], lambda a: a[::-1], lambda a: a.T, lambda a: a[:, 1], lambda a: a[1:3, 1:3],
    lambda a: np.asfortranarray(a), lambda a: np.broadcast_to(a[0], (5, 4)), lambda a: a.setflags(write=False) or a],
    ids=["strided", "reversed", "transposed", "column", "inner", "fortran", "repeated", "read-only"])
def test_arrays_in_any_memory_order(view: Callable, rank: int, size: int) -> None:
    array = view(np.arange(24.0).reshape(6, 4) + rank)
    expected = sum(view(np.arange(24.0).reshape(6, 4) + r) for r in range(size))
    np.testing.assert_array_equal(mpistrat.allreduce(array, op=mpistrat.Sum), expected)
    np.testing.assert_array_equal(mpistrat.broadcast(array, size - 1), view(np.arange(24.0).reshape(6, 4) + size - 1))
    np.testing.assert_array_equal(mpistrat.allgather(array)[:len(array)], view(np.arange(24.0).reshape(6, 4)))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">i8", ">c8"])
def test_big_endian_arrays(dtype: str, rank: int, size: int) -> None:
    array = (np.arange(4) + rank).astype(dtype)
    result = mpistrat.allreduce(array, op=mpistrat.Sum)
    assert result.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(result, np.arange(4) * size + size * (size - 1) // 2)
    np.testing.assert_array_equal(mpistrat.broadcast(array, 0), np.arange(4))


def test_the_byte_order_of_a_rank_does_not_matter(rank: int, size: int) -> None:
    result = mpistrat.allreduce(np.array([1, 2], ">i4" if rank == 0 else "<i4"), op=mpistrat.Sum)
    assert result.tolist() == [size, 2 * size]


def test_lists_and_tuples(rank: int, size: int) -> None:
    assert mpistrat.allreduce([[1, 2], (3, 4)], op=mpistrat.Sum).tolist() == [[size, 2 * size], [3 * size, 4 * size]]
    assert mpistrat.allgather([rank]).tolist() == list(range(size))


# -- groups and large arrays -------------------------------------------------------------------------------------------


# Without longdouble, some of whose bytes are unused and hold anything.
@pytest.mark.parametrize("dtype", [*HALVES, *map(np.dtype, ("float32", "float64", "complex64"))], ids=str)
def test_a_sum_is_the_same_bits_on_all_ranks_alone_and_in_any_group(dtype: np.dtype, rank: int, size: int) -> None:
    def of(r: int) -> list[np.ndarray]:
        generator = np.random.default_rng(r)
        return [(generator.standard_normal(n) * 10.0 ** generator.integers(-3, 3, n)).astype(dtype) for n in SIZES]

    own = of(rank)
    expected = [in_rank_order(parts) for parts in zip(*(of(r) for r in range(size)))]
    alone = [mpistrat.allreduce(array, op=mpistrat.Sum) for array in own]
    together = mpistrat.grouped_allreduce(own, op=mpistrat.Sum)
    reverse = mpistrat.grouped_allreduce([np.ones(3, dtype), *own[::-1]], op=mpistrat.Sum)[:0:-1]
    handles = [mpistrat.allreduce_async(array, op=mpistrat.Sum) for array in own]
    overlapping = [handle.wait() for handle in handles]
    assert digest(alone) == digest(expected)
    assert digest(together) == digest(expected)
    assert digest(reverse) == digest(expected)
    assert digest(overlapping) == digest(expected)
    assert all_equal(digest(alone))


# -- allgather and broadcast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NUMERIC, BOOL, np.dtype("datetime64[s]")], ids=str)
def test_allgather_joins_rows_in_rank_order(dtype: np.dtype, rank: int, size: int) -> None:
    def of(r: int) -> np.ndarray:
        return (np.arange(6).reshape(2, 3) + r).astype(dtype)

    result = mpistrat.allgather(of(rank))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.concatenate([of(r) for r in range(size)]))


@pytest.mark.parametrize("row", [(), (2,), (3, 0), (2, 1, 2)], ids=str)
def test_allgather_of_different_numbers_of_rows(row: tuple[int, ...], rank: int, size: int) -> None:
    # Rank 0 brings nothing.
    result = mpistrat.allgather(np.full((rank, *row), rank, np.int32))
    np.testing.assert_array_equal(result, np.concatenate([np.full((r, *row), r, np.int32) for r in range(size)]))


def test_row_counts_may_change_from_call_to_call(rank: int, size: int) -> None:
    for step in range(6):
        counts = [(r * step) % 4 for r in range(size)]
        result = mpistrat.allgather(np.full(counts[rank], rank), name="changing")
        assert result.tolist() == [r for r in range(size) for _ in range(counts[r])]


def test_broadcast_from_every_root(rank: int, size: int) -> None:
    for root in range(size):
        for dtype in (*NUMERIC, BOOL, np.dtype("datetime64[s]")):
            result = mpistrat.broadcast(of_rank(rank, np.dtype("int64")).astype(dtype), root)
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, of_rank(root, np.dtype("int64")).astype(dtype))


def test_broadcast_keeps_every_bit(rank: int) -> None:
    # A NaN with a payload, a negative zero and a subnormal number.
    bits = np.array([0x7FC01234, 0x80000000, 1], np.uint32)
    own = bits.view(np.float32) if rank == 0 else np.ones(3, np.float32)
    assert mpistrat.broadcast(own, 0).view(np.uint32).tolist() == bits.tolist()


# -- objects and barriers ----------------------------------------------------------------------------------------------


def test_broadcast_object_from_every_root(rank: int, size: int) -> None:
    for root in range(size):
        own = {"rank": rank, "list": [1, "two", None]} if rank == root else threading.Lock()  # which nobody can pickle
        assert mpistrat.broadcast_object(own, root) == {"rank": root, "list": [1, "two", None]}


@pytest.mark.parametrize("differs", [False, True])
def test_objects_that_are_equal_on_all_ranks_are_exchanged_in_one_operation(
        differs: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names, run = [], Engine.run

    def counted(self: Engine, request: Request, *others: Any) -> Any:
        names.append(request.name)
        return run(self, request, *others)

    monkeypatch.setattr(Engine, "run", counted)
    own = {"a": [1, rank * differs]}
    objects, marks = array_ops.exchange(own, (rank, -1), "exchanged", mpistrat.global_process_set)
    assert objects == [{"a": [1, r * differs]} for r in range(size)]
    assert marks == [[r, -1] for r in range(size)]
    assert names == ["exchanged.heads", "exchanged.payloads"][:2 if differs and size > 1 else 1]


def test_allgather_object_of_different_sizes(rank: int, size: int) -> None:
    assert mpistrat.allgather_object("x" * 1000 * rank) == ["x" * 1000 * r for r in range(size)]


def test_functions_of_the_script_travel(rank: int) -> None:
    pytest.importorskip("cloudpickle")
    addend = 40 + rank
    received = mpistrat.broadcast_object((lambda x: x + addend) if rank == 0 else None)
    assert received(2) == 42


@pytest.mark.horovod("barrier")
def test_nobody_passes_a_barrier_before_all_have_come(rank: int, size: int, shared_dir: str) -> None:
    for step in range(3):
        with open(os.path.join(shared_dir, f"{step}-{rank}"), "w"):
            pass
        mpistrat.barrier()
        assert all(os.path.exists(os.path.join(shared_dir, f"{step}-{r}")) for r in range(size))


# -- asynchronous ------------------------------------------------------------------------------------------------------


def test_unnamed_asynchronous_calls_meet_in_the_order_of_calls(rank: int, size: int) -> None:
    handles = [mpistrat.allreduce_async(np.array([i * (rank + 1)]), op=mpistrat.Sum) for i in range(10)]
    assert len({handle.name for handle in handles}) == 10
    assert all_equal([handle.name for handle in handles])
    assert [handle.wait().item() for handle in handles] == [i * size * (size + 1) // 2 for i in range(10)]
    assert all(handle.done() for handle in handles)


def test_the_numbers_of_unnamed_calls_start_again_with_init(rank: int, size: int) -> None:
    with contextlib.suppress(mpistrat.ShutdownError):  # Another rank may have shut down by now.
        for _ in range(rank + 1):
            mpistrat.allreduce_async(np.ones(1))
    mpistrat.shutdown()
    mpistrat.init()
    result = mpistrat.allreduce_async(np.ones(1), op=mpistrat.Sum)
    assert result.wait().tolist() == [size]
    assert result.name == "allreduce.0"


def test_a_group_is_one_asynchronous_operation(rank: int, size: int) -> None:
    handle = mpistrat.grouped_allreduce_async([np.ones(3), np.ones(2, np.int8)], op=mpistrat.Sum)
    assert [r.tolist() for r in handle.wait()] == [[size] * 3, [size] * 2]


# -- one rank's mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, text", [
    (lambda: mpistrat.allreduce(np.array([True]), op=mpistrat.Sum), "Sum of bool has no meaning"),
    (lambda: mpistrat.allreduce([[1, 2], [3]]), "not an array"),
    (lambda: mpistrat.reducescatter(np.ones(1), op=mpistrat.Max), "reducescatter supports Average and Sum"),
    (lambda: mpistrat.reducescatter(1.0), "reducescatter does not support scalar inputs"),
    (lambda: mpistrat.alltoall(1.0), "alltoall needs at least one dimension"),
    (lambda: mpistrat.alltoall(np.ones(mpistrat.size() + 1)), "must be divisible by the number of ranks, ."),
    (lambda: mpistrat.alltoall(np.ones(2), [1]), "splits with one integer for each of the . ranks"),
    (lambda: mpistrat.allreduce(np.ones(1), mpistrat.Sum), "average must be True, False or None"),
    (lambda: mpistrat.allgather(np.float32(1)), "allgather needs at least one dimension"),
    (lambda: mpistrat.broadcast(np.ones(1), mpistrat.size()), "broadcast received invalid root rank"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_what_makes_no_sense_is_refused_before_it_is_sent(call: Callable, text: str, rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(mpistrat.InvalidRequestError, match=text):
            call()
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum).tolist() == [size]


# -- disagreement ------------------------------------------------------------------------------------------------------

ONE = np.ones(2, np.float32)
# What the last rank does, what all others do, what is different, and the two values. Each meets under the name "odd".
DISAGREEMENTS: dict[str, tuple[Callable, Callable, str, str, str]] = {
    "signedness": (
        lambda: mpistrat.allreduce(np.ones(2, np.uint8), name="odd"),
        lambda: mpistrat.allreduce(np.ones(2, np.int8), name="odd"), "dtype", "uint8", "int8"),
    "dimensions": (
        lambda: mpistrat.allreduce(np.ones(()), name="odd"), lambda: mpistrat.allreduce(np.ones(1), name="odd"),
        "shape", "()", "(1,)"),
    "average and sum": (
        lambda: mpistrat.allreduce(ONE, name="odd"), lambda: mpistrat.allreduce(ONE, op=mpistrat.Sum, name="odd"),
        "reduce operation", "Average", "Sum"),
    "barrier": (lambda: mpistrat.barrier(name="odd"), lambda: mpistrat.broadcast(ONE, 0, name="odd"),
                "kind of collective", "barrier", "broadcast"),
    "empty group": (
        lambda: mpistrat.grouped_allreduce([], name="odd"), lambda: mpistrat.grouped_allreduce([ONE], name="odd"),
        "number of tensors", "0", "1"),
    "dtype in a group": (
        lambda: mpistrat.grouped_allreduce([ONE, np.ones(2, np.int8)], name="odd"),
        lambda: mpistrat.grouped_allreduce([ONE, ONE], name="odd"), "dtype of tensor 1", "int8", "float32"),
    "rows of an allgather": (
        lambda: mpistrat.allgather(np.ones((2, 3)), name="odd"),
        lambda: mpistrat.allgather(np.ones((5, 2)), name="odd"), "shape", "(any, 3)", "(any, 2)"),
}


@pytest.mark.horovod("mismatch-kinds")
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_names_values_and_ranks_on_every_rank(what: str, rank: int, size: int) -> None:
    of_last, of_others, aspect, last_value, other_value = DISAGREEMENTS[what]
    with pytest.raises(mpistrat.MismatchError) as raised:
        (of_last if rank == size - 1 else of_others)()
    text = str(raised.value)
    assert text == (f"odd: the ranks disagree on {aspect}: {other_value} on ranks {listed(0, size - 2)}; "
                    f"{last_value} on ranks [{size - 1}].")
    # Only that tensor failed: the name and the engine are good for more, and other tensors were not touched.
    assert mpistrat.allreduce(ONE, op=mpistrat.Sum, name="odd").tolist() == [size, size]
