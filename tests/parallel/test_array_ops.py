"""Door C on every rank."""

import numpy as np
import pytest

import mpistrat


def test_sum_of_ranks(rank: int, size: int) -> None:
    result = mpistrat.allreduce(np.arange(5.0) + rank, op=mpistrat.Sum)
    np.testing.assert_array_equal(result, np.arange(5.0) * size + size * (size - 1) / 2)


def test_a_disagreement_on_shape_names_tensor_values_and_ranks(rank: int, size: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=r"odd: the ranks disagree on shape: \(1,\) on ranks \[0\]"):
        mpistrat.allreduce(np.zeros(1 + rank), name="odd")
