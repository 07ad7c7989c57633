"""What the tests that run on every rank share: two ways to execute, and what the ranks have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import mpistrat


def eagerly(function: Callable) -> Callable:
    return function


def in_graph(function: Callable) -> Callable:
    import tensorflow as tf
    return tf.function(function, autograph=False)


both_ways = pytest.mark.parametrize("way", [eagerly, in_graph], ids=["eager", "graph"])


def everywhere(value: Any) -> list[Any]:
    """The `value` of each rank, on all of them. Collective."""
    return mpistrat.allgather_object(value)


def assert_equal_on_all_ranks(arrays: Sequence[Any]) -> None:
    """Every rank has the same bits. Collective."""
    everybody = everywhere([np.asarray(array).tobytes() for array in arrays])
    assert all(other == everybody[0] for other in everybody), "not the same bits on all ranks"
