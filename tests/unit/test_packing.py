"""A list of arrays as one sequence of elements."""

import numpy as np

from mpistrat.core.packing import FlatLayout, pack, unpack

ARRAYS = [np.arange(6.0).reshape(2, 3), np.array(6.0), np.empty((0, 5)), np.array([[7.0]]), np.arange(8.0, 13.0)]


def empty_like_arrays() -> list[np.ndarray]:
    """Arrays of the same shapes, with other values."""
    return [np.full_like(array, -1) for array in ARRAYS]


def test_arrays_are_copied_out_in_order() -> None:
    part = np.empty(13)
    pack(ARRAYS, part)
    assert part.tolist() == list(range(13))


def test_arrays_are_overwritten_in_order() -> None:
    results = empty_like_arrays()
    unpack(np.arange(13.0), results)
    for array, result in zip(ARRAYS, results, strict=True):
        np.testing.assert_array_equal(result, array)


def test_every_value_is_scaled_on_its_way_out() -> None:
    part = np.empty(13)
    pack(ARRAYS, part, 0.5)
    np.testing.assert_array_equal(part, np.arange(13) / 2)


def test_reading_leaves_the_arrays_as_they_are() -> None:
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    pack([array], np.empty(2), 2.0)
    np.testing.assert_array_equal(array, [1, 2])


def test_nothing_is_copied_of_nothing() -> None:
    pack([np.empty(0)], np.empty(0))
    unpack(np.empty(0), [])


def test_any_part_of_a_line_is_found() -> None:
    line, flat = FlatLayout([array.size for array in ARRAYS]), [array.reshape(-1) for array in ARRAYS]
    assert line.length == 13
    for start in range(14):
        for count in range(14 - start):
            found = np.full(count, -1.0)
            for array, part, here in line.segments(start, count):
                assert part.start < part.stop
                found[here] = flat[array][part]
            assert found.tolist() == list(range(start, start + count))
