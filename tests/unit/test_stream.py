"""A list of arrays as one stream of elements."""

import numpy as np
import pytest

from mpistrat.stream import Stream

ARRAYS = [np.arange(6.0).reshape(2, 3), np.array(6.0), np.empty((0, 5)), np.array([[7.0]]), np.arange(8.0, 13.0)]


def empty_like_arrays() -> list[np.ndarray]:
    """Arrays of the same shapes, with other values."""
    return [np.full_like(array, -1) for array in ARRAYS]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7, 12, 13])
def test_arrays_are_copied_out_in_order_whatever_the_step(step: int) -> None:
    stream, seen = Stream(ARRAYS), []
    for start in range(0, 13, step):
        part = np.empty(min(step, 13 - start))
        stream.copy_to(part, start=start)
        seen += part.tolist()
    assert seen == list(range(13))


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7, 12, 13])
def test_arrays_are_overwritten_in_order_whatever_the_step(step: int) -> None:
    results = empty_like_arrays()
    stream, values = Stream(results), np.arange(13.0)
    for start in range(0, 13, step):
        stream.copy_from(values[start:start + step], start)
    for array, result in zip(ARRAYS, results, strict=True):
        np.testing.assert_array_equal(result, array)


def test_every_value_is_scaled_on_its_way_out() -> None:
    part = np.empty(13)
    Stream(ARRAYS).copy_to(part, 0.5)
    np.testing.assert_array_equal(part, np.arange(13) / 2)


def test_reading_leaves_the_arrays_as_they_are() -> None:
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    Stream([array]).copy_to(np.empty(2), 2.0)
    np.testing.assert_array_equal(array, [1, 2])


def test_nothing_is_copied_of_nothing() -> None:
    Stream([np.empty(0)]).copy_to(np.empty(0))
    Stream([]).copy_from(np.empty(0))


def test_any_part_can_be_copied() -> None:
    for start in range(14):
        for count in range(14 - start):
            part = np.empty(count)
            Stream(ARRAYS).copy_to(part, 2.0, start)
            assert part.tolist() == [2.0 * k for k in range(start, start + count)]
            results = empty_like_arrays()
            Stream(results).copy_from(part / 2, start)
            joined = np.concatenate([result.reshape(-1) for result in results])
            assert joined.tolist() == [k if start <= k < start + count else -1 for k in range(13)]
