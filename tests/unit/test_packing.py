"""A list of arrays as one sequence of elements."""

import numpy as np

from mpistrat.core.arithmetic import FlatLayout, pack, unpack

ARRAYS = [np.arange(6.0).reshape(2, 3), np.array(6.0), np.empty((0, 5)), np.array([[7.0]]), np.arange(8.0, 13.0)]


def test_arrays_are_copied_out_in_order_scaled_or_not_and_back() -> None:
    part, results = np.empty(13), [np.full_like(array, -1) for array in ARRAYS]
    pack(ARRAYS, part, 0.5)
    np.testing.assert_array_equal(part, np.arange(13) / 2)
    pack(ARRAYS, part)
    unpack(part, results)
    for array, result in zip(ARRAYS, results, strict=True):
        np.testing.assert_array_equal(result, array)


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
